"""What Prometheus is told: names that people already chart, after `tilerank_`."""

import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from .client import EngineClient
from .completions import Delta

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
        state = self._client.state
        yield GaugeMetricFamily("tilerank_engine_up", "1 if requests can be answered", float(state is not None))
        yield CounterMetricFamily("tilerank_engine_restarts", "Engines after the first", max(self._client.restarts, 0))
        if state is None:
            return
        for name, text, value in (
            ("num_requests_running", "Requests in the batch", state.running),
            ("num_requests_waiting", "Requests in line", state.waiting),
            ("kv_cache_usage_perc", "Share of the cache that running requests have, 1 is all", state.cache_used),
        ):
            yield GaugeMetricFamily(f"tilerank_{name}", text, value)
        for name, text, value in (
            ("prompt_tokens", "Tokens of prompts computed", state.prompt_tokens),
            ("generation_tokens", "Tokens generated", state.generated_tokens),
            ("num_preemptions", "Requests that gave their pages up for older ones", state.preemptions),
        ):
            yield CounterMetricFamily(f"tilerank_{name}", text, value)
