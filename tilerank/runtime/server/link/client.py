"""The HTTP process's connections to engines, one for each replica, replaced whenever its ranks are restarted."""

import asyncio
import logging
import socket
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, aclosing, contextmanager
from functools import reduce
from operator import add

import msgspec

from ...protocol.engine_state import EngineState
from ...protocol.events import (
    EndedEvent,
    Event,
    FailedEvent,
    HiddenEvent,
    PooledEvent,
    ScoredEvent,
    SoundEvent,
    TokenEvent,
    is_last,
)
from ...protocol.framing import encode
from ...protocol.params import SamplingParams
from ...protocol.prompt import Prompt
from .messages import Counters, Events, FromEngine, Ranks, Submit, ToEngine, client_inbox
from .rank_stats import RankStats, merge
from .request_queue import RequestQueue
from .routing import SeenPrompts, block_hashes, choose_replica

log = logging.getLogger(__name__)


MAX_QUEUED = 1024
"""Choices that may wait by default: a few times as many as run at a time."""
MAX_QUEUED_TOKENS = 4 << 20
"""Prompt tokens that may wait. Each takes about 36 bytes of this process."""


class EngineGoneError(Exception):
    """No engine is ready, or the engine stopped before the request was complete."""


class OverloadedError(Exception):
    """The queue of requests is full."""


class RefusedError(Exception):
    """The engine cannot run the request. The message says why."""


Progress = ScoredEvent | TokenEvent | SoundEvent | PooledEvent | HiddenEvent
"""An event of a choice: the hidden states and the scores of its prompt, if requested, then its tokens, and sound if it
speaks; or the vector or score that its prompt becomes."""
_Item = Event | EngineGoneError


class Totals:
    """Counters summed over all engines, stopped ones included, so that Prometheus counters never decrease."""

    def __init__(self) -> None:
        self.preemptions = self.prompt_tokens = self.generated_tokens = self.queried_tokens = self.hit_tokens = 0
        self.speech_frames = self.speech_samples = 0
        self.kv_dir_written = self.kv_dir_read = self.kv_dir_refused = 0
        self.drafted_tokens = self.accepted_tokens = 0

    def add(self, before: EngineState, now: EngineState) -> None:
        """Add what one engine has done between two of its states."""
        self.preemptions += now.preemptions - before.preemptions
        self.prompt_tokens += now.prompt_tokens - before.prompt_tokens
        self.generated_tokens += now.generated_tokens - before.generated_tokens
        self.queried_tokens += now.queried_tokens - before.queried_tokens
        self.hit_tokens += now.hit_tokens - before.hit_tokens
        self.speech_frames += now.speech_frames - before.speech_frames
        self.speech_samples += now.speech_samples - before.speech_samples
        self.kv_dir_written += now.kv_dir_written - before.kv_dir_written
        self.kv_dir_read += now.kv_dir_read - before.kv_dir_read
        self.kv_dir_refused += now.kv_dir_refused - before.kv_dir_refused
        self.drafted_tokens += now.drafted_tokens - before.drafted_tokens
        self.accepted_tokens += now.accepted_tokens - before.accepted_tokens


