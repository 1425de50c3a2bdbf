"""The HTTP process's connections to engines, one or two for each replica, replaced whenever its ranks are restarted."""

import asyncio
import socket
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing
from functools import reduce
from operator import add

import msgspec

from ...protocol.engine_state import EngineState
from ...protocol.params import SamplingParams
from ...protocol.prompt import Prompt
from .connection import EngineConnection, EngineGoneError, Prefill, Progress
from .rank_stats import RankStats, merge
from .routing import block_hashes, choose_replica
from .totals import Totals

MAX_QUEUED = 1024
"""Choices that may wait by default: a few times as many as run at a time."""
MAX_QUEUED_TOKENS = 4 << 20
"""Prompt tokens that may wait. Each takes about 36 bytes of this process."""


class OverloadedError(Exception):
    """The queue of requests is full."""


class EngineClient:
    """Routes requests to the engines that are ready (routing.py), and sums up what the engines report.

    max_queued: choices that may wait until an engine can take them. in_pairs: whether a replica has two engines, of
    which that with the even number computes prompts for the one after it, and generates nothing.
    """

    def __init__(self, max_queued: int = MAX_QUEUED, *, in_pairs: bool = False) -> None:
        self._max_queued = max_queued
        self._in_pairs = in_pairs
        self.restarts = 0  # engines after the first one of each number
        self.totals = Totals()
        self.ready = asyncio.Event()  # set once the first engine can take requests
        self.all_ready = asyncio.Event()  # set once all that are attached can
        self._engines: dict[int, EngineConnection] = {}

    @property
    def state(self) -> EngineState | None:
        """The state of all ready engines taken as one; None if none can take requests. Those queued here are
        waiting."""
        if not self._ready():
            return None
        states = [
            msgspec.structs.replace(engine.state, waiting=engine.state.waiting + engine.queued)
            for engine in self._engines.values()
            if engine.state is not None
        ]
        return reduce(add, states)

    @property
    def rank_stats(self) -> RankStats:
        """The statistics of the ranks of all ready engines."""
        return merge({i: engine.rank_stats for i, engine in self._engines.items() if engine.state is not None})

    async def attach(self, number: int, connection: socket.socket) -> None:
        """Use the engine at the other end of `connection` as that of this number. Returns when the engine ends."""
        self.restarts += number in self._engines
        self._engines[number] = engine = EngineConnection(self.totals, self._on_ready)
        await engine.run(connection)

    def _on_ready(self) -> None:
        if self._ready():
            self.ready.set()
        if all(engine.state is not None for engine in self._engines.values()):
            self.all_ready.set()

    def check_room(self) -> None:
        """Raise EngineGoneError if no engine is ready, and OverloadedError if no further request may wait."""
        self._takers()
        engines = self._engines.values()
        if sum(engine.queued for engine in engines) >= self._max_queued:
            raise OverloadedError(f"{self._max_queued} requests wait already, as many as may.")
        if sum(engine.queued_tokens for engine in engines) >= MAX_QUEUED_TOKENS:
            raise OverloadedError(f"Requests with {MAX_QUEUED_TOKENS} tokens together wait already, as many as may.")

    def fail_requests(self, why: str) -> None:
        """Fail all incomplete requests with EngineGoneError."""
        for engine in self._engines.values():
            engine.fail_requests(why)

    def submit(
        self, prompt: Prompt, params: SamplingParams, seeds: Sequence[int]
    ) -> AbstractContextManager[list[AsyncGenerator[Progress]]]:
        """Submit a request with a choice for each of `seeds`. The context is a generator for each choice, of its scores
        and tokens.

        Closing the generator of a choice cancels it, and leaving the context cancels all that are incomplete. If a
        grammar allows no further token, the tokens end without a finish_reason. Raises EngineGoneError if no engine is
        ready. The generators raise EngineGoneError and RefusedError.
        """
        takers = self._takers()
        # One replica needs no memory of its prompts, which takes 14 MB.
        blocks = block_hashes(prompt.keys) if len(self._generating) > 1 else []
        number = _choose(takers, blocks)
        return takers[number].submit(prompt, params, seeds, self._prefill(number, prompt, params))

    @property
    def _generating(self) -> dict[int, EngineConnection]:
        """The engines that take requests, one for each replica, by number."""
        return {number: engine for number, engine in self._engines.items() if not self._in_pairs or number % 2}

    def _ready(self) -> dict[int, EngineConnection]:
        return {number: engine for number, engine in self._generating.items() if engine.state is not None}

    def _takers(self) -> dict[int, EngineConnection]:
        """Return the engines that can take a request, by number. Raises EngineGoneError if none can."""
        ready = self._ready()
        if not ready:
            raise EngineGoneError("No engine is ready.")
        return ready

    def _prefill(self, number: int, prompt: Prompt, params: SamplingParams) -> Prefill | None:
        """Return the computation of a prompt before engine `number` gets its request; None if the ranks of that engine
        compute all of it. What a request reports of its prompt is computed where it runs."""
        engine = self._engines.get(number - 1) if self._in_pairs else None
        reports = params.prompt_logprobs is not None or params.hidden_layers or params.speech is not None
        if engine is None or engine.state is None or reports or not params.max_new_tokens:
            return None
        return Prefill(engine) if engine.state.least_given <= len(prompt.token_ids) else None

    async def generate(self, prompt: Prompt, params: SamplingParams) -> AsyncGenerator[Progress]:
        """Yield the tokens of a request with one choice. Closing the generator cancels it. Raises as in `submit`."""
        with self.submit(prompt, params, [params.seed]) as (tokens,):
            async with aclosing(tokens):
                async for token in tokens:
                    yield token


def _choose(engines: Mapping[int, EngineConnection], blocks: Sequence[int]) -> int:
    """Return the number of the engine for a prompt with these block hashes."""
    numbers, found = list(engines), list(engines.values())
    seen = [engine.prompts.matching(blocks) for engine in found]
    chosen = choose_replica([engine.load for engine in found], seen, len(blocks))
    found[chosen].prompts.add(blocks)
    return numbers[chosen]
