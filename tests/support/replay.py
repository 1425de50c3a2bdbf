"""Functions of ranks that compare recorded steps with eager ones."""

import hashlib
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from drafting import Depths, NoDrafts
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tilerank.kernels.graph import Graph
from tilerank.parallel.errors import GroupError
from tilerank.parallel.join import Team
from tilerank.parallel.sharding import KVSplit
from tilerank.runtime.lead.drafting.drafts import Drafting
from tilerank.runtime.lead.drafting.head_drafts import MAX_HEAD_DRAFTS, HeadDrafts
from tilerank.runtime.lead.engine import Engine, Request
from tilerank.runtime.lead.sampling import SamplingParams
from tilerank.runtime.protocol.prompt import Prompt
from tilerank.runtime.protocol.rank_messages import Chunk, Step
from tilerank.runtime.rank.rank_config import RankConfig
from tilerank.runtime.rank.worker import Worker
from tilerank.runtime.step import step_graphs
from tilerank.runtime.step.step_graphs import StepGraphs


class Blindfold(TorchFunctionMode):
    """Forbids the ways to read a tensor's values that torch's dispatcher, and so the recording, cannot detect."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.item, Tensor.__bool__, Tensor.__index__):
            raise AssertionError(f"{func} in a step that is recorded")
        return func(*args, **(kwargs or {}))


class BlindfoldedGraph(Graph):
    def __init__(self, forward: Callable[[], Tensor], *, share: Graph | None = None) -> None:
        def blindfolded() -> Tensor:
            with Blindfold():
                return forward()

        super().__init__(blindfolded, share=share)


@contextmanager
def watched_replays() -> Iterator[set[int]]:
    """Record steps blindfolded. Yields the batch sizes of the steps that are replayed."""
    sizes, replay = set[int](), StepGraphs.replay

    def watched(graphs: StepGraphs, forward: Callable[[], Tensor], size: int, rows: int) -> Tensor:
        sizes.add(size)
        return replay(graphs, forward, size, rows)

    with mock.patch.object(StepGraphs, "replay", watched), mock.patch.object(step_graphs, "Graph", BlindfoldedGraph):
        yield sizes


def digest(logits: Tensor) -> str:
    return hashlib.sha256(logits.contiguous().view(torch.uint8).numpy().data).hexdigest()


def steps_of(worker: Worker, act: Callable[[Engine], object]) -> list[str]:
    """Run `act` on rank 0; return on every rank the number of rows and a hash of the logits of every step, and hashes
    of those of the draft head after it."""
    seen: list[str] = []
    run = worker.run

    def watched(step: Step) -> Tensor:
        logits = run(step)
        seen.append(f"{len(step.chunks)} {digest(logits)}")
        return logits

    worker.run = watched  # type: ignore[method-assign]
    head = worker.drafts
    if head is not None:
        choose = head._argmax

        def chosen(logits: Tensor) -> list[int]:
            seen[-1] += f" {digest(logits)}"
            return choose(logits)

        head._argmax = chosen  # type: ignore[method-assign]
    if worker.team.group.rank == 0:
        act(Engine(worker))
        worker.stop()
    else:
        worker.follow()
    return seen


DECODING = (22, 17, 16, 9, 8, 5, 4, 3, 2, 1)
"""The requests of each step that decodes: every padded size, full and as empty as can be."""
DRAFTING = ("deepseek_v3", "glm4_moe", "glm4_moe_lite", "qwen3_5", "qwen3_5_moe", "qwen3_next")
"""Families whose tiny checkpoints have a draft head."""


def generate(engine: Engine) -> list[tuple[int, int]]:
    """Run requests of many lengths: the batch grows, shrinks through all padded sizes, and all pages are left behind.

    A second round puts other sequences into the rows and pages of the first.
    """
    events = []
    if engine.worker.drafts is not None:
        source = HeadDrafts(engine.worker)
        source._depth = Depths(MAX_HEAD_DRAFTS)
        engine.drafting = Drafting(source, engine.scheduler, NoDrafts())
    for seed in range(2):
        draw = torch.Generator().manual_seed(seed)
        requests = []
        for number in range(DECODING[0]):
            length = int(torch.randint(1, 40, (1,), generator=draw))
            ids = torch.randint(0, engine.card.vocab_size, (length,), generator=draw).tolist()
            new_tokens = 1 + sum(number < running for running in DECODING)  # the first is that of the prompt's step
            params = SamplingParams(
                max_new_tokens=new_tokens, ignore_eos=True, temperature=0.8 * (number % 2), seed=number, logprobs=2
            )
            requests.append(Request(Prompt(ids), params))
        events += [(event.request, event.token_id) for event in engine.generate(requests)]
    return events


def choose_rows(team: Team, *, models: list[str]) -> list[dict[str, Any]]:
    """Compare, for every model in both dtypes, the logits of some rows, and of the tokens after them, with all rows.

    The prompts have 100, 150 and 40 tokens, the first in two pieces, of which the first needs no logits. One more token
    of each follows.
    """
    lengths, wanted = (100, 150, 40), {"some": (1, 0, 3), "most": (29, 140, 0), "none": (0, 0, 0)}
    results = []
    for model in models:
        for dtype in ("float32", "bfloat16"):
            worker = Worker(
                Path(model), team, RankConfig(dtype=getattr(torch, dtype), max_total_tokens=2048, eager=True)
            )
            unused = iter(range(64))

            def logits(
                piece: int, counts: tuple[int, ...], worker: Worker = worker, unused: Iterator[int] = unused
            ) -> list[Tensor]:
                pages = [[next(unused) for _ in range(n // 32 + 1)] for n in lengths]
                ids = [[(7 * i + j * j) % 700 for j in range(n)] for i, n in enumerate(lengths)]
                steps = [
                    [Chunk(0, 0, ids[0][:70], pages[0], piece)],
                    [Chunk(0, 70, ids[0][70:], [], counts[0])]
                    + [Chunk(i, 0, ids[i], pages[i], counts[i]) for i in (1, 2)],
                    [Chunk(i, n, [3], [], 1) for i, n in enumerate(lengths)],
                ]
                finished, found = [0, 1, 2], []  # of the call before
                for chunks in steps:
                    slots = [chunk.sequence for chunk in chunks]
                    windows = [(chunk.sequence, 0, chunk.new_pages) for chunk in chunks if chunk.new_pages]
                    step = Step(chunks, finished, state_slots=slots, window_pages=windows if worker.window else [])
                    found.append(worker.run(step).clone())
                    finished = []
                return found

            _, prompts, after = logits(70, (30, 150, 40))
            case: dict[str, Any] = {"model": Path(model).name, "dtype": dtype, "after": digest(after)}
            for name, counts in wanted.items():
                first, some, same = logits(0, counts)
                ends = zip((30, 180, 220), counts, strict=True)
                rows = [row for end, count in ends for row in range(end - count, end)]
                case[name] = first.shape[0] == 0 and torch.equal(some, prompts[rows]) and torch.equal(same, after)
            results.append(case)
    return results


def compare(team: Team, *, models: list[str], kv_split: KVSplit = "auto") -> list[dict[str, Any]]:
    """Compare replayed steps with eager ones, for every model in both dtypes."""
    results = []
    for model in models:
        for dtype in ("float32", "bfloat16"):
            steps = {}
            for eager in (True, False):
                worker = Worker(
                    Path(model),
                    team,
                    RankConfig(
                        dtype=getattr(torch, dtype),
                        max_total_tokens=DECODING[0] * 128,
                        kv_split=kv_split,
                        states=DECODING[0] + 6,  # some of the snapshots have to go
                        eager=eager,
                        speculative="mtp" if Path(model).name in DRAFTING else "ngram",
                    ),
                )
                with watched_replays() as sizes:
                    steps[eager] = steps_of(worker, generate)
            results.append(
                {
                    "model": Path(model).name,
                    "dtype": dtype,
                    "eager": steps[True],
                    "replayed": steps[False],
                    "sizes": sorted(sizes),
                }
            )
    return results


def stays_eager(team: Team, *, model: str) -> list[str]:
    """Return what the engine logs in a group whose collectives cannot be recorded."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("tilerank.runtime.step.step_graphs")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    worker = Worker(Path(model), team, RankConfig(dtype=torch.float32, max_total_tokens=512))
    steps_of(worker, lambda e: list(e.generate([Request(Prompt([1, 2]), SamplingParams(max_new_tokens=4))])))
    return said


