"""A line of the log for each request, without its text; X-Request-Id and traceparent, taken and returned."""

import logging
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .recent_requests import RecentRequest, collected

log = logging.getLogger(__name__)

LINES_PER_S = 100
"""Lines of requests that the model ran. More are summed up, as are further requests of one route and status."""
_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
"""What X-Request-Id may be; another one is replaced."""
_TRACEPARENT = re.compile(r"00-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
"""A header of W3C Trace Context, version 00. Another one is left out."""
_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
_READING = ("GET", "HEAD", "OPTIONS")
_SCOPE = "tilerank.logged"


@dataclass(eq=False)
class LoggedRequest:
    """A request over HTTP. id: of X-Request-Id, or made here. began: time.monotonic. began_ns: Unix time. route: the
    path of its operation, without values. status: 0 before there is one. took_s: until the end. answers: of the model.
    is_whole: whether the end of the answer was sent."""

    id: str
    method: str
    traceparent: str | None
    began: float = field(default_factory=time.monotonic)
    began_ns: int = field(default_factory=time.time_ns)
    route: str = "other"
    status: int = 0
    took_s: float = 0.0
    answers: list[RecentRequest] = field(default_factory=list)
    is_whole: bool = False

    @property
    def first_s(self) -> float | None:
        """The seconds to the first token."""
        firsts = [answer.first - self.began for answer in self.answers if answer.first is not None]
        return min(firsts, default=None)

    @property
    def end(self) -> str:
        """Why the request has ended: the finish reason of the model, "failed", "cancelled", "refused" or "done"."""
        if self.answers:
            return self.answers[-1].end or "failed"
        if not self.is_whole:
            return "cancelled"
        return "done" if self.status < 400 else "refused" if self.status < 500 else "failed"

    @property
    def is_repeated(self) -> bool:
        """Whether it only reads: monitors repeat such requests for ever, and also while no engine is ready."""
        reads = self.method in _READING and (self.status < 400 or self.status == 503)
        return reads and not self.answers

    def as_json(self) -> dict[str, Any]:
        """Return the request as a JSON object, with the ids that join it with other logs and with traces."""
        first_s = self.first_s
        return {
            "id": self.id,
            "trace_id": self.traceparent and self.traceparent.split("-")[1],
            "method": self.method,
            "route": self.route,
            "status": self.status,
            "prompt_tokens": sum(answer.usage.prompt_tokens for answer in self.answers),
            "completion_tokens": sum(answer.usage.completion_tokens for answer in self.answers),
            "accepted_tokens": sum(answer.usage.accepted_tokens for answer in self.answers),
            "rejected_tokens": sum(answer.usage.rejected_tokens for answer in self.answers),
            "first_s": None if first_s is None else round(first_s, 6),
            "took_s": round(self.took_s, 6),
            "end": self.end,
        }


class RequestLogMiddleware:
    """An ASGI application that wraps another. on_end: is called with each request once it has ended."""

    def __init__(self, app: ASGIApp, on_end: Callable[[LoggedRequest], None] | None = None) -> None:
        self._app = app
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = {name: value.decode("latin-1") for name, value in scope["headers"]}
        id, traceparent = given.get(b"x-request-id", ""), given.get(b"traceparent", "")
        request = LoggedRequest(
            id if _ID.fullmatch(id) else f"req-{secrets.token_hex(12)}",
            scope["method"] if scope["method"] in _METHODS else "other",
            traceparent if _TRACEPARENT.fullmatch(traceparent) else None,
        )
        headers = [(b"x-request-id", request.id.encode())]
        if request.traceparent is not None:
            headers.append((b"traceparent", request.traceparent.encode()))

        async def send_with_ids(message: Message) -> None:
            if message["type"] == "http.response.start":
                request.status = message["status"]
                message = {**message, "headers": [*message.get("headers", ()), *headers]}
            elif message["type"] == "http.response.body":
                request.is_whole = not message.get("more_body", False)
            await send(message)

        collected.set(request.answers)
        try:
            await self._app({**scope, _SCOPE: request}, receive, send_with_ids)
        finally:
            request.took_s = time.monotonic() - request.began
            _write(request)
            if self._on_end is not None:
                self._on_end(request)


def set_route(request: Request, route: str) -> None:
    """Name the operation of a request, for its line in the log."""
    logged: LoggedRequest | None = request.scope.get(_SCOPE)
    if logged is not None:
        logged.route = route


def _write(request: LoggedRequest) -> None:
    """Log a request. Those that only read are logged with --log-level debug."""
    values = request.as_json()
    of_request = (request.took_s, request.end, request.id)
    if request.answers:
        first = "" if request.first_s is None else f", the first after {request.first_s:.3f} s"
        tokens = f"{values['prompt_tokens']} + {values['completion_tokens']} tokens{first}"
        message, arguments = "%s %s: %d, %s, %.3f s, %s, id %s", (request.method, request.route, request.status, tokens)
        log.info(message, *arguments, *of_request, extra={"request": values, "lines_per_s": LINES_PER_S})
        return
    # The statement that the log limits lines by: there are few routes and statuses.
    message = f"{request.method} {request.route}: {request.status}, %.3f s, %s, id %s"
    log.log(logging.DEBUG if request.is_repeated else logging.INFO, message, *of_request, extra={"request": values})
