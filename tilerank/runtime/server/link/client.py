"""The HTTP process's connections to engines, one for each replica, replaced whenever its ranks are restarted."""

import asyncio
import socket
from collections.abc import AsyncGenerator, Collection, Sequence
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

    max_queued: choices that may wait until an engine can take them. prefilling: the numbers of replicas whose ranks
    compute prompts for the others, and generate nothing.
    """

    def __init__(self, max_queued: int = MAX_QUEUED, prefilling: Collection[int] = ()) -> None:
        self._max_queued = max_queued
        self._prefilling = prefilling
        self.restarts = 0  # engines after the first one of each replica
        self.totals = Totals()
        self.ready = asyncio.Event()  # set once the first engine can take requests
        self.all_ready = asyncio.Event()  # set once all that are attached can
        self._engines: dict[int, EngineConnection] = {}

    @property
    def state(self) -> EngineState | None:
        """The state of all ready engines taken as one; None if none can take requests. Those queued here are
        waiting."""
        if not self._ready(prefilling=False):
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

    async def attach(self, replica: int, connection: socket.socket) -> None:
        """Use the engine at the other end of `connection` for `replica`. Returns when the engine ends."""
        self.restarts += replica in self._engines
        self._engines[replica] = engine = EngineConnection(self.totals, self._on_ready)
        await engine.run(connection)

    def _on_ready(self) -> None:
        if self._ready(prefilling=False):
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
        blocks = block_hashes(prompt.keys) if len(self._engines) > 1 else []
        prefilling = self._prefilling_engines(prompt, params)
        prefill = Prefill(_choose(prefilling, blocks)) if prefilling else None
        return _choose(takers, blocks).submit(prompt, params, seeds, prefill)

    def _takers(self) -> list[EngineConnection]:
        """Return the engines that take requests. Raises EngineGoneError if none is ready."""
        ready = self._ready(prefilling=False)
        if not ready:
            raise EngineGoneError("No engine is ready.")
        return ready

    def _ready(self, *, prefilling: bool) -> list[EngineConnection]:
        """Return the engines that are ready, of prefill ranks or of the others."""
        of_role = [engine for i, engine in self._engines.items() if (i in self._prefilling) == prefilling]
        return [engine for engine in of_role if engine.state is not None]

    def _prefilling_engines(self, prompt: Prompt, params: SamplingParams) -> list[EngineConnection]:
        """Return the engines of prefill ranks that can compute something of a prompt for its request. What a request
        reports of its prompt is computed where it runs."""
        reports = params.prompt_logprobs is not None or params.hidden_layers or params.speech is not None
        if reports or not params.max_new_tokens:
            return []
        length, engines = len(prompt.token_ids), self._ready(prefilling=True)
        return [engine for engine in engines if engine.state is not None and engine.state.least_given <= length]

    async def generate(self, prompt: Prompt, params: SamplingParams) -> AsyncGenerator[Progress]:
        """Yield the tokens of a request with one choice. Closing the generator cancels it. Raises as in `submit`."""
        with self.submit(prompt, params, [params.seed]) as (tokens,):
            async with aclosing(tokens):
                async for token in tokens:
                    yield token


def _choose(engines: Sequence[EngineConnection], blocks: Sequence[int]) -> EngineConnection:
    """Return the engine for a prompt with these block hashes."""
    seen = [engine.prompts.matching(blocks) for engine in engines]
    engine = engines[choose_replica([engine.load for engine in engines], seen, len(blocks))]
    engine.prompts.add(blocks)
    return engine
