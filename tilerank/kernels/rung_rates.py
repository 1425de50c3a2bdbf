"""The rung for each kind of kernel, chosen by measured rates. CPUID only says which rungs may be tried.

A newer rung is not always the faster one: on some processors the products of bf16 have half the rate of those of fp32.
The kinds are those of `core.kind_of`. Few and many rows of a product are one kind, because a row's bits must not depend
on the rows beside it.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from . import core
from .attention import attention, store_kv
from .graph import Graph
from .kv_pages import PAGE_TOKENS, KVPages
from .linear import linear
from .weight import Format
from .weight_formats import (
    BlockInt8,
    ChannelFp8,
    Float,
    Fp8,
    Gguf,
    GgufA8,
    GroupInt8,
    Int4,
    Int4A8,
    Int8,
    Mxfp4,
    Mxfp4A8,
    Nvfp4,
    TokenInt8,
)

Rates = Mapping[str, Mapping[str, Sequence[float]]]
"""Operations per second by kind and candidate, one for each round. Candidates are in the order in which they are
preferred: rungs, the newest first. `choose` would choose among other versions of a kernel in the same way."""

SLOWEST = 0.85
"""A candidate loses if it has less than this part of the rate of a later one, in every round."""
ROUNDS = 5

_FORMATS: tuple[Format, ...] = (
    Float(torch.bfloat16),
    Int8(),
    TokenInt8(),
    Int4(64),
    Int4A8(64),
    Mxfp4(),
    Mxfp4A8(),
    Nvfp4(),
    Fp8(128, 128),
    BlockInt8(128, 128),
    ChannelFp8(),
    GroupInt8(128),
    *(form(name, 32) for form in (Gguf, GgufA8) for name in ("Q2_K", "Q3_K", "Q4_0", "IQ4_NL", "Q5_0", "Q6_K", "Q8_0")),
)
KINDS = (*(form.layout.format for form in _FORMATS), "attention")
"""What is measured. fp32 is not: its products are the same on all rungs with AVX-512."""

_ROWS = (4, 64)
_N, _K = 128, 1024  # a weight that stays in the second-level cache
_HEADS, _KV_HEADS, _HEAD_DIM, _TOKENS = 8, 2, 128, 256
_SECONDS = 1e-3  # of a measurement


@dataclass(frozen=True)
class _Trial:
    """A call that shows the rate of a kind. operations: of the call; a product and a sum are two."""

    operations: float
    call: Callable[[], Tensor]


def choose(rates: Rates) -> dict[str, str]:
    """Return the candidate for each kind: the first one, unless a later one is clearly faster in every round."""
    return {kind: _fastest(by_candidate) for kind, by_candidate in rates.items()}


def _fastest(by_candidate: Mapping[str, Sequence[float]]) -> str:
    best, *others = by_candidate
    for other in others:
        pairs = zip(by_candidate[best], by_candidate[other], strict=True)
        if all(rate < SLOWEST * faster for rate, faster in pairs):
            best = other
    return best


def texts(rates: Rates) -> list[str]:
    """Return a text for each kind, such as "bf16 on avx512: 64 GFLOP/s (avx512_bf16 34)"."""
    found = []
    for kind, chosen in choose(rates).items():
        median = {name: f"{statistics.median(rounds) / 1e9:.0f}" for name, rounds in rates[kind].items()}
        others = ", ".join(f"{name} {rate}" for name, rate in median.items() if name != chosen)
        found.append(f"{kind} on {chosen}: {median[chosen]} GFLOP/s ({others})")
    return found


def candidates() -> list[str]:
    """Return the rungs among which rates decide, newest first: compiled ones up to that in force.

    There are none if there is nothing to decide: TILERANK_ISA names the rung, the CPU has only one, or AMX is emulated.
    """
    rungs = [rung for rung in core.isa_report()[:-1] if rung.usable]
    if core.given_isa() or len(rungs) < 2 or rungs[0].emulated:
        return []
    names = [rung.name for rung in rungs if core.ISAS.index(rung.name) >= core.ISAS.index(core.isa())]
    return names if len(names) > 1 else []


def measure(rungs: Sequence[str]) -> Rates:
    """Measure every kind on each of `rungs`, in about 0.1 s for each rung, on the threads of the pool.

    The rate of a kind is the geometric mean of those of its trials. Call it before other kernels run: it switches the
    rungs of this process meanwhile.
    """
    before = core.rungs()
    try:
        return {kind: _rates(kind, trials, rungs) for kind, trials in _trials()}
    finally:
        core.use_rungs(before)


def _rates(kind: str, trials: Sequence[_Trial], rungs: Sequence[str]) -> dict[str, list[float]]:
    runs: dict[str, list[tuple[float, Graph, int]]] = {}  # operations, recording and repeats of each trial, by rung
    for rung in rungs:
        core.use_rungs({kind: rung})
        recorded = [(trial.operations, Graph(trial.call)) for trial in trials]
        runs[rung] = [(operations, graph, _repeats(graph)) for operations, graph in recorded]
    rates: dict[str, list[float]] = {rung: [] for rung in rungs}
    for _ in range(ROUNDS):
        for rung in rungs:
            of_trials = [operations / _least_seconds(graph, count) for operations, graph, count in runs[rung]]
            rates[rung].append(statistics.geometric_mean(of_trials))
    return rates


def _repeats(graph: Graph) -> int:
    """Return how often to run `graph` for _SECONDS. The first of three runs reads the operands into the cache."""
    return math.ceil(_SECONDS / _least_seconds(graph, 3))


def _least_seconds(graph: Graph, count: int) -> float:
    """Return the time of the fastest of `count` runs. Other processes on the core interrupt some of the others."""
    seconds = []
    for _ in range(count):
        began = time.perf_counter()
        graph.run()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def _trials() -> Iterator[tuple[str, list[_Trial]]]:
    """Yield every kind with its trials. Each is built when it is needed, so that its operands are in the cache."""
    random = torch.Generator().manual_seed(0)
    for form in _FORMATS:
        weight = form.empty(_N, _K)  # zeros, which take the time of any other numbers
        rows = [torch.randn(m, _K, generator=random).to(form.activations) for m in _ROWS]
        yield form.layout.format, [_Trial(2 * len(x) * _N * _K, partial(linear, x, weight)) for x in rows]
    cache = KVPages.empty(_TOKENS // PAGE_TOKENS, _KV_HEADS, _HEAD_DIM, torch.bfloat16)
    kv = torch.randn(2, _TOKENS, _KV_HEADS, _HEAD_DIM, generator=random).to(torch.bfloat16)
    store_kv(kv[0], kv[1], cache, torch.arange(_TOKENS))
    yield "attention", [_attention(m, cache, random) for m in _ROWS]


def _attention(rows: int, cache: KVPages, random: torch.Generator) -> _Trial:
    """Return attention of the last `rows` tokens of a sequence of _TOKENS."""
    q = torch.randn(rows, _HEADS, _HEAD_DIM, generator=random).to(torch.bfloat16)
    tables = torch.arange(cache.num_pages, dtype=torch.int32).view(1, -1)
    lengths, starts = torch.tensor([_TOKENS], dtype=torch.int32), torch.tensor([0, rows], dtype=torch.int32)
    group = _HEADS // _KV_HEADS
    kv_map = torch.tensor([[head * group, group] for head in range(_KV_HEADS)], dtype=torch.int32)
    operations = 4 * _HEADS * _HEAD_DIM * rows * (_TOKENS - (rows - 1) / 2)
    return _Trial(operations, partial(attention, q, cache, tables, lengths, starts, kv_map, _HEAD_DIM**-0.5))
