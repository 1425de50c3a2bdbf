"""Answering below a path as well, for proxies that pass paths on as they are."""

from starlette.types import ASGIApp, Receive, Scope, Send


class RootPathMiddleware:
    """An ASGI application that wraps another, which gets paths without the prefix `root_path`. Other paths stay."""

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app = app
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        rest = scope["path"].removeprefix(self._root_path)
        if rest.startswith("/"):
            scope = {**scope, "path": rest}
        await self._app(scope, receive, send)
