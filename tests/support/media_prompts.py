"""Prompts with pictures and videos of random pixels, for tiny checkpoints of Qwen3-VL, written down by hand."""

import random

from tilerank.runtime.engine import Request
from tilerank.runtime.prompt import Medium, Place, Prompt
from tilerank.runtime.sampling import SamplingParams

PLACEHOLDER = 7
"""The token id of all placeholders: the engine replaces its embedding."""
PATCH, MERGE = 16, 2


def medium(seed: int, rows: int, columns: int, frames: int = 1) -> Medium:
    """Frames of `rows` x `columns` tokens, a picture if there is one."""
    height, width = rows * MERGE * PATCH, columns * MERGE * PATCH
    pixels = random.Random(seed).randbytes(frames * height * width * 3)
    grid = (-(-frames // 2), rows * MERGE, columns * MERGE)
    return Medium("image" if frames == 1 else "video", pixels, (frames, height, width), grid)


def prompt(*parts: list[int] | Medium) -> Prompt:
    """Text and media in order. Positions are those of M-RoPE (arXiv 2409.12191): each pair of frames starts one after
    the largest position before it, its tokens differ in row and column, and text goes on after the largest."""
    token_ids: list[int] = []
    media: list[Medium] = []
    places: list[Place] = []
    points: list[tuple[int, int, int]] = []
    for part in parts:
        if isinstance(part, list):
            first = 1 + max(map(max, points), default=-1)
            points += [(first + i,) * 3 for i in range(len(part))]
            token_ids += part
            continue
        pairs, rows, columns = part.grid[0], part.grid[1] // MERGE, part.grid[2] // MERGE
        for pair in range(pairs):
            first = 1 + max(map(max, points), default=-1)
            places.append(Place(len(token_ids), rows * columns, len(media), pair * rows * columns))
            points += [(first, first + row, first + column) for row in range(rows) for column in range(columns)]
            token_ids += [PLACEHOLDER] * (rows * columns)
        media.append(part)
    return Prompt(token_ids, media, places, [list(axis) for axis in zip(*points, strict=True)] if media else [])


def text(seed: int, length: int, vocab: int = 500) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(10, vocab) for _ in range(length)]


SMALL, LARGE, VIDEO = medium(1, 2, 3), medium(2, 5, 8), medium(3, 2, 3, frames=5)


def ask(prompt: Prompt, new_tokens: int = 6) -> Request:
    return Request(prompt, SamplingParams(max_new_tokens=new_tokens, ignore_eos=True, logprobs=3))


def mixed() -> list[Request]:
    """Text, pictures of different sizes and a video, in all orders."""
    prompts = [
        prompt(text(1, 5), SMALL, text(2, 9)),
        prompt(text(3, 40)),
        prompt(text(4, 3), LARGE, text(5, 2), SMALL, text(6, 4)),
        prompt(text(7, 33), VIDEO, text(8, 1)),
        prompt(SMALL, SMALL, text(9, 2)),
        prompt(text(10, 1)),
    ]
    return [ask(one, 4 + 3 * i) for i, one in enumerate(prompts)]
