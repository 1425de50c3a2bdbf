"""One rank's engine: rank 0 decides what runs next and samples, every rank computes its shard of it.

A step is a forward pass over chunks of several sequences: the next token of those that decode, and pieces of the
prompts of those that start. Rank 0 announces it in one message (`step.py`); all ranks run the same model code.
"""

import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from tilerank.kernels import core
from tilerank.kernels.attention import KV_BLOCK
from tilerank.loader.checkpoint import Checkpoint
from tilerank.loader.config import ModelConfig
from tilerank.loader.weights import LoadReport, load_weights
from tilerank.parallel.group import RecordableGroup
from tilerank.parallel.join import Team
from tilerank.parallel.layer import Sharding
from tilerank.parallel.shard import Strategy

from . import sampling, step
from .batch import Batch
from .cache import BlockPool, allocate, default_capacity, num_blocks
from .decode import DecodeGraphs
from .errors import EngineError, RequestError
from .registry import model_class, read_config
from .sampling import Logprobs, SamplingParams
from .step import Chunk, Step, Stop

log = logging.getLogger(__name__)

PREFILL_CHUNK = 2048
"""Rows of a step, unless more sequences than that decode: bounds activations and the wait of running sequences."""
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
    """A new token of request number `request`. The last one of a request says why: "stop" (an end-of-sequence token,
    which it is) or "length".

    time_s: seconds since `generate` was called.
    """

    request: int
    token_id: int
    time_s: float
    finish_reason: str | None = None
    logprobs: Logprobs | None = None


@dataclass(eq=False)
class _Sequence:
    number: int
    params: SamplingParams
    tokens: list[int]
    prompt_len: int
    blocks: list[int] = field(default_factory=list)
    announced: bool = False  # the other ranks know its pages
    cached: int = 0

    @property
    def room(self) -> int:
        """The most tokens whose keys and values it will ever keep: the last token is never fed back."""
        return self.prompt_len + self.params.max_new_tokens - 1


