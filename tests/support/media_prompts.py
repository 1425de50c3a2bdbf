"""Prompts with pictures and videos of random pixels, for tiny checkpoints of Qwen3-VL, written down by hand.

After them: rank-side functions of runtime/test_media_engine.py.
"""

import random
from pathlib import Path
from typing import Any

import torch
from batching import Answers, answers, forget, one_by_one

from tilerank.parallel.join import Team
from tilerank.runtime.lead import media_encoding
from tilerank.runtime.lead.engine import Engine, Request
from tilerank.runtime.lead.sampling import SamplingParams
from tilerank.runtime.protocol.prompt import Medium, PlaceholderRange, Prompt
from tilerank.runtime.rank.rank_config import RankConfig
from tilerank.runtime.rank.worker import Worker

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
    places: list[PlaceholderRange] = []
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
            places.append(PlaceholderRange(len(token_ids), rows * columns, len(media), pair * rows * columns))
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


def same_answers(team: Team, *, model: str) -> list[str]:
    """The ways to run the requests whose bits differ from those of single ones; on rank 0."""
    wanted: Answers | None = None
    differ = []
    for eager in (True, False):
        worker = Worker(Path(model), team, RankConfig(dtype=torch.bfloat16, max_total_tokens=2048, eager=eager))
        if team.group.rank != 0:
            worker.follow()
            continue
        engine = Engine(worker, 50_000)  # bytes of the largest prompt's encodings and a little more
        wanted = wanted or one_by_one(engine, mixed())
        for rows in (2048, 7):
            forget(engine, chunk_rows=rows)
            differ += [] if answers(engine, mixed()) == wanted else [f"eager {eager}, {rows} rows"]
        forget(engine)
        cancel_in_every_piece(engine)
        differ += [] if answers(engine, mixed()) == wanted else [f"eager {eager}, after cancelled encodes"]
        worker.stop()
    return differ


def cancel_in_every_piece(engine: Engine) -> None:
    usual = media_encoding.ALONE_S, media_encoding.operations_of_piece
    media_encoding.ALONE_S, media_encoding.operations_of_piece = 0.0, smallest
    for steps in range(0, 30, 5):
        number = engine.submit(ask(prompt(text(1, 3), medium(100 + steps, 3, 4), text(2, 2))))
        for _ in range(steps):
            engine.step()
        engine.cancel(number)
    media_encoding.ALONE_S, media_encoding.operations_of_piece = usual


def smallest(dtype: torch.dtype, ranks: int) -> float:
    """Operations of a piece, for `media_encoding.operations_of_piece`: every task of an encode is a piece."""
    return 1.0


def fails(team: Team, *, model: str, culprit: int) -> None:
    """One rank's encoder raises in the middle of an encode."""
    worker = Worker(Path(model), team, RankConfig(dtype=torch.bfloat16, max_total_tokens=512))
    if team.group.rank == culprit:
        encoder: Any = worker.encoder
        encode = encoder.encode

        def broken(*args: Any) -> Any:
            pieces = encode(*args)
            yield next(pieces)
            yield next(pieces)
            raise ValueError("the culprit's own error")

        encoder.encode = broken
    if team.group.rank == 0:
        media_encoding.operations_of_piece = smallest
        for _ in Engine(worker).generate([ask(prompt(text(1, 3), medium(1, 3, 4), text(2, 2)))]):
            pass
    else:
        worker.follow()
