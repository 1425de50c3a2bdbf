"""Draining: a stopping server refuses new requests and completes the running ones."""

import asyncio

from starlette.types import ASGIApp, Receive, Scope, Send

from .errors import ApiError, error_response

OPEN_PATHS = ("/", "/status", "/metrics", "/version")
"""Paths that work while the server drains, for monitoring."""


class DrainMiddleware:
    """An ASGI application that wraps another and counts its running requests."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._draining = False
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._draining and scope["path"] not in OPEN_PATHS:
            error = ApiError(503, "The server is shutting down.", code="stopping")
            await error_response(error)(scope, receive, send)
            return
        self._running += 1
        self._idle.clear()
        try:
            await self._app(scope, receive, send)
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()

    @property
    def running(self) -> int:
        """Requests that are not answered yet."""
        return self._running

    async def drain(self) -> None:
        """Refuse new requests from now on. Returns when all running requests are answered."""
        self._draining = True
        await self._idle.wait()
