"""The part of transformers in reference.py for Qwen3-VL and Qwen3.5 with pictures and videos. Prompts have `p.positions` [3,
tokens] and `p.places` [n, 4]."""

from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText

KINDS = ("text", "image", "video")
Medium = tuple[str, Tensor, Tensor, Tensor]  # kind, frames, grid, pixel values

PROMPTS: list[list[int]] = [[], [0], [1, 0], [2, 1], [2, 0, 2]]
"""The media of each prompt, by number; two are pictures, the last is a video."""
SIZES = [
    ("image", (1, 70, 50), (1, 6, 4)),
    ("image", (1, 40, 200), (1, 2, 8)),
    ("video", (5, 64, 90), (3, 4, 6)),
]
"""Kind, size of the frames and grid of each medium. The video has an odd number of frames."""


def pixel_values(frames: Tensor, grid: tuple[int, int, int]) -> Tensor:
    """What Qwen2VLImageProcessor and Qwen3VLVideoProcessor make of frames that they resize to `grid`.

    Those classes need torchvision, whose resize of uint8 is this function of torch.
    """
    t, rows, columns = grid
    resized = torch.nn.functional.interpolate(
        frames.permute(0, 3, 1, 2), (16 * rows, 16 * columns), mode="bicubic", antialias=True
    )
    padded = torch.cat([resized, resized[-1:].expand(2 * t - len(resized), -1, -1, -1)])
    normal = (padded.float() - 127.5) / 127.5
    split = normal.view(t, 2, 3, rows // 2, 2, 16, columns // 2, 2, 16)
    return split.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(t * rows * columns, -1)


def media(generator: torch.Generator) -> list[Medium]:
    """Random frames and their pixel values."""
    found: list[Medium] = []
    for kind, (n, height, width), grid in SIZES:
        frames = torch.randint(0, 256, (n, height, width, 3), generator=generator, dtype=torch.uint8)
        found.append((kind, frames, torch.tensor([grid]), pixel_values(frames, grid)))
    return found


def prompt(chosen: list[Medium], config: Any, generator: torch.Generator) -> list[int]:
    """Random text around the placeholders of media."""

    def text(count: int) -> list[int]:
        return torch.randint(0, config.image_token_id - 10, (count,), generator=generator).tolist()

    ids = text(50)
    for kind, _, grid, _ in chosen:
        t, rows, columns = grid[0].tolist()
        token = config.image_token_id if kind == "image" else config.video_token_id
        for _ in range(t):
            placeholders = [token] * (rows * columns // 4)
            ids += [*text(3), config.vision_start_token_id, *placeholders, config.vision_end_token_id]
    return ids + text(5)


def inputs(ids: Tensor, chosen: list[Medium], config: Any) -> dict[str, Tensor]:
    """The arguments of a forward pass over ids [tokens]."""
    kinds = (ids == config.image_token_id).int() + 2 * (ids == config.video_token_id).int()
    found = {"input_ids": ids[None], "mm_token_type_ids": kinds[None], "attention_mask": torch.ones_like(ids[None])}
    for kind, pixels in (("image", "pixel_values"), ("video", "pixel_values_videos")):
        if of_kind := [medium for medium in chosen if medium[0] == kind]:
            found[f"{kind}_grid_thw"] = torch.cat([medium[2] for medium in of_kind])
            found[pixels] = torch.cat([medium[3] for medium in of_kind])
    return found


def positions(model: Any, arguments: dict[str, Tensor]) -> Tensor:
    grids = {key: arguments.get(key) for key in ("image_grid_thw", "video_grid_thw")}
    found: Tensor = model.model.get_rope_index(arguments["input_ids"], arguments["mm_token_type_ids"], **grids)[0]
    return found[:, 0].contiguous()


def places(kinds: list[int], media: list[tuple[int, int]]) -> Tensor:
    """Return [n, 4]: of each run of placeholders, its first token, its length, its medium, and the first token of that.

    kinds: of every token, 0 for text. media: the kind and the number of tokens of each.
    """
    found, taken = [], [0] * len(media)
    for kind, run in groupby(range(len(kinds)), kinds.__getitem__):
        if kind:
            start, *more = run
            number = next(i for i, (of, tokens) in enumerate(media) if of == kind and taken[i] < tokens)
            found.append((start, 1 + len(more), number, taken[number]))
            taken[number] += 1 + len(more)
    return torch.tensor(found, dtype=torch.int64).view(-1, 4)


@torch.inference_mode()
def reference(model_dir: Path, new_tokens: int, job: dict[str, Any]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(job["seed"])
    found = media(generator)
    answer: dict[str, Tensor] = {}
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        model: Any = AutoModelForImageTextToText.from_pretrained(model_dir, dtype=dtype).eval()
        model.generation_config.eos_token_id = None
        for i, (_, frames, grid, pixels) in enumerate(found):
            levels = model.model.visual(pixels.to(dtype), grid_thw=grid, return_dict=True)
            answer[f"media.{i}.{name}"] = torch.stack(
                [levels.pooler_output, *getattr(levels, "deepstack_features", ())]
            ).float()
            answer |= {f"media.{i}.frames": frames, f"media.{i}.grid": grid[0].clone()}
        for p, numbers in enumerate(PROMPTS):
            chosen = [found[number] for number in numbers]
            if dtype is torch.float32:
                arguments = inputs(torch.tensor(prompt(chosen, model.config, generator)), chosen, model.config)
                ids = model.generate(**arguments, do_sample=False, max_new_tokens=new_tokens)[0]
                answer[f"{p}.token_ids"] = ids
                answer[f"{p}.media"] = torch.tensor(numbers, dtype=torch.int64)
                arguments = inputs(ids, chosen, model.config)
                answer[f"{p}.positions"] = positions(model, arguments)
                of_media = [(KINDS.index(kind), int(grid.prod()) // 4) for kind, _, grid, _ in chosen]
                answer[f"{p}.places"] = places(arguments["mm_token_type_ids"][0].tolist(), of_media)
            arguments = inputs(answer[f"{p}.token_ids"], chosen, model.config)
            answer[f"{p}.{name}"] = model(**arguments).logits[0].float()
    return answer
