"""The part of transformers in reference.py for Qwen3-Omni with text, pictures, videos and sound.

Its models have {"cases": {name: [part, ...]}, "clips": [n, ...], "short": [n, ...]}. A part is ["text", string], ["image",
height, width], ["audio", samples], or ["video", frames, height, width, samples], whose sound the model hears if it has
samples. The first media are the clips of n samples; those of the cases follow, without encodings. Prompt p is the p-th case,
with `p.positions` [3, tokens] and `p.places` [n, 4]; `<case>.<i>.pixels` and `<case>.<i>.samples` are what part i is made of.
`clip.<n>.mel` is the spectrogram of a clip. `refused`: those of the lengths `short` for which it makes no spectrogram.
"""

import copy
import math
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(sys.prefix, "torchvision")))

import numpy as np
import torch
import tvshim  # noqa: F401 - before transformers
from reference_vl import places
from torch import Tensor
from transformers import AutoProcessor, Qwen3OmniMoeForConditionalGeneration
from transformers.models.qwen3_omni_moe.processing_qwen3_omni_moe import _get_feat_extract_output_lengths

KINDS = ("text", "image", "video", "audio")
SIZE = {"shortest_edge": 128 * 32 * 32, "longest_edge": 768 * 32 * 32}
"""What the processor of Qwen3-Omni gives to that of videos."""


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
def reference(model_dir: Path, new_tokens: int, job: dict[str, Any]) -> dict[str, Tensor]:
    processor: Any = AutoProcessor.from_pretrained(model_dir)
    model: Any = Qwen3OmniMoeForConditionalGeneration.from_pretrained(model_dir, dtype=torch.float32)
    thinker = model.thinker.eval()
    thinker.generation_config.eos_token_id = None
    rounded = copy.deepcopy(thinker).to(torch.bfloat16)
    answer = {"refused": torch.tensor([n for n in job["short"] if is_refused(processor, n)])}
    media = 0

    def add(frames: Tensor, grid: list[int]) -> int:
        nonlocal media
        answer[f"media.{media}.frames"], answer[f"media.{media}.grid"] = frames.clone(), torch.tensor(grid)
        media += 1
        return media - 1

    for n in job["clips"]:
        heard = features(processor, sound(n))
        number = add(torch.from_numpy(sound(n)), [n // 160, 1, 1])
        answer[f"clip.{n}.mel"] = heard["input_features"][0].T.contiguous()
        for dtype, part in (("float32", thinker), ("bfloat16", rounded)):
            rows = part.get_audio_features(**heard, return_dict=True).last_hidden_state
            answer[f"media.{number}.{dtype}"] = rows[None].float().contiguous()
    for p, (name, parts) in enumerate(job["cases"].items()):
        arguments, kept = case_inputs(processor, parts)
        ids = thinker.generate(**arguments, do_sample=False, max_new_tokens=new_tokens, pad_token_id=0)
        arguments |= {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        grids = {kind: iter(arguments.get(f"{kind}_grid_thw", ())) for kind in ("image", "video")}
        numbers, of_media = [], []
        for i, (kind, *_) in enumerate(parts):
            if (pixels := kept.get(f"{i}.pixels")) is not None:
                grid = next(grids[kind]).tolist()
                numbers.append(add(pixels, grid))
                of_media.append((KINDS.index(kind), math.prod(grid) // 4))
            if (samples := kept.get(f"{i}.samples")) is not None:
                numbers.append(add(samples, [len(samples) // 160, 1, 1]))
                of_media.append((KINDS.index("audio"), _get_feat_extract_output_lengths(len(samples) // 160)))
        tokens = [None, *(getattr(thinker.config, f"{kind}_token_id") for kind in KINDS[1:])]
        kinds = [tokens.index(id) if id in tokens else 0 for id in ids[0].tolist()]
        answer |= {f"{name}.{key}": value for key, value in kept.items()}
        answer |= {f"{p}.token_ids": ids[0].clone(), f"{p}.positions": positions(thinker, arguments).long()}
        answer |= {f"{p}.media": torch.tensor(numbers, dtype=torch.int64), f"{p}.places": places(kinds, of_media)}
        for dtype, part in (("float32", thinker), ("bfloat16", rounded)):
            answer[f"{p}.{dtype}"] = part(**arguments).logits[0].float()
    return answer
