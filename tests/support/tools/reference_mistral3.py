"""The part of transformers in reference.py for Mistral Small 3.1 with pictures. Prompts have `p.places` [n, 4]."""

from pathlib import Path
from typing import Any

import torch
from reference_vl import places
from torch import Tensor
from transformers import AutoModelForImageTextToText, AutoTokenizer

PROMPTS: list[list[int]] = [[], [0], [1, 0], [1, 1, 0]]
"""The pictures of each prompt, by number."""
SIZES = [((30, 200), (2, 8)), ((70, 55), (8, 7))]
"""Height and width of the pictures, and rows and columns of their tokens of 8 x 8 pixels."""
SIDE = 8
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


def pixel_values(frames: Tensor, shape: tuple[int, int]) -> Tensor:
    """What PixtralImageProcessor makes of a picture, whose class needs torchvision."""
    sides = [SIDE * count for count in shape]
    resized = torch.nn.functional.interpolate(frames.permute(0, 3, 1, 2), sides, mode="bicubic", antialias=True)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
    return (resized.float()[0] / 255 - mean) / std


def batch(pictures: list[Tensor]) -> dict[str, Tensor]:
    """Pictures of any size as one batch."""
    rows, columns = (max(one.shape[axis] for one in pictures) for axis in (1, 2))
    padded = [
        torch.nn.functional.pad(one, (0, columns - one.shape[2], 0, rows - one.shape[1])) for one in pictures
    ]
    return {"pixel_values": torch.stack(padded), "image_sizes": torch.tensor([one.shape[1:] for one in pictures])}


def prompt(pictures: list[int], marks: list[int], generator: torch.Generator) -> list[int]:
    """Random text around the tokens of pictures. marks: the ids of a token, of the end of a row and of the last."""
    token, row_end, end = marks

    def text(count: int) -> list[int]:
        return torch.randint(20, token, (count,), generator=generator).tolist()

    ids = text(27)
    for number in pictures:
        rows, columns = SIZES[number][1]
        ids += text(3)
        for row in range(rows):
            ids += [*[token] * columns, end if row == rows - 1 else row_end]
    return ids + text(5)


@torch.inference_mode()
def reference(model_dir: Path, new_tokens: int, job: dict[str, Any]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(job["seed"])
    frames = [torch.randint(0, 256, (1, *size, 3), generator=generator, dtype=torch.uint8) for size, _ in SIZES]
    pixels = [pixel_values(one, shape) for one, (_, shape) in zip(frames, SIZES, strict=True)]
    marks = AutoTokenizer.from_pretrained(model_dir).convert_tokens_to_ids(["[IMG]", "[IMG_BREAK]", "[IMG_END]"])
    answer: dict[str, Tensor] = {}
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        model: Any = AutoModelForImageTextToText.from_pretrained(model_dir, dtype=dtype).eval()
        model.generation_config.eos_token_id = None
        for i, one in enumerate(frames):
            given = batch([pixels[i]])
            given["pixel_values"] = given["pixel_values"].to(dtype)
            features = model.model.get_image_features(**given, vision_feature_layer=-1, return_dict=True).pooler_output
            answer[f"media.{i}.{name}"] = features[0][None].float()
            grid = torch.tensor([1, *(2 * count for count in SIZES[i][1])])
            answer |= {f"media.{i}.frames": one, f"media.{i}.grid": grid}
        for p, numbers in enumerate(PROMPTS):
            shown = batch([pixels[i] for i in numbers]) if numbers else {}
            if shown:
                shown["pixel_values"] = shown["pixel_values"].to(dtype)
            if dtype is torch.float32:
                ids = torch.tensor([prompt(numbers, marks, generator)])
                found = model.generate(
                    input_ids=ids,
                    attention_mask=torch.ones_like(ids),
                    **shown,
                    do_sample=False,
                    max_new_tokens=new_tokens,
                    pad_token_id=0,
                )[0]
                answer[f"{p}.token_ids"] = found
                answer[f"{p}.media"] = torch.tensor(numbers, dtype=torch.int64)
                grids = [(1, SIZES[i][1][0] * SIZES[i][1][1]) for i in numbers]
                answer[f"{p}.places"] = places((found == marks[0]).int().tolist(), grids)
            logits = model(input_ids=answer[f"{p}.token_ids"][None], **shown).logits[0]
            answer[f"{p}.{name}"] = logits.float().contiguous()
    return answer
