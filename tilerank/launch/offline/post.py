"""Sends a request to an ASGI application in this process."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message

from tilerank.runtime.server.http.errors import ApiError


@dataclass
class _Exchange:
    """A request whose body arrives at once, and the response to it."""

    body: bytes
    status: int = 0
    sent: bytearray = field(default_factory=bytearray)
    is_read: bool = False

    async def receive(self) -> Message:
        if self.is_read:
            await asyncio.Event().wait()  # the client stays until it has the response
        self.is_read = True
        return {"type": "http.request", "body": self.body, "more_body": False}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self.sent += message.get("body", b"")


async def post(app: ASGIApp, path: str, body: bytes) -> tuple[int, bytes]:
    """POST a JSON text to a path of the application. Returns the status and the body of the response."""
    exchange = _Exchange(body)
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))],
        "client": None,
        "server": None,
    }
    await app(scope, exchange.receive, exchange.send)
    return exchange.status, bytes(exchange.sent)


def api_error(status: int, answer: dict[str, Any]) -> ApiError:
    """Return the error that a response with this status has."""
    error = answer["error"]
    return ApiError(status, error["message"], param=error["param"], code=error["code"])
