"""Engines under test, their answers, and functions of ranks: results must not depend on what runs in the same batch."""

import json
import os
import socket
import threading
from collections import abc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from drafting import with_drafts

from tilerank.kernels import core
from tilerank.parallel.channel import Channel
from tilerank.parallel.group import SingleGroup
from tilerank.parallel.join import Team
from tilerank.runtime.lead import engine as module
from tilerank.runtime.lead.cache_kind import CacheKind
from tilerank.runtime.lead.encodings import EncoderCache
from tilerank.runtime.lead.engine import Engine, Request
from tilerank.runtime.lead.lru_pool import LruPool, PoolEntry
from tilerank.runtime.lead.pages import PagePool
from tilerank.runtime.lead.sampling import SamplingParams
from tilerank.runtime.lead.sequence import Sequence, next_chunk
from tilerank.runtime.lead.sources import SourcePool
from tilerank.runtime.lead.states import StatePool
from tilerank.runtime.lead.transfers.stored_pages import StoredPages
from tilerank.runtime.lead.window_pages import WindowPages
from tilerank.runtime.protocol.areas import Area
from tilerank.runtime.protocol.events import Event, PrefilledEvent, ScoredEvent, TokenEvent
from tilerank.runtime.protocol.page_requests import serve_slots
from tilerank.runtime.protocol.prompt import MM_CACHE_BYTES, Prompt
from tilerank.runtime.protocol.rank_messages import Chunk, Message
from tilerank.runtime.protocol.sizes import PREFILL_CHUNK
from tilerank.runtime.rank.rank_config import RankConfig
from tilerank.runtime.rank.worker import Worker

DEMO = Path(__file__).parents[2] / "assets" / "demo-lm"
LENGTHS = (1, 5, 31, 32, 33, 70, 150)  # around pages of 32 tokens, and above the largest chunk below
Answers = list[list[Any]]  # by request, for every token: [its id, its log-probability, [[id, log-probability], ...]]
Ask = Callable[[Engine, list[Request]], Answers]


def single() -> Team:
    """Return a team of one rank."""
    return Team(SingleGroup(), Channel(0, None, {}, 10.0), core.isa())


def single_engine(model_dir: Path, *, mm_cache_bytes: int = MM_CACHE_BYTES, **config: Any) -> Engine:
    return Engine(Worker(model_dir, single(), RankConfig(**config)), mm_cache_bytes)


def requests() -> list[Request]:
    """Return requests with prompts and answers of different lengths, greedy and sampled with all settings."""
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
        made.append(Request(Prompt(sequences[i][:length]), params))
    return made


def answers(engine: Engine, some: list[Request]) -> Answers:
    found: Answers = [[] for _ in some]
    for number, token in tokens_of(engine, some):
        found[number].append(token)
    return found


def tokens_of(engine: Engine, some: list[Request]) -> Iterator[tuple[int, Any]]:
    """Yield the tokens of the answers as they come, each with the number of its request."""
    for event in engine.generate(some):
        assert event.logprobs is not None
        yield event.request, [event.token_id, event.logprobs.chosen, [list(pair) for pair in event.logprobs.top]]


def one_by_one(engine: Engine, all_of_them: list[Request]) -> Answers:
    return [answers(engine, [request])[0] for request in all_of_them]


def after_preemption(engine: Engine, some: list[Request], tokens: int) -> Answers:
    """Return the answers to requests that all lose their pages when they have so many tokens together. These are then
    computed as a part of the prompts, where latent attention and the delta rule have another form."""
    found: Answers = [[] for _ in some]
    for count, (number, token) in enumerate(tokens_of(engine, some), 1):
        found[number].append(token)
        if count == tokens:
            while engine.scheduler.running:
                engine.scheduler.preempt()
            forget(engine)
    return found


def score_in_chunks(engine: Engine, prompt: Prompt, cuts: list[int]) -> torch.Tensor:
    """Return what Engine.score returns for a prompt, computed in chunks that end at `cuts` and at its end."""
    ends = iter([*cuts, len(prompt.token_ids)])

    def cut(sequence: Sequence, _: int) -> Chunk:
        return next_chunk(sequence, next(ends) - sequence.cached)

    with mock.patch.object(module, "next_chunk", cut):
        return engine.score(prompt)


