"""What runs together must not change what comes out: rank-side functions of test_runtime_engine.py."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tilerank.kernels import core
from tilerank.parallel.join import Team
from tilerank.runtime import engine as module
from tilerank.runtime.cache import BlockPool
from tilerank.runtime.engine import Engine, Request
from tilerank.runtime.sampling import SamplingParams

DEMO = Path(__file__).parent.parent / "assets" / "demo-lm"
LENGTHS = (1, 5, 31, 32, 33, 70, 150)  # around pages of 32 tokens, and above the largest chunk below
Answers = list[list[Any]]  # by request: [token id, log-probability of it, [[id, log-probability], ...]] of every token
Ask = Callable[[Engine, list[Request]], Answers]


def requests() -> list[Request]:
    """Prompts of different lengths, new tokens of different number, greedy and sampled in all ways."""
    sequences = json.loads((DEMO / "eval_tokens.json").read_text())["sequences"]
    made = []
    for i, length in enumerate(LENGTHS):
        params = SamplingParams(
            max_new_tokens=(12, 3, 9, 6)[i % 4],
            temperature=(0.0, 0.7, 1.3)[i % 3],
            top_k=(0, 40)[i % 2],
            top_p=(1.0, 0.9)[i // 2 % 2],
            seed=1000 + i,
            ignore_eos=True,
            logprobs=3,
        )
        made.append(Request(sequences[i][:length], params))
    return made


def answers(engine: Engine, some: list[Request]) -> Answers:
    found: Answers = [[] for _ in some]
    for event in engine.generate(some):
        assert event.logprobs is not None
        found[event.request].append(
            [event.token_id, event.logprobs.chosen, [list(pair) for pair in event.logprobs.top]]
        )
    return found


def one_by_one(engine: Engine, all_of_them: list[Request]) -> Answers:
    return [answers(engine, [request])[0] for request in all_of_them]


def with_chunk(rows: int, ask: Ask) -> Ask:
    """`ask` with steps of at most so many rows, unless more sequences than that decode."""

    def run(engine: Engine, some: list[Request]) -> Answers:
        whole, module.PREFILL_CHUNK = module.PREFILL_CHUNK, rows
        try:
            return ask(engine, some)
        finally:
            module.PREFILL_CHUNK = whole

    return run


WAYS: dict[str, Ask] = {
    "in reverse order": lambda engine, some: answers(engine, some[::-1])[::-1],
    "one by one": one_by_one,
    "one by one in chunks of 13": with_chunk(13, one_by_one),
    "all in chunks of 9": with_chunk(9, answers),
}


def same_answers(team: Team, *, cases: list[tuple[str, str]]) -> dict[str, Any]:
    """By rung and dtype: the ways to run the requests whose bits differ from those of one batch; on rank 0."""
    result = {}
    for dtype, rung in cases:
        core.force_isa(rung)
        engine = Engine(DEMO, team, dtype=getattr(torch, dtype), strategy="split", max_total_tokens=2048)
        if team.group.rank != 0:
            engine.follow()
            continue
        wanted = answers(engine, requests())
        assert [len(answer) for answer in wanted] == [request.params.max_new_tokens for request in requests()]
        differ = [name for name, way in WAYS.items() if way(engine, requests()) != wanted]
        differ += [f"score in chunks of {rows}" for rows in (13, 256) if not same_score(engine, rows)]
        # Pages for the longest request and one or two others: the rest wait. The same cache, because its size has a say
        # in how heads are cut.
        engine._pool = BlockPool(7)
        differ += [] if answers(engine, requests()) == wanted else ["waiting for pages"]
        engine.stop()
        result[f"{rung} {dtype}"] = differ
    return result


def same_score(engine: Engine, rows: int) -> bool:
    token_ids = requests()[-1].prompt_token_ids
    whole = engine.score(token_ids)
    usual, module.SCORE_CHUNK = module.SCORE_CHUNK, rows
    try:
        return torch.equal(engine.score(token_ids), whole)
    finally:
        module.SCORE_CHUNK = usual


def fails(team: Team, *, culprit: int) -> None:
    """One rank's step raises in the middle of a request."""
    engine = Engine(DEMO, team, dtype=torch.bfloat16)
    if team.group.rank == culprit:
        run, calls = engine._run, iter(range(100))

        def broken(*args: Any) -> torch.Tensor:
            if next(calls) == 5:
                raise ValueError("the culprit's own error")
            return run(*args)

        engine._run = broken  # type: ignore[method-assign, assignment]
    if team.group.rank == 0:
        for _ in engine.generate([Request([1, 2, 3], SamplingParams(max_new_tokens=20, ignore_eos=True))]):
            pass
    else:
        engine.follow()