class Engine:
    """The model of `model_dir` on this rank of `team`; loading happens here.

    dtype: of weights, activations and cache: bfloat16 or float32. strategy: how heads are cut (parallel/shard.py).
    context_length: the longest sequence, prompt and new tokens together, by default the model's. max_total_tokens:
    tokens in the KV cache, of all sequences that run. eager: run the model's Python in every decode step, instead of
    replaying a recording of it (decode.py).
    """

    def __init__(
        self,
        model_dir: Path,
        team: Team,
        *,
        dtype: torch.dtype,
        strategy: Strategy = "auto",
        context_length: int | None = None,
        max_total_tokens: int | None = None,
        eager: bool = False,
    ) -> None:
        self.config = _with_context(read_config(model_dir), context_length)
        self._team = team
        self._capacity = max_total_tokens or default_capacity(self.config)
        group = team.group
        sharding = Sharding(group.rank, group.size, dtype, group, strategy, self._capacity)
        self._model = model_class(self.config.model_type)(self.config, sharding)
        self.load_report: LoadReport = load_weights(
            self._model, Checkpoint(model_dir), ignore=self._model.ignore, progress=group.rank == 0
        )
        self._pool = BlockPool(num_blocks(self._capacity))
        # A page more than the pool hands out: what fills up a recorded batch writes there.
        self._caches = allocate(self._model.cache_specs(), (self._pool.total + 1) * KV_BLOCK)
        self._decode = None if eager else self._decode_graphs()
        self._tables: dict[int, list[int]] = {}
        self._finished: list[int] = []
        self._next_number = 0

    def generate(self, requests: Sequence[Request]) -> Iterator[TokenEvent]:
        """Rank 0: runs all requests together and yields their tokens as they come.

        Raises RequestError, before anything runs, for a request that cannot run.
        """
        began = time.monotonic()
        sequences = [self._admissible(index, request) for index, request in enumerate(requests)]
        index_of = {sequence.number: index for index, sequence in enumerate(sequences)}
        waiting, running = deque(sequences), list[_Sequence]()
        try:
            while waiting or running:
                self._admit(waiting, running)
                scheduled = self._schedule(running)
                logits = self._lead([chunk for _, chunk in scheduled])
                # A row of logits for every sequence but those whose prompt is not complete yet.
                ready = [sequence for sequence, chunk in scheduled if chunk.logits]
                chosen = sampling.choose(logits, [(s.params, len(s.tokens)) for s in ready])
                now = time.monotonic() - began
                events = []
                for row, (sequence, token_id) in enumerate(zip(ready, chosen, strict=True)):
                    sequence.tokens.append(token_id)
                    reason = self._finish_reason(sequence)
                    if reason is not None:
                        running.remove(sequence)
                        self._release(sequence)
                    count = sequence.params.logprobs
                    logprobs = sampling.logprobs(logits[row], token_id, count) if count else None
                    events.append(TokenEvent(index_of[sequence.number], token_id, now, reason, logprobs))
                # Now that nobody looks at the logits any more: whoever takes the events may run another step.
                yield from events
        finally:
            for sequence in running:
                self._release(sequence)

    def score(self, token_ids: Sequence[int]) -> Tensor:
        """Rank 0: fp32 logits [len(token_ids), vocab], those of every position."""
        sequence = self._admissible(0, Request(token_ids, SamplingParams(max_new_tokens=1)), slack=0)
        sequence.blocks = self._pool.take(num_blocks(sequence.room))
        try:
            parts = []
            while sequence.cached < len(token_ids):
                parts.append(self._lead([self._chunk(sequence, SCORE_CHUNK, every_row=True)]))
            return torch.cat(parts)
        finally:
            self._release(sequence)

    def follow(self) -> None:
        """Other ranks: computes the steps that rank 0 announces, until it says stop. GroupError if a rank is lost."""
        while isinstance(message := step.decode(self._team.channel.receive()), Step):
            self._run(message)
        self._team.group.barrier()

    def stop(self) -> None:
        """Rank 0: sends the other ranks home. Nobody leaves before all have heard it: a rank that leaves early looks
        like one that is lost to those that still listen."""
        self._team.channel.send(step.encode(Stop()))
        self._team.group.barrier()

    def _decode_graphs(self) -> DecodeGraphs | None:
        """None where decode steps have to run eagerly; all ranks agree, and rank 0 says why."""
        group = self._team.group
        reason = None
        if core.isa() == "reference":
            reason = "kernels run in plain torch"
        elif not isinstance(group, RecordableGroup):
            reason = f"collectives of {type(group).__name__} cannot be recorded"
        if reason is not None or not isinstance(group, RecordableGroup):
            if group.rank == 0:
                log.info("decode steps run eagerly: %s", reason)
            return None
        return DecodeGraphs(
            self._model,
            self._caches,
            group,
            max_rows=MAX_RUNNING,
            max_pages=num_blocks(min(self._capacity, self.config.max_position_embeddings)),
            spare_page=self._pool.total,
        )

    def _admissible(self, index: int, request: Request, slack: int = 1) -> _Sequence:
        """A sequence for the request, or RequestError saying why it can never run. `slack`: new tokens at least."""
        tokens, limit = list(request.prompt_token_ids), self.config.max_position_embeddings
        where = f"request {index}"
        if not tokens:
            raise RequestError(f"{where}: the prompt is empty; expected at least one token")
        vocab = self.config.vocab_size
        bad = next((token for token in tokens if not 0 <= token < vocab), None)
        if bad is not None:
            raise RequestError(f"{where}: expected token ids from 0 to {vocab - 1}, found {bad}")
        if len(tokens) + slack > limit:
            raise RequestError(
                f"{where}: the prompt has {len(tokens)} tokens, but the context length is {limit}, "
                "which the prompt and at least one new token must fit in"
            )
        new = min(request.params.max_new_tokens, max(limit - len(tokens), 1))
        sequence = _Sequence(self._next_number, replace(request.params, max_new_tokens=new), tokens, len(tokens))
        if num_blocks(sequence.room) > self._pool.total:
            raise RequestError(
                f"{where}: {len(tokens)} prompt tokens and {new} new ones need a KV cache of {sequence.room} tokens, "
                f"found {self._capacity}; raise the total tokens of the cache or ask for fewer new tokens"
            )
        self._next_number += 1
        return sequence

    def _admit(self, waiting: deque[_Sequence], running: list[_Sequence]) -> None:
        """In order of arrival, while pages for all tokens that a sequence may ever have are free."""
        while waiting and len(running) < MAX_RUNNING:
            pages = num_blocks(waiting[0].room)
            if pages > self._pool.free:
                break
            sequence = waiting.popleft()
            sequence.blocks = self._pool.take(pages)
            running.append(sequence)

    def _schedule(self, running: Sequence[_Sequence]) -> list[tuple[_Sequence, Chunk]]:
        """Everybody who decodes, then prompts in order of arrival up to the step's rows."""
        prefilling = [sequence for sequence in running if sequence.cached < sequence.prompt_len]
        scheduled = [(sequence, self._chunk(sequence, 1)) for sequence in running if sequence not in prefilling]
        rows = PREFILL_CHUNK - len(scheduled)
        for sequence in prefilling:
            if rows <= 0:
                break
            scheduled.append((sequence, self._chunk(sequence, rows)))
            rows -= len(scheduled[-1][1].token_ids)
        return scheduled

    def _chunk(self, sequence: _Sequence, rows: int, *, every_row: bool = False) -> Chunk:
        """The next tokens of a sequence, at most `rows`, which then count as cached."""
        start = sequence.cached
        token_ids = sequence.tokens[start : start + rows]
        sequence.cached += len(token_ids)
        complete = sequence.cached == len(sequence.tokens)
        new_blocks = [] if sequence.announced else sequence.blocks
        sequence.announced = True
        return Chunk(sequence.number, start, token_ids, new_blocks, len(token_ids) if every_row else int(complete))

    def _finish_reason(self, sequence: _Sequence) -> str | None:
        if sequence.tokens[-1] in self.config.eos_token_ids and not sequence.params.ignore_eos:
            return "stop"
        return "length" if len(sequence.tokens) - sequence.prompt_len >= sequence.params.max_new_tokens else None

    def _release(self, sequence: _Sequence) -> None:
        self._pool.give_back(sequence.blocks)
        sequence.blocks = []
        self._finished.append(sequence.number)

    def _lead(self, chunks: list[Chunk]) -> Tensor:
        """Rank 0: announces a step and computes it."""
        message = Step(chunks, self._finished)
        self._finished = []
        self._team.channel.send(step.encode(message))
        return self._run(message)

    def _run(self, message: Step) -> Tensor:
        for number in message.finished:
            self._tables.pop(number, None)
        for chunk in message.chunks:
            self._tables.setdefault(chunk.sequence, []).extend(chunk.new_blocks)
        if self._decode is not None and self._decode.takes(message):
            return self._decode.run(message, self._tables)
        return self._model.forward(Batch.of(message, self._tables), self._caches)


def _with_context(config: ModelConfig, context_length: int | None) -> ModelConfig:
    limit = config.max_position_embeddings
    if context_length is None:
        return config
    if not 2 <= context_length <= limit:
        raise EngineError(f"context length: expected 2 to the model's {limit} tokens, found {context_length}")
    return replace(config, max_position_embeddings=context_length)
