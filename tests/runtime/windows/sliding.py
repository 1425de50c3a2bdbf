"""A tiny Qwen3 whose layers slide in turn, as transformers builds it from `layer_types`, and the ways to run it.

The family here has no windows: its mixers are replaced. All ways must give the bits of each request alone.
"""

from pathlib import Path
from typing import Any
from unittest import mock

import torch
from batching import Answers, answers, forget, one_by_one

from tilerank.parallel.join import Team
from tilerank.runtime.lead.engine import Engine, Request
from tilerank.runtime.lead.sampling import SamplingParams
from tilerank.runtime.lead.window_pages import WindowPages
from tilerank.runtime.models.attention import SelfAttention
from tilerank.runtime.protocol.prompt import Prompt
from tilerank.runtime.rank.rank_config import RankConfig
from tilerank.runtime.rank.worker import Worker

NEW_TOKENS = 40


def worker_of(model: str, team: Team, window: int, slides: list[bool], **config: Any) -> Worker:
    """Return a worker whose layers have the window where `slides` says so."""

    def mixer(name: str, *args: Any, **options: Any) -> SelfAttention:
        number = int(name.split(".")[2])
        return SelfAttention(name, *args, **options, window=window if slides[number] else 0)

    with mock.patch("tilerank.runtime.models.qwen.SelfAttention", mixer):
        return Worker(Path(model), team, RankConfig(dtype=torch.float32, max_total_tokens=2048, **config))


def windows_of(engine: Engine) -> WindowPages:
    (kind,) = (kind for kind in engine.scheduler.kinds if isinstance(kind, WindowPages))
    return kind


def requests(prompts: list[list[int]], new_tokens: int = NEW_TOKENS) -> list[Request]:
    params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True, logprobs=1)
    return [Request(Prompt(prompt), params) for prompt in prompts]


def run(
    team: Team, *, model: str, window: int, slides: list[bool], prompts: list[list[int]], **config: Any
) -> dict[str, Any]:
    """Return, on rank 0, the answers of each prompt alone, and the ways that give other bits or do not do what their
    name says."""
    worker = worker_of(model, team, window, slides, **config)
    if team.group.rank != 0:
        worker.follow()
        return {}
    engine = Engine(worker)
    forget(engine)
    alone = one_by_one(engine, requests(prompts))
    differ: list[str] = []

    def check(name: str, found: Answers, *, happened: bool = True) -> None:
        pool = windows_of(engine).pool
        is_left = pool.pinned or any(entry.users for entry in pool.entries)
        if found != alone or not happened or is_left:
            differ.append(name)

    hits = engine.state().hit_tokens
    repeated = one_by_one(engine, requests(prompts))
    most = sum((len(prompt) - 1) // 32 * 32 for prompt in prompts)
    check("each again, from its pages", repeated, happened=engine.state().hit_tokens - hits == most)
    for rows in (33, 7):
        forget(engine, chunk_rows=rows)
        check(f"together, in chunks of {rows}", answers(engine, requests(prompts)))
    longer = [[*prompt, *[token for token, *_ in answer]] for prompt, answer in zip(prompts, alone, strict=True)]
    continued = one_by_one(engine, requests(longer, 8))
    forget(engine, window_pages=8)
    check("with few pages of windows", answers(engine, requests(prompts)))
    forget(engine, pages=7)
    check("giving way", answers(engine, requests(prompts)), happened=engine.state().preemptions > 0)
    forget(engine)
    if one_by_one(engine, requests(longer, 8)) != continued:
        differ.append("each with its answer as a prompt, from pages and anew")
    worker.stop()
    return {"answers": alone, "differ": differ, "pages": worker.window_pages}
