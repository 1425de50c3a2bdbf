"""What moss_vl_ref.py computes of MOSS-VL's pictures, videos and prompts, for reference.py. Prompts have `p.source` [n, 3],
`p.visible_ranges` [n, 4] and `p.source_positions` [3, tokens] in place of places."""

from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from moss_vl_ref import MossVLForConditionalGeneration
from torch import Tensor

PATCH, MERGE = 16, 2  # of make_tiny.py
MEDIA = [((1, 70, 50), (1, 6, 4)), ((1, 40, 200), (1, 2, 8)), ((5, 64, 90), (5, 4, 6)), ((1, 90, 64), (1, 6, 4))]
"""Frames, height and width, and grid of each medium; the third is a video."""
PROMPTS: list[list[int | None]] = [
    [None],
    [0, None],
    [None, 1, None, 0, None],
    [None, 2, None],
    [None, 3, 0, 1, None, 2, 3, None],
]
"""The media of each prompt, by number, and text."""


def pixel_values(frames: Tensor, grid: tuple[int, int, int]) -> Tensor:
    """What the processors of pictures and videos make of frames that they resize to `grid`."""
    t, rows, columns = grid
    size = (PATCH * rows, PATCH * columns)
    resized = torch.nn.functional.interpolate(frames.permute(0, 3, 1, 2), size, mode="bicubic", antialias=True)
    split = ((resized.float() - 127.5) / 127.5).view(t, 3, rows // MERGE, MERGE, PATCH, columns // MERGE, MERGE, PATCH)
    return split.permute(0, 2, 5, 3, 6, 1, 4, 7).reshape(t * rows * columns, -1)


def prompt(parts: list[int | None], image: int, generator: torch.Generator) -> list[int]:
    """Random text between the tokens of frames; before a frame of a video its time."""
    ids: list[int] = []
    for part in parts:
        if part is None:
            ids += torch.randint(0, image - 20, (17,), generator=generator).tolist()
            continue
        frames = MEDIA[part][1][0]
        for _ in range(frames):
            ids += torch.randint(0, image - 20, (3 * (frames > 1),), generator=generator).tolist() + [image]
    return ids


def inputs(chosen: list[int], values: list[Tensor]) -> tuple[Tensor | None, Tensor | None]:
    if not chosen:
        return None, None
    return torch.cat([values[i] for i in chosen]), torch.tensor([MEDIA[i][1] for i in chosen])


def what_is_seen(model: Any, ids: Tensor, chosen: list[int], new_tokens: int) -> dict[str, Tensor]:
    """Positions, source and visible ranges. ids: those of generated tokens included, which have no ranges of their own."""
    grids = [(rows // MERGE, columns // MERGE) for i in chosen for rows, columns in [MEDIA[i][1][1:]] * MEDIA[i][1][0]]
    positions, source_positions, seen = model.positions(ids, grids)
    rows, visible_ranges = [0], []
    for grid in grids:
        rows.append(rows[-1] + grid[0] * grid[1] + 1)
    for count, group in groupby(range(len(ids) - new_tokens), lambda i: int(seen[i])):
        visible_ranges += [[next(group), 0, rows[count], 1]] if count else []
    counts = [MEDIA[i][1][0] * (MEDIA[i][1][1] * MEDIA[i][1][2] // MERGE**2 + 1) for i in chosen]
    return {
        "positions": positions,
        "source_positions": torch.zeros(3, 0).long() if source_positions is None else source_positions.contiguous(),
        "visible_ranges": torch.tensor(visible_ranges, dtype=torch.int64).view(-1, 4),
        "source": torch.tensor([[i, 0, count] for i, count in enumerate(counts)], dtype=torch.int64).view(-1, 3),
    }


def encoding(model: Any, values: Tensor, grid: tuple[int, int, int]) -> Tensor:
    """The tokens of every frame and a separator after them, [1, tokens, hidden]."""
    found = model.model.visual(values, torch.tensor([grid])).view(grid[0], -1, model.model.separator_token.shape[0])
    separators = model.model.separator_token.expand(grid[0], 1, -1)
    return torch.cat([found, separators], 1).flatten(0, 1)[None]


@torch.inference_mode()
def reference(model_dir: Path, new_tokens: int, job: dict[str, Any]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(job["seed"])
    frames = [torch.randint(0, 256, (*size, 3), generator=generator, dtype=torch.uint8) for size, _ in MEDIA]
    values = [pixel_values(medium, grid) for medium, (_, grid) in zip(frames, MEDIA, strict=True)]
    answer: dict[str, Tensor] = {}
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        model: Any = MossVLForConditionalGeneration.from_pretrained(model_dir, dtype=dtype)
        for i, (_, grid) in enumerate(MEDIA):
            answer[f"media.{i}.{name}"] = encoding(model, values[i].to(dtype), grid).float()
            answer |= {f"media.{i}.frames": frames[i], f"media.{i}.grid": torch.tensor(grid)}
        for p, parts in enumerate(PROMPTS):
            chosen = [part for part in parts if part is not None]
            pixels, grids = inputs(chosen, values)
            if dtype is torch.float32:
                ids = torch.tensor(prompt(parts, model.config.image_token_id, generator))
                for _ in range(new_tokens):
                    ids = torch.cat([ids, model(ids, pixels, grids)[-1:].argmax(-1)])
                answer[f"{p}.token_ids"] = ids
                answer[f"{p}.media"] = torch.tensor(chosen, dtype=torch.int64)
                answer |= {f"{p}.{key}": value for key, value in what_is_seen(model, ids, chosen, new_tokens).items()}
            answer[f"{p}.{name}"] = model(answer[f"{p}.token_ids"], pixels, grids).float()
    return answer
