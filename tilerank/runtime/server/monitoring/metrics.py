"""Prometheus metrics. Names after `tilerank_` are those that dashboards of other servers already use."""

import time
from collections import deque
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from statistics import fmean
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ...protocol.speech_settings import SAMPLE_RATE
from ..chat.deltas import Delta
from ..chat.generation import Generation
from ..link.client import EngineClient
from ..link.rank_stats import RankStats

Family = TypeVar("Family", GaugeMetricFamily, CounterMetricFamily)

_TTFT_BUCKETS_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120)
_INTER_TOKEN_BUCKETS_S = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
_QUEUE_BUCKETS_S = (0.001, 0.01, 0.1, 0.5, 1, 2, 5, 10, 20, 60, 120, 300)
_TOKENS_BUCKETS = (1, 16, 64, 256, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144)
_E2E_BUCKETS_S = (0.1, 0.3, 1, 2, 5, 10, 20, 60, 120, 300, 600, 1800)
KEPT = 2000
"""Latest measurements, of which the status page shows percentiles. Histograms of all are in the metrics."""


class LatencyWindow:
    """The last KEPT values, in seconds."""

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=KEPT)

    def add(self, value: float) -> None:
        self._values.append(value)

    def percentiles(self) -> dict[str, float] | None:
        """Return the 50th, 95th and 99th percentile, the nearest value each; None without values."""
        ordered = sorted(self._values)
        if not ordered:
            return None
        return {f"p{p}": ordered[round(p / 100 * (len(ordered) - 1))] for p in (50, 95, 99)}


@dataclass
class _ChoiceTimes:
    """When the first and the last text of a choice came, its tokens, and whether its sound has begun."""

    first: float
    last: float
    tokens: int = 0
    has_sound: bool = False


