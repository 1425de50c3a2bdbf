"""The requests that wait in the HTTP process until the engine can take their prompts.

The engine gets prompts in order of arrival, a bounded amount ahead of what it has started: enough to fill its steps,
and little enough that it reads the message that cancels a request soon after the client is gone. A request that is
cancelled in the queue never reaches the engine.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from .messages import Cancel, Submit, ToEngine

MAX_TOKENS = 8192
"""Prompt tokens of the requests that are sent and not started: those of a few of the engine's steps."""
CHOICE_TOKENS = 32
"""Tokens as which each choice of a request counts beside its prompt."""
MAX_BYTES = 64 << 20
"""Bytes of the media of the requests that are sent and not started."""
MAX_HELD = 1 << 30
"""Bytes of the media of all requests that are sent: the engine holds them until the last choice ends, because it may
have to encode them again."""


@dataclass(eq=False)
class _QueuedRequest:
    """A request, without its prompt once that is sent.

    cancelled: numbers of choices cancelled while it is queued. started: the engine has sent a message about one of
    them. left: how many have not ended.
    """

    submit: Submit | None
    numbers: range
    tokens: int
    nbytes: int
    cancelled: set[int] = field(default_factory=set)
    started: bool = False

    def __post_init__(self) -> None:
        self.left = len(self.numbers)


class RequestQueue:
    """The requests to one engine. send: sends a message to it."""

    def __init__(self, send: Callable[[ToEngine], None]) -> None:
        self._send = send
        self._waiting: deque[_QueuedRequest] = deque()
        self._queued: dict[int, _QueuedRequest] = {}  # by the number of each choice
        self._sent: dict[int, _QueuedRequest] = {}  # the same for choices that have not ended
        self._tokens = self._nbytes = self._held = 0  # what MAX_TOKENS, MAX_BYTES and MAX_HELD limit

    def __len__(self) -> int:
        """The number of queued choices."""
        return len(self._queued)

    @property
    def waiting_tokens(self) -> int:
        """The prompt tokens of the queued requests."""
        return sum(entry.tokens for entry in self._waiting)

    def add(self, submit: Submit) -> None:
        """Send a request, now or when the engine can take it."""
        numbers = range(submit.number, submit.number + len(submit.seeds))
        tokens = len(submit.prompt.token_ids) + CHOICE_TOKENS * len(numbers)
        entry = _QueuedRequest(submit, numbers, tokens, sum(len(medium.frames) for medium in submit.prompt.media))
        self._waiting.append(entry)
        self._queued.update(dict.fromkeys(numbers, entry))
        self._advance()

    def cancel(self, number: int) -> None:
        """Cancel a choice, in the queue or in the engine, if it is in either."""
        entry = self._queued.get(number)
        if entry is None:
            if number in self._sent:
                self._send(Cancel(number))
            return
        entry.cancelled.add(number)
        if len(entry.cancelled) == len(entry.numbers):
            self._waiting.remove(entry)
            self._leave(entry)
            self._advance()

    def receive(self, number: int, *, last: bool) -> None:
        """The engine has sent a message about choice `number`, perhaps its last one."""
        entry = self._sent.get(number)
        if entry is None:
            return
        if not entry.started:
            entry.started = True
            self._tokens -= entry.tokens
            self._nbytes -= entry.nbytes
            self._advance()
        if last:
            del self._sent[number]
            entry.left -= 1
            if not entry.left:
                self._held -= entry.nbytes
                self._advance()

    def close(self) -> None:
        """Drop all requests: the engine is gone."""
        self._waiting.clear()
        self._queued.clear()
        self._sent.clear()

    def _advance(self) -> None:
        while (entry := self._next()) is not None:
            self._waiting.remove(entry)
            self._leave(entry)
            self._sent.update(dict.fromkeys(entry.numbers, entry))
            self._tokens += entry.tokens
            self._nbytes += entry.nbytes
            self._held += entry.nbytes
            assert entry.submit is not None
            self._send(entry.submit)
            entry.submit = None
            for number in entry.cancelled:
                self._send(Cancel(number))

    def _next(self) -> _QueuedRequest | None:
        """Return the request to send next, if there is room. Text passes media that wait for MAX_HELD."""
        held_is_full = False
        for entry in self._waiting:
            if not (
                _has_room(self._tokens, entry.tokens, MAX_TOKENS) and _has_room(self._nbytes, entry.nbytes, MAX_BYTES)
            ):
                return None
            if not entry.nbytes or (not held_is_full and _has_room(self._held, entry.nbytes, MAX_HELD)):
                return entry
            held_is_full = True
        return None

    def _leave(self, entry: _QueuedRequest) -> None:
        for number in entry.numbers:
            del self._queued[number]


def _has_room(used: int, wanted: int, limit: int) -> bool:
    """Return whether `wanted` fits beside `used`. A request that exceeds the limit alone fits if nothing is used."""
    return not used or not wanted or used + wanted <= limit
