"""What requests pass on their way in: counts those under way, and turns new ones away once the server is to stop."""

import asyncio

from starlette.types import ASGIApp, Receive, Scope, Send

from .errors import ApiError, refusal

OPEN = ("/", "/status", "/metrics", "/version")
"""Paths that are answered to the end: whoever watches the server wants to see it stop."""


class Gate:
    """An ASGI application around another."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._closed = False
        self._under_way = 0
        self._empty = asyncio.Event()
        self._empty.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._closed and scope["path"] not in OPEN:
            error = ApiError(503, "the server is about to stop", code="stopping")
            await refusal(error)(scope, receive, send)
            return
        self._under_way += 1
        self._empty.clear()
        try:
            await self._app(scope, receive, send)
        finally:
            self._under_way -= 1
            if not self._under_way:
                self._empty.set()

    async def drain(self) -> None:
        """Lets nobody in from now on; returns when all who were in are answered."""
        self._closed = True
        await self._empty.wait()
