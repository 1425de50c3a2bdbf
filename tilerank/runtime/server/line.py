"""The requests that wait in the HTTP process until the engine can take their prompts.

The engine gets prompts in order of arrival, a bounded amount ahead of what it has started: enough to fill its steps,
and little enough that it reads the message that cancels a request soon after the client is gone. A request that is
cancelled in line never reaches the engine.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from .messages import Cancel, Submit, ToEngine

MAX_TOKENS = 8192
"""Prompt tokens that the engine may hold of requests that it has not started: those of a few of its steps."""
CHOICE_TOKENS = 32
"""Tokens as which each choice of a request counts beside its prompt."""
MAX_BYTES = 64 << 20
"""Bytes of media that the engine may hold of requests that it has not started."""


@dataclass(eq=False)
class _Entry:
    """A request, without its prompt once that is sent. cancelled: numbers of choices cancelled while it is in line."""

    submit: Submit | None
    numbers: range
    tokens: int
    nbytes: int
    cancelled: set[int] = field(default_factory=set)


class Line:
    """The requests to one engine. send: sends a message to it."""

    def __init__(self, send: Callable[[ToEngine], None]) -> None:
        self._send = send
        self._waiting: deque[_Entry] = deque()
        self._in_line: dict[int, _Entry] = {}  # by the number of each choice
        self._unstarted: dict[int, _Entry] = {}  # the same for those sent; the engine has started none of their choices
        self._tokens = self._nbytes = 0  # of the unstarted

    def __len__(self) -> int:
        """The number of choices in line."""
        return len(self._in_line)

    def add(self, submit: Submit) -> None:
        """Send a request, now or when the engine can take it."""
        numbers = range(submit.number, submit.number + len(submit.seeds))
        tokens = len(submit.prompt.token_ids) + CHOICE_TOKENS * len(numbers)
        entry = _Entry(submit, numbers, tokens, sum(len(medium.frames) for medium in submit.prompt.media))
        self._waiting.append(entry)
        self._in_line.update(dict.fromkeys(numbers, entry))
        self._advance()

    def cancel(self, number: int) -> None:
        """Cancel a choice, in line or in the engine."""
        entry = self._in_line.get(number)
        if entry is None:
            self._send(Cancel(number))
            return
        entry.cancelled.add(number)
        if len(entry.cancelled) == len(entry.numbers):
            self._waiting.remove(entry)
            self._leave(entry)
            self._advance()

    def receive(self, number: int) -> None:
        """The engine has sent a message about choice `number`: it has started the request, or ended it."""
        entry = self._unstarted.get(number)
        if entry is not None:
            for one in entry.numbers:
                del self._unstarted[one]
            self._tokens -= entry.tokens
            self._nbytes -= entry.nbytes
            self._advance()

    def close(self) -> None:
        """Drop all requests: the engine is gone."""
        self._waiting.clear()
        self._in_line.clear()
        self._unstarted.clear()

    def _advance(self) -> None:
        while self._waiting and self._has_room(self._waiting[0]):
            entry = self._waiting.popleft()
            self._leave(entry)
            self._unstarted.update(dict.fromkeys(entry.numbers, entry))
            self._tokens += entry.tokens
            self._nbytes += entry.nbytes
            assert entry.submit is not None
            self._send(entry.submit)
            entry.submit = None
            for number in entry.cancelled:
                self._send(Cancel(number))

    def _has_room(self, entry: _Entry) -> bool:
        fits = self._tokens + entry.tokens <= MAX_TOKENS and self._nbytes + entry.nbytes <= MAX_BYTES
        return fits or not self._unstarted

    def _leave(self, entry: _Entry) -> None:
        for number in entry.numbers:
            del self._in_line[number]