@contextmanager
def memory_files() -> Iterator[tuple[int, ...]]:
    """The memory between prefill ranks and decode ranks."""
    with ExitStack() as files:
        yield tuple(files.enter_context(open(os.memfd_create("pages"), "rb")).fileno() for _ in Area)


def served(files: abc.Sequence[int]) -> socket.socket:
    """Return a connection over which another host would read slots of the memory between prefill and decode ranks."""
    ours, theirs = socket.socketpair()
    threading.Thread(target=serve_slots, args=[theirs, files], daemon=True).start()
    return ours


def prefilled(engine: Engine, request: Request) -> list[list[int]]:
    """Return the slots in which prefill ranks have put what they compute of the prompt of a request."""
    engine.submit(replace(request, params=SamplingParams(max_new_tokens=0)))
    events: list[Event] = []
    while engine.busy:
        events += engine.step()
    (event,) = events
    assert isinstance(event, PrefilledEvent)
    return event.slots


def spy(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[Message]:
    """Return a list of what rank 0 sends from now on."""
    sent: list[Message] = []
    monkeypatch.setattr(engine.worker, "announce", sent.append)
    return sent


def with_chunk(rows: int, ask: Ask) -> Ask:
    """Return `ask` with at most `rows` prompt tokens in a step."""

    def run(engine: Engine, some: list[Request]) -> Answers:
        forget(engine, chunk_rows=rows)
        return ask(engine, some)

    return run


def pinned(engine: Engine) -> list[PoolEntry]:
    """Return the encodings and sources that sequences have or that are not computed. None of them may be left over."""
    pools = [kind.pool for kind in engine.scheduler.kinds if isinstance(kind, EncoderCache | SourcePool)]
    return [entry for pool in pools for entry in pool.entries if entry.users or not entry.ready]


def evict(engine: Engine, kind: type[EncoderCache] | type[SourcePool]) -> None:
    """Let rank 0 forget encodings or sources that no sequence needs."""
    for found in engine.scheduler.kinds:
        if isinstance(found, kind):
            pool: LruPool[Any] = found.pool
            for entry in list(pool.idle):
                pool.remove(entry)


def forget(
    engine: Engine,
    *,
    pages: int | None = None,
    states: int | None = None,
    chunk_rows: int = PREFILL_CHUNK,
    window_pages: int | None = None,
) -> None:
    """Make the engine share no page of an earlier request any more. pages, states, window_pages: all of the worker's by
    default."""
    worker, scheduler = engine.worker, engine.scheduler
    beside: list[CacheKind[Sequence]] = [StatePool(states or worker.states)] if worker.states else []
    beside += [WindowPages(window_pages or worker.window_pages, worker.window)] if worker.window else []
    sources = [kind for kind in scheduler.kinds if isinstance(kind, SourcePool)]
    encodings = [kind for kind in scheduler.kinds if isinstance(kind, EncoderCache)]
    pool = PagePool(pages or worker.pages, beside)
    stored = [StoredPages(worker, worker.store, pool, encodings)] if worker.store else []
    scheduler.kinds = [*beside, *sources, pool, *stored, *encodings]
    scheduler.chunk_rows, scheduler.preemptions = chunk_rows, 0


WAYS: dict[str, Ask] = {
    "in reverse order": lambda engine, some: answers(engine, some[::-1])[::-1],
    "one by one": one_by_one,
    "one by one in chunks of 13": with_chunk(13, one_by_one),
    "all in chunks of 9": with_chunk(9, answers),
}


def same_answers(
    team: Team, *, cases: list[tuple[str, str]], kv_dtype: str | None = None, model: str = str(DEMO)
) -> dict[str, Any]:
    """Return, on rank 0, by rung and dtype the ways of running the requests whose bits differ from those of one
    batch. model: a directory; its vocabulary has the demo model's ids."""
    result = {}
    for dtype, rung in cases:
        core.force_isa(rung)
        worker = Worker(
            Path(model),
            team,
            RankConfig(
                dtype=getattr(torch, dtype),
                kv_dtype=getattr(torch, kv_dtype) if kv_dtype else None,
                strategy="split",
                max_total_tokens=2048,
                speculative="ngram",
            ),
        )
        if team.group.rank != 0:
            worker.follow()
            continue
        engine = Engine(worker)
        wanted = answers(engine, requests())
        assert [len(answer) for answer in wanted] == [request.params.max_new_tokens for request in requests()]
        differ = [] if answers(engine, requests()) == wanted else ["from shared pages"]
        for name, way in WAYS.items():
            forget(engine)
            differ += [] if way(engine, requests()) == wanted else [name]
        differ += [f"score in chunks of {rows}" for rows in (13, 256) if not same_score(engine, rows)]
        # Pages for the longest request and one or two others: the rest wait. The cache keeps its size, because the size
        # affects how heads are cut.
        forget(engine, pages=7)
        differ += [] if answers(engine, requests()) == wanted else ["waiting for pages"]
        # Sequences that grow by two pages and more, with pages for two of them: the youngest is preempted.
        growing = [replace(request, params=replace(request.params, max_new_tokens=80)) for request in requests()[:4]]
        forget(engine)
        wanted = answers(engine, growing)
        forget(engine, pages=7)
        differ += [] if answers(engine, growing) == wanted else ["giving way"]
        differ += [] if engine.state().preemptions else ["no sequence was preempted"]
        for pages in (worker.pages, 7):
            forget(engine, pages=pages)
            found = answers(with_drafts(engine, growing, wanted), growing)
            differ += [] if found == wanted else [f"with drafts and {pages} pages"]
        differ += [] if engine.state().preemptions else ["no sequence with drafts was preempted"]
        worker.stop()
        result[f"{rung} {dtype}"] = differ
    return result


def same_score(engine: Engine, rows: int) -> bool:
    prompt = requests()[-1].prompt
    whole = engine.score(prompt)
    with mock.patch("tilerank.runtime.lead.engine.SCORE_ROWS", rows):
        return torch.equal(engine.score(prompt), whole)


def scored_prompts(engine: Engine, prompts: list[list[int]]) -> dict[int, list[Any]]:
    """Return [log-probability, rank, [[id, log-probability], ...]] of every token of the prompts but the first, which
    are scored together with a request that decodes."""
    decoding = engine.submit(Request(Prompt(prompts[0][:60]), SamplingParams(max_new_tokens=100, ignore_eos=True)))
    numbers = [
        engine.submit(Request(Prompt(ids), SamplingParams(max_new_tokens=i % 3, prompt_logprobs=2, ignore_eos=True)))
        for i, ids in enumerate(prompts)
    ]
    found: dict[int, list[Any]] = {number: [] for number in numbers}
    ends: dict[int, str | None] = {}
    while engine.busy:
        for event in engine.step():
            if isinstance(event, ScoredEvent):
                found[event.request] += [
                    [one.chosen, one.rank, [list(pair) for pair in one.top]] for one in event.logprobs
                ]
            if isinstance(event, ScoredEvent | TokenEvent):
                ends[event.request] = event.finish_reason
    assert ends == dict.fromkeys([decoding, *numbers], "length")
    return {i: found[number] for i, number in enumerate(numbers)}


def prompt_scores(team: Team, *, prompts: list[list[int]]) -> dict[str, Any]:
    """Return, on rank 0, the scores of prompts, as they come in large and small chunks, and with preemptions."""
    worker = Worker(DEMO, team, RankConfig(dtype=torch.float32, max_total_tokens=4096))
    if team.group.rank != 0:
        worker.follow()
        return {}
    engine, result = Engine(worker), {}
    result["whole"] = scored_prompts(engine, prompts)
    result["again, with shared pages"] = scored_prompts(engine, prompts)
    forget(engine, chunk_rows=13)
    result["in chunks of 13"] = scored_prompts(engine, prompts)
    forget(engine, pages=10, chunk_rows=4)
    result["giving way"] = scored_prompts(engine, prompts)
    assert engine.state().preemptions
    worker.stop()
    return result


def fails(team: Team, *, culprit: int) -> None:
    """Let the step of one rank raise in the middle of a request."""
    worker = Worker(DEMO, team, RankConfig(dtype=torch.bfloat16))
    if team.group.rank == culprit:
        run, calls = worker.run, iter(range(100))

        def broken(*args: Any) -> torch.Tensor:
            if next(calls) == 5:
                raise ValueError("the culprit's own error")
            return run(*args)

        worker.run = broken  # type: ignore[method-assign, assignment]
    if team.group.rank == 0:
        for _ in Engine(worker).generate(
            [Request(Prompt([1, 2, 3]), SamplingParams(max_new_tokens=20, ignore_eos=True))]
        ):
            pass
    else:
        worker.follow()
