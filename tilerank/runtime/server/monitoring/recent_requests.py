"""The most recent requests for the status page: times and sizes, never their text."""

import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from ..chat.deltas import Delta, Usage
from ..http.errors import ApiError

MAX_KEPT = 20
MINUTE_S = 60.0


@dataclass(eq=False)
class RecentRequest:
    """Times are those of time.monotonic. end: why the request has ended."""

    id: str
    usage: Usage
    began: float
    first: float | None = None
    ended: float | None = None
    end: str | None = None


collected: ContextVar[list[RecentRequest] | None] = ContextVar("collected", default=None)
"""Where the request over HTTP that is being answered collects its requests of the model, for the log."""


class RecentRequests:
    """The last MAX_KEPT requests, and how those of the last minute ended."""

    def __init__(self) -> None:
        self._requests: deque[RecentRequest] = deque(maxlen=MAX_KEPT)
        self._ends: deque[tuple[float, str]] = deque()

    async def track(self, id: str, usage: Usage, deltas: AsyncGenerator[Delta]) -> AsyncGenerator[Delta]:
        """Yield the same deltas and record the request. `id`: the request's id in the API."""
        reason = None
        with self.request(id, usage) as request:
            async with aclosing(deltas):
                async for delta in deltas:
                    reason = delta.finish_reason or reason
                    request.first = request.first or time.monotonic()
                    yield delta
            request.end = reason

    @contextmanager
    def request(self, id: str, usage: Usage) -> Iterator[RecentRequest]:
        """Record a request, which ends with the context. The caller sets why it has ended, unless it fails."""
        request = RecentRequest(id, usage, time.monotonic())
        self._requests.appendleft(request)
        if (of_http := collected.get()) is not None:
            of_http.append(request)
        try:
            yield request
        except ApiError:
            request.end = "failed"
            raise
        finally:
            request.ended = time.monotonic()
            request.end = request.end or "cancelled"
            self._ends.append((request.ended, request.end))
            self._forget()

    def ends(self) -> dict[str, int]:
        """Return how many requests ended in the last minute, by finish reason, "failed" and "cancelled"."""
        self._forget()
        return dict(Counter(end for _, end in self._ends))

    def _forget(self) -> None:
        """Drop ends that are older than a minute."""
        while self._ends and self._ends[0][0] < time.monotonic() - MINUTE_S:
            self._ends.popleft()

    def as_json(self) -> list[dict[str, Any]]:
        """Return the requests as JSON objects, the newest first."""
        now = time.monotonic()
        return [
            {
                "id": request.id,
                "age_s": now - request.began,
                "first_s": None if request.first is None else request.first - request.began,
                "took_s": None if request.ended is None else request.ended - request.began,
                "prompt_tokens": request.usage.prompt_tokens,
                "completion_tokens": request.usage.text_tokens,
                "end": request.end,
            }
            for request in self._requests
        ]
