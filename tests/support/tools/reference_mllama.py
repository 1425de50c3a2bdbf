"""The part of transformers in reference.py for mllama. Prompts have `p.source` [n, 3] and `p.visible_ranges` [n, 4] in place of
positions and places: the segments and visible ranges of prompt.py, found in transformers' mask.

transformers takes the outputs of the intermediate layers, but the model was trained with their inputs, so the layers before
them are named to it, unless the job has "options".
"""

from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import MllamaForConditionalGeneration
from transformers.models.mllama import image_processing_pil_mllama as pictures
from transformers.models.mllama.processing_mllama import (
    convert_sparse_cross_attention_mask_to_dense,
    get_cross_attention_token_mask,
)

TILE, PATCH, TILES = 56, 14, 4  # of make_tiny.py
TOKENS = (TILE // PATCH) ** 2 + 1
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
SIZES = [(70, 50), (40, 200), (150, 60)]
"""Height and width of each picture: 2, 4 and 3 tiles, so that two leave empty ones."""
PROMPTS: list[list[int | None]] = [
    [None],
    [0, None],
    [None, 1, None, 0, None],
    [None, 2, 0, None, 1, 2, 1, None],
]
"""The pictures of each prompt, by number, and text."""


def tiling(picture: int) -> tuple[int, int]:
    rows, columns = pictures.get_optimal_tiled_canvas(*SIZES[picture], TILES, TILE)
    return int(rows) // TILE, int(columns) // TILE


def pixel_values(frames: Tensor, picture: int) -> Tensor:
    """What MllamaImageProcessor makes of a picture: [tiles, 3, TILE, TILE], empty tiles included."""
    rows, columns = tiling(picture)
    size = pictures.get_image_size_fit_to_canvas(*SIZES[picture], rows * TILE, columns * TILE, TILE)
    resized = torch.nn.functional.interpolate(
        frames.permute(0, 3, 1, 2), tuple(map(int, size)), mode="bilinear", antialias=True
    )
    padded = torch.nn.functional.pad(resized, (0, columns * TILE - size[1], 0, rows * TILE - size[0]))[0]
    mean, std = (255 * torch.tensor(values)[:, None, None] for values in (MEAN, STD))
    tiles = ((padded.float() - mean) / std).view(3, rows, TILE, columns, TILE).permute(1, 3, 0, 2, 4)
    values = torch.zeros(TILES, 3, TILE, TILE)
    values[: rows * columns] = tiles.reshape(-1, 3, TILE, TILE)
    return values


def prompt(parts: list[int | None], image: int, generator: torch.Generator) -> list[int]:
    """Random text between the tokens of pictures."""
    ids: list[int] = []
    for part in parts:
        text = torch.randint(0, image - 300, (17,), generator=generator).tolist()
        ids += text if part is None else [image]
    return ids


def mask_of(ids: list[int], chosen: list[int], image: int) -> Tensor:
    """Return [tokens, pictures, tiles], 1 where a token may see a tile."""
    tiles = [rows * columns for rows, columns in map(tiling, chosen)]
    ranges = get_cross_attention_token_mask(ids, image)
    return torch.tensor(convert_sparse_cross_attention_mask_to_dense([ranges], [tiles], TILES, len(ids)))[0]


def inputs(ids: Tensor, mask: Tensor, chosen: list[int], values: list[Tensor]) -> dict[str, Tensor]:
    """The arguments of a forward pass over ids [tokens]. mask: of the prompt; what follows sees what its last token
    sees."""
    found = {"input_ids": ids[None], "attention_mask": torch.ones_like(ids[None])}
    if chosen:
        tilings = pictures.get_all_supported_aspect_ratios(TILES)
        found["pixel_values"] = torch.stack([values[i] for i in chosen])[None]
        found["aspect_ratio_ids"] = torch.tensor([[1 + tilings.index(tiling(i)) for i in chosen]])
        found["aspect_ratio_mask"] = torch.tensor(
            [[[int(tile < tiling(i)[0] * tiling(i)[1]) for tile in range(TILES)] for i in chosen]]
        )
        found["cross_attention_mask"] = torch.cat([mask, mask[-1:].expand(len(ids) - len(mask), -1, -1)])[None]
    return found


def encoding(model: Any, picture: int, values: list[Tensor]) -> Tensor:
    arguments = inputs(torch.tensor([0]), torch.ones(1, 1, TILES), [picture], values)
    keys = ("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask")
    found = model.model.vision_model(*(arguments[key] for key in keys)).last_hidden_state
    return model.model.multi_modal_projector(found).view(1, TILES * TOKENS, -1).float()


def source_and_visible_ranges(mask: Tensor, chosen: list[int]) -> tuple[list[list[int]], list[list[int]]]:
    """Segments: the tiles with pixels of all pictures, then the empty ones. Ranges: where rows of the mask change."""
    counts = [rows * columns * TOKENS for rows, columns in map(tiling, chosen)]
    whole = TILES * TOKENS
    source = [[medium, 0, count] for medium, count in enumerate(counts)]
    source += [[medium, count, whole - count] for medium, count in enumerate(counts) if count < whole]
    visible_ranges = []
    for row, group in groupby(range(len(mask)), lambda i: mask[i].flatten().tolist()):
        seen = [medium for medium in range(len(chosen)) if any(row[medium * TILES : (medium + 1) * TILES])]
        first = sum(counts[: seen[0]]) if seen else 0
        count = sum(counts[medium] for medium in seen) if seen else whole * len(chosen)
        visible_ranges.append([next(group), first, count, int(bool(seen))])
    return source, visible_ranges


@torch.inference_mode()
def reference(model_dir: Path, new_tokens: int, job: dict[str, Any]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(job["seed"])
    frames = [torch.randint(0, 256, (1, *size, 3), generator=generator, dtype=torch.uint8) for size in SIZES]
    values = [pixel_values(picture, i) for i, picture in enumerate(frames)]
    answer: dict[str, Tensor] = {}
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        model: Any = MllamaForConditionalGeneration.from_pretrained(model_dir, dtype=dtype).eval()
        model.generation_config.eos_token_id = None
        tower, image = model.model.vision_model, model.config.image_token_index
        if "options" not in job:
            tower.intermediate_layers_indices = [i - 1 for i in tower.intermediate_layers_indices]
        for i, picture in enumerate(frames):
            side = TILE // PATCH
            answer[f"media.{i}.{name}"] = encoding(model, i, values)
            answer |= {
                f"media.{i}.frames": picture,
                f"media.{i}.grid": torch.tensor([1, *(side * count for count in tiling(i))]),
            }
        for p, parts in enumerate(PROMPTS):
            chosen = [part for part in parts if part is not None]
            if dtype is torch.float32:
                ids = torch.tensor(prompt(parts, image, generator))
                mask = mask_of(ids.tolist(), chosen, image) if chosen else torch.zeros(len(ids), 0, TILES)
                arguments = inputs(ids, mask, chosen, values)
                answer[f"{p}.token_ids"] = model.generate(**arguments, do_sample=False, max_new_tokens=new_tokens)[0]
                answer[f"{p}.media"] = torch.tensor(chosen, dtype=torch.int64)
                parts_of_source, visible_ranges = source_and_visible_ranges(mask, chosen) if chosen else ([], [])
                answer[f"{p}.source"] = torch.tensor(parts_of_source, dtype=torch.int64).view(-1, 3)
                answer[f"{p}.visible_ranges"] = torch.tensor(visible_ranges, dtype=torch.int64).view(-1, 4)
            all_ids = answer[f"{p}.token_ids"]
            count = len(all_ids) - new_tokens
            mask = mask_of(all_ids[:count].tolist(), chosen, image) if chosen else torch.zeros(count, 0, TILES)
            answer[f"{p}.{name}"] = model(**inputs(all_ids, mask, chosen, values)).logits[0].float()
    return answer