def replay_for_ever(team: Team, *, model: str) -> str:
    worker = Worker(Path(model), team, RankConfig(dtype=torch.bfloat16, max_total_tokens=512))
    events = 0

    def endlessly(engine: Engine) -> None:
        nonlocal events
        while True:
            for _ in engine.generate([Request(Prompt([1, 2, 3]), SamplingParams(max_new_tokens=100, ignore_eos=True))]):
                events += 1
                if events == 150:
                    print("replaying", flush=True)

    with watched_replays() as sizes:
        try:
            steps_of(worker, endlessly)
        except GroupError as error:
            return f"{sorted(sizes)} {error}"
    return "never failed"


def replay_in_lockstep_for_ever(team: Team) -> str:
    """Replay a recorded sum again and again with nothing in between, so that a kill always interrupts a replay."""
    from tilerank.parallel.group import RecordableGroup

    group = team.group
    assert isinstance(group, RecordableGroup)
    from tilerank.kernels import ops

    row = torch.ones(1000, dtype=torch.bfloat16)

    def step() -> Tensor:
        x = ops.repeat_row(row, 4, 1000, torch.bfloat16)
        for _ in range(50):
            x = group.all_reduce(ops.rms_norm(x, row, 0.0))
        return x

    graph = Graph(step)
    try:
        for number in range(10**9):
            group.replay(graph.run)
            if number == 20:
                print("replaying", flush=True)
    except GroupError as error:
        return str(error)
    return "never failed"


