"""The latest requests, for the status page: how long and how large they were, never what was in them."""

import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from .completions import Answering, Delta
from .errors import ApiError

KEPT = 20


@dataclass(eq=False)
class _Request:
    id: str
    prompt_tokens: int
    began: float
    answering: Answering | None  # while it runs: it holds the prompt
    completion_tokens: int = 0
    ended: float | None = None
    end: str | None = None  # why


class Latest:
    def __init__(self) -> None:
        self._requests: deque[_Request] = deque(maxlen=KEPT)

    async def watch(self, id: str, answering: Answering, deltas: AsyncIterator[Delta]) -> AsyncGenerator[Delta]:
        """The same deltas; `id` is what the client calls the request."""
        request = _Request(id, answering.prompt_tokens, time.monotonic(), answering)
        self._requests.appendleft(request)
        reason = None
        try:
            async with aclosing(deltas):  # type: ignore[type-var]
                async for delta in deltas:
                    reason = delta.finish_reason or reason
                    yield delta
            request.end = reason
        except ApiError:
            request.end = "failed"
            raise
        finally:
            request.ended = time.monotonic()
            request.completion_tokens, request.answering = answering.completion_tokens, None
            request.end = request.end or "cancelled"

    def told(self) -> list[dict[str, Any]]:
        """The newest first, ready for JSON."""
        now = time.monotonic()
        return [
            {
                "id": request.id,
                "age_s": now - request.began,
                "took_s": None if request.ended is None else request.ended - request.began,
                "prompt_tokens": request.prompt_tokens,
                "completion_tokens": (request.answering or request).completion_tokens,
                "end": request.end,
            }
            for request in self._requests
        ]
