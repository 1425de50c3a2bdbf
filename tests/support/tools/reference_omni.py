"""What transformers computes of text, pictures, videos and sound with Qwen3-Omni: the oracle of tests/runtime/omni.

    python reference_omni.py JOB.json

JOB.json: {"out": directory, "models": [{"name", "seed", ...dims}, ...], "cases": {name: [part, ...]}, "clips": [n,
...], "short": [n, ...], "new_tokens": n}. A part is ["text", string], ["image", height, width], ["audio", samples], or ["video", frames,
height, width, samples], whose sound the model hears if it has samples. For every model it makes the checkpoint
`out/<name>` and writes `out/<name>.safetensors` with, for each case: `<case>.ids` (the prompt and n greedy tokens),
`<case>.positions` [3, tokens], `<case>.logits` of one forward pass, and `<case>.<i>.pixels` or `<case>.<i>.samples` of
part i; and for each clip of n samples `clip.<n>.samples`, `clip.<n>.mel` and `clip.<n>.rows`, the output of the tower.
All in fp32, but `clip.<n>.bfloat16`, the output of the tower in bf16. `refused`: those of the lengths `short` for which it
makes no spectrogram.
"""

import copy
import json
import shutil
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(sys.prefix, "torchvision")))
sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import tiny
import torch
import tvshim  # noqa: F401 - before transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoProcessor, Qwen3OmniMoeForConditionalGeneration
from transformers.models.qwen3_omni_moe.processing_qwen3_omni_moe import _get_feat_extract_output_lengths

SIZE = {"shortest_edge": 128 * 32 * 32, "longest_edge": 768 * 32 * 32}
"""What the processor of Qwen3-Omni gives to that of videos."""


CHANNELS = 104
"""Of the convolutions: four tiles of 32, one of them in part, in place of the one of make_tiny.py."""