class Metrics:
    """The metrics of a server: latencies, measured in this process, and the reports of its engines.

    model: its name, a label of every series. speaks: whether there are series of speech. first_token, inter_token: the
    latest of the values that the histograms count. errors: answers with an HTTP error.
    """

    def __init__(self, client: EngineClient, model: str, speaks: bool) -> None:
        self.first_token = LatencyWindow()
        self.inter_token = LatencyWindow()
        self.errors = 0
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(client, speaks))
        self._process = CollectorRegistry()
        ProcessCollector(registry=self._process)
        self._process.register(_OfModel(self._registry, model))
        self._ttft = self._histogram(
            "time_to_first_token_seconds", "Time from a request to its first text", _TTFT_BUCKETS_S
        )
        if speaks:
            self._first_sound = self._histogram(
                "time_to_first_sound_seconds", "Time from a request to its first sound", _TTFT_BUCKETS_S
            )
        self._inter_token = self._histogram(
            "inter_token_latency_seconds", "Time between two pieces of text of a choice", _INTER_TOKEN_BUCKETS_S
        )
        self._e2e = self._histogram(
            "e2e_request_latency_seconds", "Time from a request to the end of its answer", _E2E_BUCKETS_S
        )
        self._queue = self._histogram(
            "request_queue_time_seconds", "Time from a request until it runs", _QUEUE_BUCKETS_S
        )
        self._per_token = self._histogram(
            "request_time_per_output_token_seconds",
            "Mean time between the tokens of a choice after the first",
            _INTER_TOKEN_BUCKETS_S,
        )
        self._prompt_length = self._histogram("request_prompt_tokens", "Tokens of a prompt", _TOKENS_BUCKETS)
        self._text_length = self._histogram("request_generation_tokens", "Tokens of a choice", _TOKENS_BUCKETS)
        self._errors = Counter(
            "tilerank_request_errors",
            "Requests answered with an error, by HTTP status; those that fail in a stream included",
            ["code"],
            registry=self._registry,
        )
        self._finished = Counter(
            "tilerank_request_success",
            "Completed choices by finish reason",
            ["finished_reason"],
            registry=self._registry,
        )

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format, with those of this process."""
        return generate_latest(self._process)

    def count_error(self, status: int) -> None:
        """Count a request that is answered with an error."""
        self._errors.labels(str(status)).inc()
        self.errors += 1

    def count_texts(self, lengths: Sequence[int], seconds: float) -> None:
        """Count a request whose texts became vectors or scores. lengths: their tokens. seconds: until all of them were
        there."""
        for length in lengths:
            self._prompt_length.observe(length)
        self._finished.labels("stop").inc(len(lengths))
        self._e2e.observe(seconds)

    async def measure(self, generation: Generation) -> AsyncGenerator[Delta]:
        """Run a request, yield its deltas and record their latencies."""
        began = time.monotonic()
        choices: dict[int, _ChoiceTimes] = {}
        self._prompt_length.observe(generation.usage.prompt_tokens)
        deltas = generation.run()
        async with aclosing(deltas):
            async for delta in deltas:
                now = time.monotonic()
                if not choices:
                    self._ttft.observe(now - began)
                    self.first_token.add(now - began)
                if (choice := choices.get(delta.index)) is None:
                    choice = choices[delta.index] = _ChoiceTimes(now, now)
                    if delta.opening is not None and (start := delta.opening.start) is not None:
                        self._queue.observe(max(now - began - start.after_s, 0.0))
                elif delta.ids:
                    self._inter_token.observe(now - choice.last)
                    self.inter_token.add(now - choice.last)
                if delta.sound and not choice.has_sound:
                    choice.has_sound = True
                    self._first_sound.observe(now - began)
                if delta.ids:  # sound comes on its own
                    choice.last = now
                    choice.tokens += len(delta.ids)
                if delta.finish_reason is not None:
                    self._finished.labels(delta.finish_reason).inc()
                    self._text_length.observe(choice.tokens)
                    if choice.tokens > 1:
                        self._per_token.observe((choice.last - choice.first) / (choice.tokens - 1))
                yield delta
        self._e2e.observe(time.monotonic() - began)

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"tilerank_{name}", help, buckets=buckets, registry=self._registry)


class _OfModel(Collector):
    """The metrics of another registry with the label `model_name`, by which dashboards tell servers apart."""

    def __init__(self, registry: CollectorRegistry, model: str) -> None:
        self._registry = registry
        self._model = model

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            metric.samples = [
                sample._replace(labels={**sample.labels, "model_name": self._model}) for sample in metric.samples
            ]
            yield metric


class _EngineCollector(Collector):
    """Metrics from the last reports of all engines."""

    def __init__(self, client: EngineClient, speaks: bool) -> None:
        self._client = client
        self._speaks = speaks

    def collect(self) -> Iterator[Metric]:
        state, totals = self._client.state, self._client.totals
        yield _gauge("engine_up", "1 if an engine is ready, else 0", float(state is not None))
        yield _counter("engine_restarts", "Engines started after the first of each replica", self._client.restarts)
        yield _counter("prompt_tokens", "Prompt tokens computed", totals.prompt_tokens)
        yield _counter("generation_tokens", "Tokens generated", totals.generated_tokens)
        yield _counter("prefix_cache_queries", "Prompt tokens that were looked for in the cache", totals.queried_tokens)
        yield _counter("prefix_cache_hits", "Prompt tokens that were found there", totals.hit_tokens)
        yield _counter("num_preemptions", "Times that a request gave its pages to an older one", totals.preemptions)
        yield _counter("spec_decode_num_draft_tokens", "Drafted tokens that were checked", totals.drafted_tokens)
        yield _counter("spec_decode_num_accepted_tokens", "Drafted tokens that were right", totals.accepted_tokens)
        if self._speaks:
            yield _counter("speech_frames", "Frames of speech computed, of 80 ms each", totals.speech_frames)
            yield _counter("speech_seconds", "Seconds of speech sent", totals.speech_samples / SAMPLE_RATE)
        if state is None:
            return
        yield _gauge("num_requests_running", "Running requests", state.running)
        yield _gauge("num_requests_waiting", "Waiting requests", state.waiting)
        yield _gauge(
            "kv_cache_usage_perc", "Fraction of the KV cache that running requests use, 0 to 1", state.cache_used
        )
        if state.state_slots:
            used = state.running / state.state_slots
            yield _gauge("state_slots", "Slots for states of sequences; a running request has one", state.state_slots)
            yield _gauge("state_slots_usage_perc", "Fraction of the slots that running requests use, 0 to 1", used)
            yield _gauge("state_snapshots", "Slots that keep the states of beginnings of prompts", state.snapshots)
        if state.window_pages:
            used = state.window_pages_used / state.window_pages
            yield _gauge("window_pages", "Pages of layers with a window", state.window_pages)
            yield _gauge("window_pages_usage_perc", "Fraction of these pages that running requests use, 0 to 1", used)
        if state.kv_dir_capacity:
            used = state.kv_dir_bytes / state.kv_dir_capacity
            yield _gauge("kv_dir_usage_perc", "Fraction of --kv-dir-size that files of pages take, 0 to 1", used)
            yield _counter("kv_dir_pages_written", "Pages of the KV cache written to files", totals.kv_dir_written)
            yield _counter("kv_dir_pages_read", "Pages read from files", totals.kv_dir_read)
            yield _counter("kv_dir_pages_refused", "Pages not written, or damaged in files", totals.kv_dir_refused)
        if state.transfer_slots:
            used = state.transfer_slots_used / state.transfer_slots
            yield _gauge("transfer_usage_perc", "Fraction of the slots between both groups in use, 0 to 1", used)
            yield _counter("transfer_pages_given", "Pages that prefill ranks have given", totals.given_pages)
            yield _counter("transfer_pages_taken", "Pages that decode ranks have taken", totals.taken_pages)
            yield _counter("transfer_bytes_taken", "Bytes of these pages, of all heads", totals.taken_bytes)
            yield _counter("transfer_prompts_missed", "Prompts of which a page was gone", totals.missed_prompts)
            yield _counter(
                "transfer_prompts", "Prompts of prefill ranks that decode ranks have begun", totals.transferred_prompts
            )
            yield _counter(
                "transfer_seconds", "Seconds from the end of these prompts to the answers", totals.transfer_s
            )
        if state.source_pages:
            used = state.source_pages_used / state.source_pages
            yield _gauge("source_pages", "Pages for keys and values of encoded pictures and videos", state.source_pages)
            yield _gauge("source_pages_usage_perc", "Fraction of these pages that running requests use, 0 to 1", used)
        if state.talker_pages:
            used = state.talker_pages_used / state.talker_pages
            yield _gauge("num_requests_speaking", "Requests that speak or wait for it", state.speaking)
            yield _gauge("talker_pages", "Pages of the talker's cache", state.talker_pages)
            yield _gauge("talker_pages_usage_perc", "Fraction of these pages that are in use, 0 to 1", used)
        yield from _rank_metrics(self._client.rank_stats)


def _rank_metrics(stats: RankStats) -> Iterator[Metric]:
    """Yield the metrics of ranks. The number of ranks bounds the values of the label `rank`."""
    yield _gauge(
        "decode_read_bytes_per_second",
        "Bytes of weights and KV cache per second that all ranks read in the last decode steps",
        stats.bytes_per_s,
    )
    yield _gauge(
        "all_reduce_wait_share",
        "Fraction of the last steps that ranks waited for other ranks, 0 to 1, mean over ranks",
        fmean(stats.wait_shares or [0.0]),
    )
    info = GaugeMetricFamily(
        "tilerank_rank_info",
        "Host, NUMA nodes, cores and instruction set of a rank; the value is always 1",
        labels=["rank", "host", "node", "cores", "isa"],
    )
    local = _by_rank(
        GaugeMetricFamily, "rank_local_memory_share", "Fraction of its memory on the NUMA nodes of its cores, 0 to 1"
    )
    waited = _by_rank(
        CounterMetricFamily, "rank_all_reduce_wait_seconds", "Time that it waited for other ranks in collectives"
    )
    steps = _by_rank(
        CounterMetricFamily, "rank_step_seconds", "Time of steps (with prompt tokens: prefill) and encodes", "phase"
    )
    read = _by_rank(CounterMetricFamily, "rank_decode_read_bytes", "Bytes of weights and KV cache read in decode steps")
    for rank, counters in zip(stats.ranks, stats.counters, strict=True):
        number = str(rank.rank)
        info.add_metric([number, rank.host, rank.nodes, rank.cores, rank.isa], 1)
        if rank.local_memory is not None:
            local.add_metric([number], rank.local_memory)
        waited.add_metric([number], counters.waited_s)
        steps.add_metric([number, "prefill"], counters.prefill_s)
        steps.add_metric([number, "decode"], counters.decode_s)
        steps.add_metric([number, "encode"], counters.encode_s)
        read.add_metric([number], counters.decode_bytes)
    yield from (info, local, waited, steps, read)


def _gauge(name: str, help: str, value: float) -> Metric:
    return GaugeMetricFamily(f"tilerank_{name}", help, value)


def _counter(name: str, help: str, value: float) -> Metric:
    return CounterMetricFamily(f"tilerank_{name}", help, value)


def _by_rank(family: type[Family], name: str, help: str, *labels: str) -> Family:
    return family(f"tilerank_{name}", help, labels=["rank", *labels])
