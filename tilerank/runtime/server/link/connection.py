"""A connection of the HTTP process to one engine, from its start to its end."""

import asyncio
import logging
import socket
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, aclosing, contextmanager
from functools import partial

from msgspec.structs import replace

from ...protocol.engine_state import EngineState
from ...protocol.events import (
    EndedEvent,
    Event,
    FailedEvent,
    HiddenEvent,
    PooledEvent,
    PrefilledEvent,
    ScoredEvent,
    SoundEvent,
    TokenEvent,
    is_last,
)
from ...protocol.framing import encode
from ...protocol.params import SamplingParams, Start
from ...protocol.prompt import Prompt
from .messages import Counters, Events, FromEngine, Ranks, Submit, ToEngine, client_inbox
from .rank_stats import RankStats
from .request_queue import RequestQueue
from .routing import SeenPrompts
from .totals import Totals

log = logging.getLogger(__name__)

PROMPT_ALONE = SamplingParams(max_new_tokens=0)


class EngineGoneError(Exception):
    """No engine is ready, or the engine stopped before the request was complete."""


class RefusedError(Exception):
    """The engine cannot run the request. The message says why."""


Progress = ScoredEvent | TokenEvent | SoundEvent | PooledEvent | HiddenEvent | PrefilledEvent
"""An event of a choice: the hidden states and the scores of its prompt, if requested, then its tokens, and sound if it
speaks; or the vector or score that its prompt becomes, or where its pages are."""
_Item = Event | EngineGoneError


class EngineConnection:
    """A connection to one engine, from its start to its end.

    state: None until the engine is ready, and after its end. totals: counters to which this engine adds. on_ready:
    called for every EngineState message.
    """

    def __init__(self, totals: Totals, on_ready: Callable[[], None]) -> None:
        self.state: EngineState | None = None
        self.rank_stats = RankStats()
        self.prompts = SeenPrompts()
        self.totals = totals
        self._on_ready = on_ready
        self._transport: asyncio.Transport | None = None
        self._queue = RequestQueue(self._send)
        self._queues: dict[int, asyncio.Queue[_Item]] = {}  # by the number of each incomplete choice
        self._speaking: set[int] = set()  # the numbers of those that end with sound, not with a token
        self._prefills: dict[int, Prefill] = {}  # by the numbers of choices without an event whose prompts they compute
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
        self._transport, _ = await asyncio.get_running_loop().create_connection(lambda: receiver, sock=connection)
        try:
            await receiver.end
        except (BrokenPipeError, ConnectionResetError):
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
        self, prompt: Prompt, params: SamplingParams, seeds: Sequence[int], prefill: "Prefill | None" = None
    ) -> Iterator[list[AsyncGenerator[Progress]]]:
        """See EngineClient.submit. prefill: computes the prompt before this engine gets the request."""
        numbers = range(self._next_number, self._next_number + len(seeds))
        self._next_number = numbers.stop
        queues: list[asyncio.Queue[_Item]] = [asyncio.Queue() for _ in numbers]
        self._queues.update(zip(numbers, queues, strict=True))
        if params.speech is not None:
            self._speaking.update(numbers)
        submit = Submit(numbers.start, prompt, params, list(seeds), prompt.digests)
        if prefill is None:
            self._queue.add(submit)
        else:
            self._prefills.update(dict.fromkeys(numbers, prefill))
            prefill.begin(submit, partial(self._send_prefilled, numbers), partial(self._refuse, numbers))
        del prompt, submit  # pictures take much memory, and this process needs them no longer than until they are sent
        try:
            speaks = params.speech is not None
            yield [self._tokens(number, queue, speaks) for number, queue in zip(numbers, queues, strict=True)]
        finally:
            if prefill is not None:
                prefill.end()
            for number in numbers:
                self._cancel(number)

    def _send_prefilled(self, numbers: Iterable[int], submit: Submit) -> None:
        """Send a request whose prompt is computed, but for the choices that are cancelled."""
        self._queue.add(submit)
        for number in numbers:
            if number not in self._queues:
                self._queue.cancel(number)

    def _refuse(self, numbers: Iterable[int], sentence: str) -> None:
        for number in numbers:
            self._put(number, FailedEvent(number, sentence))

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
        self._prefills.pop(number, None)
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
                self.totals.add(self.state or message, message)
                self.state = message
                self._on_ready()

    def _put(self, number: int, event: Event) -> None:
        last = is_last(event, number in self._speaking)
        self._queue.receive(number, last=last)
        if number not in self._queues:  # cancelled, and the engine has not read the Cancel message yet
            return
        if (prefill := self._prefills.pop(number, None)) is not None:
            event = prefill.end_with(event)
        self._queues[number].put_nowait(event)
        if last:
            del self._queues[number]
            self._speaking.discard(number)

    def _send(self, message: ToEngine) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(encode(message))


class Prefill:
    """A prompt that the engine of the prefill ranks computes before the engine of the decode ranks gets its request.

    Its pages stay where the decode ranks take them until the first event of the request, or its end. If the prefill
    ranks are lost meanwhile, the decode ranks compute the prompt.
    """

    def __init__(self, engine: EngineConnection) -> None:
        self._engine = engine
        self._submitted = ExitStack()
        self._taken = asyncio.Event()
        self._computed_s = 0.0  # when the prompt was, on the clock of `time.monotonic`
        self._start: Start | None = None
        self._running: asyncio.Task[None] | None = None

    def begin(self, submit: Submit, send: Callable[[Submit], None], refuse: Callable[[str], None]) -> None:
        """Compute the prompt of a request, and then `send` the request with the slots of its pages. refuse: is called
        with a sentence if the prompt cannot run."""
        (events,) = self._submitted.enter_context(self._engine.submit(submit.prompt, PROMPT_ALONE, [0]))
        self._running = asyncio.create_task(self._run(events, submit, send, refuse))

    def end_with(self, event: Event) -> Event:
        """Release the pages, because `event` is the first of a choice. Returns it with the start of the prompt."""
        if self._computed_s and not self._taken.is_set():
            self._engine.totals.count_transfer(time.monotonic() - self._computed_s)
        self._taken.set()
        if not isinstance(event, TokenEvent) or event.start is None or self._start is None:
            return event
        cached = max(self._start.cached_tokens, event.start.cached_tokens)
        return replace(event, start=Start(cached, self._start.after_s + event.start.after_s))

    def end(self) -> None:
        """Release the pages, or cancel the computation."""
        if self._running is not None:
            self._running.cancel()
        self._submitted.close()

    async def _run(
        self,
        events: AsyncGenerator[Progress],
        submit: Submit,
        send: Callable[[Submit], None],
        refuse: Callable[[str], None],
    ) -> None:
        async with aclosing(events):
            try:
                event = await anext(events)
            except RefusedError as e:
                refuse(str(e))
                return
            except EngineGoneError:
                log.info("the prefill ranks are lost: the decode ranks compute a prompt of their requests")
            else:
                assert isinstance(event, PrefilledEvent), event
                submit, self._start = replace(submit, slots=event.slots), event.start
                self._computed_s = time.monotonic()
            send(submit)
            del submit  # pictures take much memory
            await self._taken.wait()


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
