"""Pictures over several ranks: rank-side functions of runtime/test_media_engine.py."""

from pathlib import Path
from typing import Any

import torch
from batching import Answers, answers, forget, one_by_one
from media_prompts import ask, medium, mixed, prompt, text

from tilerank.parallel.join import Team
from tilerank.runtime import media_encoding
from tilerank.runtime.engine import Engine
from tilerank.runtime.worker import Worker


def same_answers(team: Team, *, model: str) -> list[str]:
    """The ways to run the requests whose bits differ from those of single ones; on rank 0."""
    wanted: Answers | None = None
    differ = []
    for eager in (True, False):
        worker = Worker(Path(model), team, dtype=torch.bfloat16, max_total_tokens=2048, eager=eager)
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
    usual, media_encoding.ALONE_S = media_encoding.ALONE_S, 0.0
    for steps in range(6):
        number = engine.submit(ask(prompt(text(1, 3), medium(100 + steps, 3, 4), text(2, 2))))
        for _ in range(steps):
            engine.step()
        engine.cancel(number)
    media_encoding.ALONE_S = usual


def fails(team: Team, *, model: str, culprit: int) -> None:
    """One rank's encoder raises in the middle of an encode."""
    worker = Worker(Path(model), team, dtype=torch.bfloat16, max_total_tokens=512)
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
        for _ in Engine(worker).generate([ask(prompt(text(1, 3), medium(1, 3, 4), text(2, 2)))]):
            pass
    else:
        worker.follow()
