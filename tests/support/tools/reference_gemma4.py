"""The part of transformers in reference.py for Gemma 4 with pictures. Prompts have `p.places` [n, 4]."""

from pathlib import Path
from typing import Any

import torch
from reference_vl import places
from torch import Tensor
from transformers import AutoModelForImageTextToText

PROMPTS: list[list[int]] = [[], [0], [1, 0], [1, 1, 0]]
"""The pictures of each prompt, by number."""
SIZES = [((10, 200), (1, 37)), ((70, 55), (9, 7))]
"""Height and width of the pictures, and rows and columns of their tokens."""


def pixel_values(frames: Tensor, shape: tuple[int, int], vision: Any) -> tuple[Tensor, Tensor]:
    """What Gemma4ImageProcessor makes of a picture, whose class needs torchvision: patches and their columns and rows."""
    patch = vision.patch_size
    rows, columns = (vision.pooling_kernel_size * side for side in shape)
    resized = torch.nn.functional.interpolate(
        frames.permute(0, 3, 1, 2), (rows * patch, columns * patch), mode="bicubic", antialias=True
    )
    values = resized.float()[0] / 255
    cut = values.view(3, rows, patch, columns, patch).permute(1, 3, 2, 4, 0).reshape(rows * columns, -1)
    row, column = (axis.flatten() for axis in torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij"))
    return cut, torch.stack([column, row], 1)


def padded(pictures: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Pictures of any number of patches as one batch."""
    most = max(len(patches) for patches, _ in pictures)
    pad = torch.nn.functional.pad
    patches = [pad(one, (0, 0, 0, most - len(one))) for one, _ in pictures]
    return torch.stack(patches), torch.stack([pad(at, (0, 0, 0, most - len(at)), value=-1) for _, at in pictures])


def prompt(pictures: list[int], config: Any, generator: torch.Generator) -> list[int]:
    """Random text around the placeholders of pictures."""

    def text(count: int) -> list[int]:
        return torch.randint(20, config.text_config.vocab_size, (count,), generator=generator).tolist()

    ids = text(27)
    for number in pictures:
        rows, columns = SIZES[number][1]
        ids += [*text(3), config.boi_token_id, *[config.image_token_id] * (rows * columns), config.eoi_token_id]
    return ids + text(5)


@torch.inference_mode()
def reference(model_dir: Path, new_tokens: int, job: dict[str, Any]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(job["seed"])
    frames = [torch.randint(0, 256, (1, *size, 3), generator=generator, dtype=torch.uint8) for size, _ in SIZES]
    answer: dict[str, Tensor] = {}
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        model: Any = AutoModelForImageTextToText.from_pretrained(model_dir, dtype=dtype).eval()
        model.generation_config.eos_token_id = None
        config, pooled = model.config, model.config.vision_config.pooling_kernel_size
        pixels = [pixel_values(one, shape, config.vision_config) for one, (_, shape) in zip(frames, SIZES, strict=True)]
        for i, one in enumerate(frames):
            patches, at = padded([pixels[i]])
            features = model.model.get_image_features(patches.to(dtype), at, return_dict=True).pooler_output
            answer[f"media.{i}.{name}"] = features[0][None].float()
            grid = torch.tensor([1, *(pooled * side for side in SIZES[i][1])])
            answer |= {f"media.{i}.frames": one, f"media.{i}.grid": grid}
        for p, numbers in enumerate(PROMPTS):
            shown: dict[str, Tensor] = {}
            if numbers:
                patches, at = padded([pixels[i] for i in numbers])
                shown = {"pixel_values": patches.to(dtype), "image_position_ids": at}

            def arguments(ids: Tensor, shown: dict[str, Tensor] = shown) -> dict[str, Tensor]:
                kinds = (ids == config.image_token_id).int()
                return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": kinds, **shown}

            if dtype is torch.float32:
                given = arguments(torch.tensor([prompt(numbers, config, generator)]))
                found = model.generate(**given, do_sample=False, max_new_tokens=new_tokens, pad_token_id=0)[0]
                answer[f"{p}.token_ids"] = found
                answer[f"{p}.media"] = torch.tensor(numbers, dtype=torch.int64)
                grids = [(1, SIZES[i][1][0] * SIZES[i][1][1]) for i in numbers]
                answer[f"{p}.places"] = places((found == config.image_token_id).int().tolist(), grids)
            answer[f"{p}.{name}"] = model(**arguments(answer[f"{p}.token_ids"][None])).logits[0].float().contiguous()
    return answer
