"""The part of transformers in reference.py for Gemma 3 with pictures. Prompts have `p.places` [n, 4]."""

from pathlib import Path
from typing import Any

import torch
from reference_vl import places
from torch import Tensor
from transformers import AutoModelForImageTextToText

PROMPTS: list[list[int]] = [[], [0], [1, 0], [1, 1, 0]]
"""The pictures of each prompt, by number."""
SIZES = [(70, 50), (130, 200)]
"""Height and width of the pictures."""


def pixel_values(frames: Tensor, side: int) -> Tensor:
    """What Gemma3ImageProcessor makes of a picture: its class needs torchvision, whose resize is this function."""
    resized = torch.nn.functional.interpolate(
        frames.permute(0, 3, 1, 2), (side, side), mode="bilinear", antialias=True
    )
    return (resized.float() - 127.5) / 127.5


def prompt(pictures: list[int], config: Any, generator: torch.Generator) -> list[int]:
    """Random text around the placeholders of pictures; the last two lie beside each other but for their marks."""

    def text(count: int) -> list[int]:
        return torch.randint(20, config.image_token_id, (count,), generator=generator).tolist()

    ids = text(27)
    for _ in pictures:
        run = [config.image_token_id] * config.mm_tokens_per_image
        ids += [*text(3), config.boi_token_id, *run, config.eoi_token_id]
    return ids + text(5)


@torch.inference_mode()
def reference(model_dir: Path, new_tokens: int, job: dict[str, Any]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(job["seed"])
    frames = [torch.randint(0, 256, (1, *size, 3), generator=generator, dtype=torch.uint8) for size in SIZES]
    answer: dict[str, Tensor] = {}
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        model: Any = AutoModelForImageTextToText.from_pretrained(model_dir, dtype=dtype).eval()
        model.generation_config.eos_token_id = None
        config, vision = model.config, model.config.vision_config
        pixels = [pixel_values(one, vision.image_size) for one in frames]
        side = vision.image_size // vision.patch_size
        for i, one in enumerate(frames):
            features = model.model.get_image_features(pixels[i].to(dtype), return_dict=True).pooler_output
            answer[f"media.{i}.{name}"] = features.float()
            answer |= {f"media.{i}.frames": one, f"media.{i}.grid": torch.tensor([1, side, side])}
        spare = list(range(config.image_token_id, config.text_config.vocab_size))
        for p, numbers in enumerate(PROMPTS):
            shown = {"pixel_values": torch.cat([pixels[i] for i in numbers]).to(dtype)} if numbers else {}

            def arguments(ids: Tensor, shown: dict[str, Tensor] = shown) -> dict[str, Tensor]:
                kinds = (ids == config.image_token_id).int()
                return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "token_type_ids": kinds, **shown}

            if dtype is torch.float32:
                given = arguments(torch.tensor([prompt(numbers, config, generator)]))
                found = model.generate(
                    **given, do_sample=False, max_new_tokens=new_tokens, pad_token_id=0, suppress_tokens=spare
                )[0]
                answer[f"{p}.token_ids"] = found
                answer[f"{p}.media"] = torch.tensor(numbers, dtype=torch.int64)
                runs = places((found == config.image_token_id).int().tolist(), [(1, config.mm_tokens_per_image)] * len(numbers))
                answer[f"{p}.places"] = runs
            logits = model(**arguments(answer[f"{p}.token_ids"][None])).logits[0]
            answer[f"{p}.{name}"] = logits[:, : config.image_token_id].float().contiguous()
    return answer