class EngineConnection:
    """A connection to one engine, from its start to its end.

    state: None until the engine is ready, and after its end. totals: counters to which this engine adds. on_ready:
    called for every EngineState message.
    """

    def __init__(self, totals: Totals, on_ready: Callable[[], None]) -> None:
        self.state: EngineState | None = None
        self.rank_stats = RankStats()
        self.prompts = SeenPrompts()
        self._totals = totals
        self._on_ready = on_ready
        self._transport: asyncio.Transport | None = None
        self._queue = RequestQueue(self._send)
        self._queues: dict[int, asyncio.Queue[_Item]] = {}  # by the number of each incomplete choice
        self._speaking: set[int] = set()  # the numbers of those that end with sound, not with a token
        self._next_number = 0

    @property
    def load(self) -> int:
        """The number of incomplete choices."""
        return len(self._queues)

    @property
    def queued(self) -> int:
        """The number of choices that wait until the engine can take them."""
        return len(self._queue)

    @property
    def queued_tokens(self) -> int:
        """The tokens of their prompts."""
        return self._queue.waiting_tokens

    async def run(self, connection: socket.socket) -> None:
        """Receive messages over `connection` until the engine closes it. Then fail the incomplete requests."""
        receiver = _Receiver(self._handle)
        self._transport, _ = await asyncio.get_running_loop().create_unix_connection(lambda: receiver, sock=connection)
        try:
            await receiver.end
        except ConnectionResetError:
            log.debug("the engine closed its socket with unread messages")
        finally:
            self.state = None
            self._transport.close()
            self._queue.close()
            self.fail_requests("The engine stopped before the answer was complete.")

    def fail_requests(self, why: str) -> None:
        """Fail all incomplete requests with EngineGoneError."""
        for number, queue in list(self._queues.items()):
            queue.put_nowait(EngineGoneError(why))
            self._cancel(number)

    @contextmanager
    def submit(
        self, prompt: Prompt, params: SamplingParams, seeds: Sequence[int]
    ) -> Iterator[list[AsyncGenerator[Progress]]]:
        """See EngineClient.submit."""
        numbers = range(self._next_number, self._next_number + len(seeds))
        self._next_number = numbers.stop
        queues: list[asyncio.Queue[_Item]] = [asyncio.Queue() for _ in numbers]
        self._queues.update(zip(numbers, queues, strict=True))
        if params.speech is not None:
            self._speaking.update(numbers)
        self._queue.add(Submit(numbers.start, prompt, params, list(seeds), prompt.digests))
        del prompt  # pictures take much memory, and this process needs them no longer than until they are sent
        try:
            speaks = params.speech is not None
            yield [self._tokens(number, queue, speaks) for number, queue in zip(numbers, queues, strict=True)]
        finally:
            for number in numbers:
                self._cancel(number)

    async def _tokens(self, number: int, queue: "asyncio.Queue[_Item]", speaks: bool) -> AsyncGenerator[Progress]:
        try:
            while not isinstance(item := await queue.get(), EndedEvent):
                if isinstance(item, EngineGoneError):
                    raise item
                if isinstance(item, FailedEvent):
                    raise RefusedError(item.sentence)
                yield item
                if is_last(item, speaks):
                    return
        finally:
            self._cancel(number)

    def _cancel(self, number: int) -> None:
        """Cancel a choice if it is incomplete."""
        if self._queues.pop(number, None) is not None:
            self._speaking.discard(number)
            self._queue.cancel(number)

    def _handle(self, message: FromEngine) -> None:
        match message:
            case Events(events):
                for event in events:
                    self._put(event.request, event)
            case Ranks() | Counters():
                self.rank_stats.add(message)
            case EngineState():
                self._totals.add(self.state or message, message)
                self.state = message
                self._on_ready()

    def _put(self, number: int, event: Event) -> None:
        last = is_last(event, number in self._speaking)
        self._queue.receive(number, last=last)
        if number not in self._queues:  # cancelled, and the engine has not read the Cancel message yet
            return
        self._queues[number].put_nowait(event)
        if last:
            del self._queues[number]
            self._speaking.discard(number)

    def _send(self, message: ToEngine) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(encode(message))


class _Receiver(asyncio.Protocol):
    """Handles messages as soon as they are received: a stream reader would take another turn of the event loop for each
    token. end: done when the connection has ended, with its error if it has one."""

    def __init__(self, handle: Callable[[FromEngine], None]) -> None:
        self.end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._inbox = client_inbox()
        self._handle = handle

    def data_received(self, data: bytes) -> None:
        for message in self._inbox.feed(data):
            self._handle(message)

    def connection_lost(self, error: Exception | None) -> None:
        if self.end.done():
            return
        if error is None:
            self.end.set_result(None)
        else:
            self.end.set_exception(error)


class EngineClient:
    """Routes requests to the engines that are ready (routing.py), and sums up what the engines report.

    max_queued: choices that may wait until an engine can take them.
    """

    def __init__(self, max_queued: int = MAX_QUEUED) -> None:
        self._max_queued = max_queued
        self.restarts = 0  # engines after the first one of each replica
        self.totals = Totals()
        self.ready = asyncio.Event()  # set once the first engine can take requests
        self.all_ready = asyncio.Event()  # set once all that are attached can
        self._engines: dict[int, EngineConnection] = {}

    @property
    def state(self) -> EngineState | None:
        """The state of all ready engines taken as one; None if there is none. Requests queued here are waiting."""
        states = [
            msgspec.structs.replace(engine.state, waiting=engine.state.waiting + engine.queued)
            for engine in self._engines.values()
            if engine.state is not None
        ]
        return reduce(add, states) if states else None

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
        self.ready.set()
        if all(engine.state is not None for engine in self._engines.values()):
            self.all_ready.set()

    def check_room(self) -> None:
        """Raise EngineGoneError if no engine is ready, and OverloadedError if no further request may wait."""
        engines = self._ready()
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
        ready = self._ready()
        # One replica needs no memory of its prompts, which takes 14 MB.
        blocks = block_hashes(prompt.keys) if len(self._engines) > 1 else []
        seen = [engine.prompts.matching(blocks) for engine in ready]
        engine = ready[choose_replica([engine.load for engine in ready], seen, len(blocks))]
        engine.prompts.add(blocks)
        return engine.submit(prompt, params, seeds)

    def _ready(self) -> list[EngineConnection]:
        """Return the engines that are ready. Raises EngineGoneError if none is."""
        ready = [engine for engine in self._engines.values() if engine.state is not None]
        if not ready:
            raise EngineGoneError("No engine is ready.")
        return ready

    async def generate(self, prompt: Prompt, params: SamplingParams) -> AsyncGenerator[Progress]:
        """Yield the tokens of a request with one choice. Closing the generator cancels it. Raises as in `submit`."""
        with self.submit(prompt, params, [params.seed]) as (tokens,):
            async with aclosing(tokens):
                async for token in tokens:
                    yield token
