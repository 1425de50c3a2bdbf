"""One rank's engine: rank 0 decides what runs next and samples, every rank computes its shard of it.

A step is a forward pass over chunks of several sequences: the next token of those that decode, and pieces of the
prompts of those that start. Rank 0 announces it in one message (`step.py`); all ranks run the same model code.
"""

import logging
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from tilerank.kernels import core, ops
from tilerank.kernels.attention import KV_BLOCK
from tilerank.kernels.graph import Profile
from tilerank.loader.checkpoint import Checkpoint
from tilerank.loader.config import ModelConfig
from tilerank.loader.formats import weight_formats
from tilerank.loader.quantization import Quantization
from tilerank.loader.weights import LoadReport, load_weights
from tilerank.parallel.group import RecordableGroup
from tilerank.parallel.join import Team
from tilerank.parallel.layer import Sharding
from tilerank.parallel.shard import Strategy

from . import sampling, step
from .batch import Batch
from .cache import allocate, bytes_per_token, expected_tokens, num_blocks
from .counters import RankCounters, StepCounter
from .decode import DecodeGraphs
from .errors import EngineError, RequestError
from .guide import Guides, settle
from .pages import PagePool, Table
from .registry import model_class, read_config
from .sampling import Choice, Logprobs, SamplingParams
from .scheduler import Scheduler
from .scheduler import Sequence as Running
from .step import Chunk, Step, Stop
from .traffic import traffic_of

log = logging.getLogger(__name__)

PREFILL_CHUNK = 2048
"""Prompt tokens of a step: bounds activations and the wait of running sequences."""
MAX_RUNNING = 256
SCORE_CHUNK = 128
"""Rows of a step that wants the logits of all of them, vocabulary-sized each."""


@dataclass(frozen=True)
class Request:
    """A prompt and what to do with it."""

    prompt_token_ids: Sequence[int]
    params: SamplingParams = field(default_factory=SamplingParams)


@dataclass(frozen=True)
class TokenEvent:
    """A new token of request number `request`. The last one of a request says why: "stop" (an end-of-sequence or
    stop token, which it is; it stands for the end of a grammar, too) or "length".

    time_s: when its step was done, on the clock of `time.monotonic`.
    """

    request: int
    token_id: int
    time_s: float
    finish_reason: str | None = None
    logprobs: Logprobs | None = None


@dataclass(frozen=True)
class Failed:
    """Request number `request` gets no more tokens, because it cannot go on."""

    request: int
    sentence: str