def vary(model_dir: Path) -> None:
    """Give the convolutions of a checkpoint CHANNELS channels, with random weights, and let the probabilities of chosen
    experts be those among all."""
    config = json.loads((model_dir / "config.json").read_text())
    config["thinker_config"]["text_config"]["norm_topk_prob"] = False
    audio = config["thinker_config"]["audio_config"]
    audio["downsample_hidden_size"] = CHANNELS
    (model_dir / "config.json").write_text(json.dumps(config))
    inputs = {"conv2d1": 1, "conv2d2": CHANNELS, "conv2d3": CHANNELS}
    shapes = {f"{name}.weight": (CHANNELS, count, 3, 3) for name, count in inputs.items()}
    shapes |= {f"{name}.bias": (CHANNELS,) for name in inputs}
    shapes |= {"conv_out.weight": (audio["d_model"], CHANNELS * audio["num_mel_bins"] // 8)}
    draw = torch.Generator().manual_seed(4)
    for file in model_dir.glob("*.safetensors"):
        tensors = load_file(file)
        for name in tensors:
            if shape := shapes.get(name.removeprefix("thinker.audio_tower.")):
                width = 1.5 * max(1, torch.Size(shape[1:]).numel()) ** -0.5
                tensors[name] = (torch.randn(shape, generator=draw) * width).to(tensors[name].dtype)
        save_file(tensors, file, metadata={"format": "pt"})


def sound(samples: int) -> Any:
    """A tone that rises, and noise."""
    t = np.arange(samples) / 16000
    tone = 0.4 * np.sin(2 * np.pi * (300 * t + 200 * t * t))
    return (tone + 0.02 * np.random.default_rng(samples).standard_normal(samples)).astype(np.float32)


def features(processor: Any, samples: Any) -> dict[str, Any]:
    """The spectrogram of one clip. Torch's transform needs more than 200 samples."""
    if len(samples) <= 200:
        extract = processor.feature_extractor._np_extract_fbank_features
        mel = torch.from_numpy(extract(samples[None], "cpu")).float()
        mask = torch.ones(1, mel.shape[2], dtype=torch.long)
    else:
        found = processor.feature_extractor(
            samples,
            sampling_rate=16000,
            padding=True,
            truncation=False,
            return_attention_mask=True,
            return_tensors="pt",
        )
        mel, mask = found["input_features"], found["attention_mask"]
    return {"input_features": mel, "feature_attention_mask": mask.long()}


def case_inputs(processor: Any, parts: list[Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The arguments of the model for a prompt, and what its media are made of."""
    text, found, kept, draw = "", dict[str, Any](), dict[str, Tensor](), np.random.default_rng(1)

    def hear(i: int, samples: int) -> dict[str, Any]:
        clip = sound(samples)
        kept[f"{i}.samples"] = torch.from_numpy(clip)
        heard = features(processor, clip)
        found.update(heard)
        length = int(heard["feature_attention_mask"].sum())
        return {"num_audio_tokens": [_get_feat_extract_output_lengths(length)]}

    for i, (kind, *what) in enumerate(parts):
        if kind == "text":
            text += what[0]
        elif kind == "image":
            pixels = draw.integers(0, 256, (*what, 3), dtype=np.uint8)
            kept[f"{i}.pixels"] = torch.from_numpy(pixels[None])
            seen = processor.image_processor(images=[pixels], return_tensors="pt")
            found |= dict(seen)
            text += f"<|vision_start|>{processor.replace_image_token(seen, 0)}<|vision_end|>"
        elif kind == "audio":
            text += f"<|audio_start|>{processor.replace_audio_token(hear(i, what[0]), 0)}<|audio_end|>"
        else:
            *size, samples = what
            pixels = draw.integers(0, 256, (*size, 3), dtype=np.uint8)
            kept[f"{i}.pixels"] = torch.from_numpy(pixels)
            seen = processor.video_processor(videos=[pixels], size=SIZE, return_tensors="pt")
            found |= {key: seen[key] for key in ("pixel_values_videos", "video_grid_thw")}
            seconds = [processor.video_processor.temporal_patch_size / 1.0]
            found["video_second_per_grid"] = torch.tensor(seconds)
            known = dict(seen) | {"video_second_per_grid": seconds}
            if samples:
                found["use_audio_in_video"] = True
                tokens = processor.replace_video_with_audio_token(
                    known, 0, hear(i, samples), 0, position_id_per_seconds=13.0
                )
            else:
                tokens = processor.replace_video_token(known, 0, load_audio_from_video=False)
            text += f"<|vision_start|>{tokens}<|vision_end|>"
    ids = processor.tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    return found | {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, kept


def positions(thinker: Any, arguments: dict[str, Any]) -> Tensor:
    mask = arguments.get("feature_attention_mask")
    found: Tensor = thinker.model.get_rope_index(
        arguments["input_ids"],
        arguments.get("image_grid_thw"),
        arguments.get("video_grid_thw"),
        arguments["attention_mask"],
        arguments.get("use_audio_in_video", False),
        None if mask is None else mask.sum(1),
        arguments.get("video_second_per_grid"),
    )[0]
    return found[:, 0].contiguous()


def is_refused(processor: Any, samples: int) -> bool:
    """Does transformers raise an error for a clip?"""
    try:
        features(processor, sound(samples))
    except ValueError:
        return True
    return False


@torch.inference_mode()
def reference(model_dir: Path, job: dict[str, Any]) -> dict[str, Tensor]:
    processor: Any = AutoProcessor.from_pretrained(model_dir)
    model: Any = Qwen3OmniMoeForConditionalGeneration.from_pretrained(model_dir, dtype=torch.float32)
    thinker = model.thinker.eval()
    thinker.generation_config.eos_token_id = None
    answer = {"refused": torch.tensor([n for n in job["short"] if is_refused(processor, n)])}
    rounded = copy.deepcopy(thinker).to(torch.bfloat16)
    for n in job["clips"]:
        clip = sound(n)
        heard = features(processor, clip)
        rows = thinker.get_audio_features(**heard, return_dict=True).last_hidden_state
        answer |= {f"clip.{n}.samples": torch.from_numpy(clip), f"clip.{n}.rows": rows.contiguous()}
        rows = rounded.get_audio_features(**heard, return_dict=True).last_hidden_state
        answer[f"clip.{n}.bfloat16"] = rows.float()
        answer[f"clip.{n}.mel"] = heard["input_features"][0].T.contiguous()
    for name, parts in job["cases"].items():
        arguments, kept = case_inputs(processor, parts)
        ids = thinker.generate(**arguments, do_sample=False, max_new_tokens=job["new_tokens"], pad_token_id=0)
        arguments |= {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        answer |= {f"{name}.{key}": value for key, value in kept.items()}
        answer |= {f"{name}.ids": ids[0].clone(), f"{name}.positions": positions(thinker, arguments)}
        answer[f"{name}.logits"] = thinker(**arguments).logits[0].float()
    return answer


def main(job: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    out = Path(job["out"])
    for model in job["models"]:
        dims = {key: value for key, value in model.items() if key not in ("name", "seed")}
        shutil.move(tiny.make_checkpoint("qwen3_omni_moe", out, model["seed"], **dims), out / model["name"])
        vary(out / model["name"])
        save_file(reference(out / model["name"], job), out / f"{model['name']}.safetensors")


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