def record_collectives(team: Team) -> dict[str, Any]:
    """Compare sums and gathers inside a graph, on values that change, with the same ones run eagerly."""
    from tilerank.kernels import ops
    from tilerank.parallel.group import RecordableGroup

    group = team.group
    assert isinstance(group, RecordableGroup)
    equal = []
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.zeros(3, 5000, dtype=dtype)
        weight = torch.ones(5000, dtype=dtype)

        def step(x: Tensor = x, weight: Tensor = weight) -> Tensor:
            total = group.all_reduce(ops.rms_norm(x, weight, 1e-5))
            return group.all_gather(ops.rms_norm(total, weight, 1e-5))

        graph = Graph(step)
        for seed in range(5):
            x.copy_(torch.randn(3, 5000, generator=torch.Generator().manual_seed(10 * seed + group.rank)))
            group.replay(graph.run)
            found = graph.output.clone()
            equal.append(torch.equal(found, step()) and found.shape == (group.size, 3, 5000))
    team.close()
    try:
        group.replay(graph.run)
    except GroupError as error:
        return {"equal": equal, "closed": str(error)}
    return {"equal": equal, "closed": "nothing was raised"}


def record_a_sum_of_many_rows(team: Team) -> bool:
    """Sum rows that the kernels lay apart (core.empty_rows): the weights of a norm of ones, from every rank."""
    from tilerank.kernels import ops
    from tilerank.parallel.group import RecordableGroup

    group = team.group
    assert isinstance(group, RecordableGroup)
    x, weight = torch.ones(20, 256), torch.arange(256, dtype=torch.float32)
    own, residual = torch.zeros(20, 256), torch.zeros(20, 256)
    apart = []

    def step() -> Tensor:
        rows = ops.add_rms_norm(x, own, weight, 0.0)
        apart.append(not rows.is_contiguous())
        return group.add_rms_norm(rows, residual, weight, 0.0, whole=True)

    graph = Graph(step)
    group.replay(graph.run)
    return apart == [True] and torch.equal(residual, (group.size * weight).expand(20, 256))


def gloo_is_refused(team: Team) -> str:
    from tilerank.kernels import ops
    from tilerank.kernels.errors import KernelError
    from tilerank.parallel.group import RecordableGroup

    assert not isinstance(team.group, RecordableGroup)
    team.group.barrier()  # a rank that ends before another has joined fails it
    x = torch.randn(2, 8)
    try:
        Graph(lambda: team.group.all_reduce(ops.silu_mul(x)))
    except KernelError as error:
        return str(error)
    return "nothing was raised"