class Engine:
    """The model of `model_dir` on this rank of `team`; loading happens here.

    dtype: of weights, activations and cache: bfloat16 or float32. quantization: codes in place of the projections'
    floats, made while loading (a quantised checkpoint needs no asking), with dtype bfloat16. kv_dtype: int8 for a cache
    of codes (kernels/attention.py: KVLayer).
    strategy: how heads are cut (parallel/shard.py).
    context_length: the longest sequence, prompt and new tokens together, by default the model's. max_total_tokens:
    tokens in the KV cache, of all sequences that run (default: one context). cached_tokens: how many of them a step is
    expected to read (parallel/layer.py: Sharding; default: all). eager: compute steps while the model's Python runs,
    instead of recording them first (decode.py).
    """

    def __init__(
        self,
        model_dir: Path,
        team: Team,
        *,
        dtype: torch.dtype,
        quantization: Quantization | None = None,
        kv_dtype: torch.dtype | None = None,
        strategy: Strategy = "auto",
        context_length: int | None = None,
        max_total_tokens: int | None = None,
        cached_tokens: int | None = None,
        eager: bool = False,
    ) -> None:
        self.config = _with_context(read_config(model_dir), context_length)
        self._team = team
        self._capacity = max_total_tokens or expected_tokens(self.config)
        group = team.group
        formats = weight_formats(self.config, dtype, quantization)
        tokens = cached_tokens or self._capacity
        sharding = Sharding(group.rank, group.size, dtype, group, strategy, tokens, formats, kv_dtype)
        self._model = model_class(self.config.model_type)(self.config, sharding)
        self.load_report: LoadReport = load_weights(
            self._model,
            Checkpoint(model_dir),
            ignore=self._model.ignore,
            progress=group.rank == 0,
            quantization=self.config.quantization,
        )
        self._pool = PagePool(num_blocks(self._capacity))
        self._scheduler = Scheduler(self._pool, max_running=MAX_RUNNING, chunk_rows=PREFILL_CHUNK)
        # A page more than the pool hands out: what fills up a recorded batch writes there.
        self._caches = allocate(self._model.cache_specs(), (self._pool.total + 1) * KV_BLOCK)
        self._decode = None if eager else self._decode_graphs()
        experts = self.config.experts
        self._counter = StepCounter(traffic_of(self._model, experts.top_k / experts.count if experts else 0.0))
        self._tables: dict[int, list[int]] = {}
        self._guides = Guides(model_dir, self.config.vocab_size)
        self._requests: dict[int, Running] = {}
        self._next_request = 0
        self._prompt_tokens = self._generated_tokens = 0

    def submit(self, request: Request) -> int:
        """Rank 0: puts a request in line and returns its number. RequestError if it can never run."""
        return self._add(self._admissible("the request", request))

    @property
    def busy(self) -> bool:
        """Rank 0: is there a request in line?"""
        return bool(self._requests)

    @property
    def weight_bytes(self) -> int:
        """Of this rank."""
        return self._model.nbytes()

    @property
    def cache_tokens(self) -> int:
        return self._pool.total * KV_BLOCK

    @property
    def cache_bytes(self) -> int:
        """Of this rank, where every page is in use."""
        return bytes_per_token(self._model.cache_specs()) * self.cache_tokens

    def state(self) -> dict[str, Any]:
        """Rank 0: what a server tells of itself; the names are explained in server/messages.py."""
        scheduler = self._scheduler
        return {
            "context_length": self.config.max_position_embeddings,
            "cache_tokens": self.cache_tokens,
            "cache_used": 1 - self._pool.free / self._pool.total,
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting),
            "preemptions": scheduler.preemptions,
            "prompt_tokens": self._prompt_tokens,
            "generated_tokens": self._generated_tokens,
        }

    def cancel(self, number: int) -> None:
        """Rank 0: request `number` gets no more tokens, and its pages are free at once."""
        self._scheduler.end(self._requests.pop(number))

    def step(self) -> list[TokenEvent | Failed]:
        """Rank 0: computes one step of the requests in line, and returns what came out."""
        ended = self._settle_guides()
        scheduled = self._scheduler.schedule()
        if not scheduled:  # all wait for their guides
            return ended
        logits = self._lead([chunk for _, chunk in scheduled])
        self._scheduler.ran(scheduled)
        self._prompt_tokens += sum(
            len(chunk.token_ids) for sequence, chunk in scheduled if chunk.start < sequence.prompt_len
        )
        # A row of logits for every sequence but those whose prompt is not complete yet.
        ready = [sequence for sequence, chunk in scheduled if chunk.logits]
        rows = [sampling.Row(s.params, s.tokens, s.prompt_len, s.forbidden) for s in ready]
        chosen = sampling.choose(logits, rows, ops.argmax if self._decode is None else self._decode.argmax)
        now = time.monotonic()
        self._generated_tokens += len(chosen)
        return ended + [self._take(sequence, choice, now) for sequence, choice in zip(ready, chosen, strict=True)]

    def generate(self, requests: Sequence[Request]) -> Generator[TokenEvent]:
        """Rank 0: runs all requests together and yields their tokens as they come, numbered as in `requests` and with
        seconds since the call.

        Raises RequestError for a request that cannot run: before anything runs, or where its grammar fails.
        """
        began = time.monotonic()
        sequences = [self._admissible(f"request {index}", request) for index, request in enumerate(requests)]
        index_of = {self._add(sequence): index for index, sequence in enumerate(sequences)}
        try:
            while self._requests:
                for event in self.step():
                    if isinstance(event, Failed):
                        raise RequestError(f"request {index_of[event.request]}: {event.sentence}")
                    yield replace(event, request=index_of[event.request], time_s=event.time_s - began)
        finally:
            for number in index_of.keys() & self._requests.keys():
                self.cancel(number)

    def score(self, token_ids: Sequence[int]) -> Tensor:
        """Rank 0: fp32 logits [len(token_ids), vocab], those of every position."""
        request = Request(token_ids, SamplingParams(max_new_tokens=1))
        tokens = self._admissible("the text", request, slack=0).tokens
        # Not from shared pages: logits of every position want every position computed.
        table, number = Table(), self._scheduler.next_number()
        self._pool.extend(table, len(tokens))
        new_blocks, logits = table.blocks, torch.empty(len(tokens), self.config.vocab_size)
        try:
            for start in range(0, len(tokens), SCORE_CHUNK):
                rows = tokens[start : start + SCORE_CHUNK]
                logits[start : start + len(rows)] = self._lead([Chunk(number, start, rows, new_blocks, len(rows))])
                new_blocks = []
            return logits
        finally:
            self._pool.close(table)
            self._scheduler.finished.append(number)

    def watch(self) -> None:
        """Rank 0: from now on recorded decode steps note when their kernels run, for `profile`."""
        if self._decode is not None:
            self._decode.watch()

    def profile(self) -> Profile | None:
        """Rank 0: where the time of the last step went; None if it was not a recorded decode step that was watched."""
        return self._decode.profile() if self._decode is not None else None

    def counters(self) -> list[RankCounters]:
        """Rank 0: what the steps of every rank have taken so far. Takes a message and a small collective."""
        self._team.channel.send(step.encode(step.Count()))
        return self._gather_counters()

    def follow(self) -> None:
        """Other ranks: computes the steps that rank 0 announces, until it says stop. GroupError if a rank is lost."""
        while not isinstance(message := step.decode(self._team.channel.receive()), Stop):
            match message:
                case Step():
                    self._run(message)
                case step.Count():
                    self._gather_counters()
        self._team.group.barrier()

    def stop(self) -> None:
        """Rank 0: sends the other ranks home. Nobody leaves before all have heard it: a rank that leaves early looks
        like one that is lost to those that still listen."""
        self._team.channel.send(step.encode(Stop()))
        self._team.group.barrier()

    def _decode_graphs(self) -> DecodeGraphs | None:
        """None where steps have to run eagerly; all ranks agree, and rank 0 says why."""
        group = self._team.group
        reason = None
        if core.isa() == "reference":
            reason = "kernels run in plain torch"
        elif not isinstance(group, RecordableGroup):
            reason = f"collectives of {type(group).__name__} cannot be recorded"
        if reason is not None or not isinstance(group, RecordableGroup):
            if group.rank == 0:
                log.info("steps run eagerly: %s", reason)
            return None
        return DecodeGraphs(
            self._model,
            self._caches,
            group,
            max_rows=MAX_RUNNING,
            max_pages=num_blocks(min(self._capacity, self.config.max_position_embeddings)),
            spare_page=self._pool.total,
            mixture=self.config.experts is not None,
        )

    def _add(self, sequence: Running) -> int:
        if sequence.params.grammar is not None:
            sequence.guide = self._guides.open(sequence.params.grammar)
        self._requests[sequence.request] = sequence
        self._scheduler.add(sequence)
        return sequence.request

    def _admissible(self, where: str, request: Request, slack: int = 1) -> Running:
        """A sequence for the request, or RequestError saying why it can never run. `slack`: new tokens at least."""
        tokens, limit = list(request.prompt_token_ids), self.config.max_position_embeddings
        if not tokens:
            raise RequestError(f"{where}: the prompt is empty; expected at least one token")
        vocab = self.config.vocab_size
        bad = next((token for token in tokens if not 0 <= token < vocab), None)
        if bad is not None:
            raise RequestError(f"{where}: expected token ids from 0 to {vocab - 1}, found {bad}")
        bad = next((token for token in request.params.logit_bias if not 0 <= token < vocab), None)
        if bad is not None:
            raise RequestError(f"{where}: logit_bias: expected token ids from 0 to {vocab - 1}, found {bad}")
        if len(tokens) + slack > limit:
            raise RequestError(
                f"{where}: the prompt has {len(tokens)} tokens, but the context length is {limit}, "
                "which the prompt and at least one new token must fit in"
            )
        new = min(request.params.max_new_tokens, max(limit - len(tokens), 1))
        params = replace(request.params, max_new_tokens=new)
        sequence = Running(self._next_request, params, tokens, len(tokens))
        if num_blocks(sequence.room) > self._pool.total:
            raise RequestError(
                f"{where}: {len(tokens)} prompt tokens and {new} new ones need a KV cache of {sequence.room} tokens, "
                f"found {self._capacity}; raise the total tokens of the cache or ask for fewer new tokens"
            )
        self._next_request += 1
        return sequence

    def _settle_guides(self) -> list[TokenEvent | Failed]:
        """Hears what guides have found out, and ends the sequences that can get no further token."""
        waiting = [(s, s.guide) for s in self._requests.values() if s.guide is not None and not s.guide.ready]
        settle([guide for _, guide in waiting], [guide for s, guide in waiting if s.runs and s.due == 1])
        events: list[TokenEvent | Failed] = []
        for sequence, guide in waiting:
            if not guide.ready:
                continue
            if guide.error is not None:
                self.cancel(sequence.request)
                events.append(Failed(sequence.request, guide.error))
            elif guide.complete:
                self.cancel(sequence.request)
                end = next(iter(self.config.eos_token_ids), 0)  # all that the model would be left to say
                events.append(TokenEvent(sequence.request, end, time.monotonic(), "stop"))
        return events

    def _take(self, sequence: Running, choice: Choice, now: float) -> TokenEvent:
        sequence.tokens.append(choice.token_id)
        reason = self._finish_reason(sequence)
        if reason is not None:
            self.cancel(sequence.request)
        elif sequence.guide is not None:
            sequence.guide.take(choice.token_id)
        return TokenEvent(sequence.request, choice.token_id, now, reason, choice.logprobs)

    def _finish_reason(self, sequence: Running) -> str | None:
        last, params = sequence.tokens[-1], sequence.params
        if last in params.stop_token_ids or (last in self.config.eos_token_ids and not params.ignore_eos):
            return "stop"
        return "length" if len(sequence.tokens) - sequence.prompt_len >= sequence.params.max_new_tokens else None

    def _lead(self, chunks: list[Chunk]) -> Tensor:
        """Rank 0: announces a step and computes it."""
        message = Step(chunks, list(self._scheduler.finished))
        self._scheduler.finished.clear()
        self._team.channel.send(step.encode(message))
        return self._run(message)

    def _gather_counters(self) -> list[RankCounters]:
        mine = msgspec.structs.astuple(self._counter.counters)
        rows = self._team.group.all_gather(torch.tensor(mine, dtype=torch.float64))
        return [RankCounters(*row) for row in rows.tolist()]

    def _run(self, message: Step) -> Tensor:
        for number in message.finished:
            self._tables.pop(number, None)
        for chunk in message.chunks:
            self._tables.setdefault(chunk.sequence, []).extend(chunk.new_blocks)
        group = self._team.group
        began, waited = time.perf_counter(), group.waited_s
        if self._decode is not None:
            logits = self._decode.run(message, self._tables)
        else:
            logits = self._model.forward(Batch.of(message, self._tables), self._caches)
        self._counter.count(message, time.perf_counter() - began, group.waited_s - waited)
        return logits


def _with_context(config: ModelConfig, context_length: int | None) -> ModelConfig:
    limit = config.max_position_embeddings
    if context_length is None:
        return config
    if not 2 <= context_length <= limit:
        raise EngineError(f"context length: expected 2 to the model's {limit} tokens, found {context_length}")
    return replace(config, max_position_embeddings=context_length)
