"""What Prometheus is told: names that people already chart, after `tilerank_`."""

import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing
from statistics import fmean
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from .client import EngineClient
from .completions import Delta
from .figures import Figures

Family = TypeVar("Family", GaugeMetricFamily, CounterMetricFamily)

_FIRST_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120)
_BETWEEN_S = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
_WHOLE_S = (0.1, 0.3, 1, 2, 5, 10, 20, 60, 120, 300, 600, 1800)


class Metrics:
    def __init__(self, client: EngineClient) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Engine(client))
        self._first = self._histogram("time_to_first_token_seconds", "From a request to its first text", _FIRST_S)
        self._between = self._histogram("inter_token_latency_seconds", "Between pieces of text of a choice", _BETWEEN_S)
        self._whole = self._histogram("e2e_request_latency_seconds", "From a request to its end", _WHOLE_S)
        self._ends = Counter(
            "tilerank_request_success", "Choices by why they ended", ["finished_reason"], registry=self._registry
        )

    def text(self) -> bytes:
        return generate_latest(self._registry)

    async def watch(self, deltas: AsyncIterator[Delta]) -> AsyncGenerator[Delta]:
        """The same deltas; counts what they took."""
        began = time.monotonic()
        last: dict[int, float] = {}
        async with aclosing(deltas):  # type: ignore[type-var]
            async for delta in deltas:
                now = time.monotonic()
                if not last:
                    self._first.observe(now - began)
                if delta.index in last:
                    self._between.observe(now - last[delta.index])
                last[delta.index] = now
                if delta.finish_reason is not None:
                    self._ends.labels(delta.finish_reason).inc()
                yield delta
        self._whole.observe(time.monotonic() - began)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"tilerank_{name}", text, buckets=buckets, registry=self._registry)


class _Engine(Collector):
    """What the engine said last."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client

    def collect(self) -> Iterator[Metric]:
        state, totals = self._client.state, self._client.totals
        yield _gauge("engine_up", "1 if requests can be answered", float(state is not None))
        yield _counter("engine_restarts", "Engines after the first", max(self._client.restarts, 0))
        if state is None:
            return
        yield _gauge("num_requests_running", "Requests in the batch", state.running)
        yield _gauge("num_requests_waiting", "Requests in line", state.waiting)
        yield _gauge("kv_cache_usage_perc", "Share of the cache that running requests have, 1 is all", state.cache_used)
        yield _counter("prompt_tokens", "Tokens of prompts computed", totals.prompt_tokens)
        yield _counter("generation_tokens", "Tokens generated", totals.generated_tokens)
        yield _counter("num_preemptions", "Requests that gave their pages up for older ones", totals.preemptions)
        yield from _of_ranks(self._client.figures)


def _of_ranks(figures: Figures) -> Iterator[Metric]:
    """Labelled by rank, of which there are as many as --tp says."""
    yield _gauge(
        "decode_read_bytes_per_second",
        "Bytes of weights and cache that decode steps of all ranks read, over the time they took; of the last seconds "
        "with any",
        figures.bytes_per_s,
    )
    yield _gauge(
        "all_reduce_wait_share",
        "Share of their steps that ranks waited for others, 0 to 1, the mean of all; of the last seconds with steps",
        fmean(figures.wait_shares or [0.0]),
    )
    what = GaugeMetricFamily(
        "tilerank_rank_info",
        "1; the labels say where a rank runs and on which instructions",
        labels=["rank", "host", "node", "cores", "isa"],
    )
    local = _by_rank(
        GaugeMetricFamily, "rank_local_memory_share", "Share of its memory that is on the nodes of its cores, 0 to 1"
    )
    waited = _by_rank(CounterMetricFamily, "rank_all_reduce_wait_seconds", "Waiting for other ranks in collectives")
    steps = _by_rank(
        CounterMetricFamily, "rank_step_seconds", "Steps; those with pieces of prompts are prefill", "phase"
    )
    read = _by_rank(CounterMetricFamily, "rank_decode_read_bytes", "Weights and cache that decode steps had to read")
    for info, counters in zip(figures.ranks, figures.counters, strict=True):
        rank = str(info.rank)
        what.add_metric([rank, info.host, info.nodes, info.cores, info.isa], 1)
        if info.local_memory is not None:
            local.add_metric([rank], info.local_memory)
        waited.add_metric([rank], counters.waited_s)
        steps.add_metric([rank, "prefill"], counters.prefill_s)
        steps.add_metric([rank, "decode"], counters.decode_s)
        read.add_metric([rank], counters.decode_bytes)
    yield from (what, local, waited, steps, read)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"tilerank_{name}", text, value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"tilerank_{name}", text, value)


def _by_rank(family: type[Family], name: str, text: str, *labels: str) -> Family:
    return family(f"tilerank_{name}", text, labels=["rank", *labels])
