"""Streams are never silent: the status line comes at once, and something every few seconds while nothing is written."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.server.scripted import QWEN_3, Server, make_model, run
from tilerank.runtime.server.apis import answer

PATHS: dict[str, Any] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Who?"}]},
    "/v1/completions": {"prompt": "Who?"},
    "/v1/responses": {"input": "Who?", "store": False},
    "/v1/messages": {"messages": [{"role": "user", "content": "Who?"}], "max_tokens": 100},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("streams") / "model")


class Sent:
    """What the application has sent of one response. status: None before the status line."""

    def __init__(self) -> None:
        self.status: int | None = None
        self.body = b""
        self._changed = asyncio.Event()

    async def __call__(self, message: Any) -> None:
        self.status = message.get("status", self.status)
        self.body += message.get("body", b"")
        self._changed.set()

    async def until(self, text: bytes) -> None:
        """Wait until the body has this text."""
        while text not in self.body:
            self._changed.clear()
            await self._changed.wait()


@asynccontextmanager
async def asking(server: Server, path: str, **fields: Any) -> AsyncIterator[tuple[Sent, asyncio.Event]]:
    """Post a streamed request. Yields what is sent, and an event that disconnects the client."""
    scope: dict[str, Any] = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http"}
    scope |= {"method": "POST", "path": path, "root_path": "", "query_string": b""}
    scope["headers"] = [(b"content-type", b"application/json")]
    body, gone, sent = json.dumps(PATHS[path] | {"stream": True} | fields).encode(), asyncio.Event(), Sent()
    messages: list[Any] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        if messages:
            return messages.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    running = asyncio.ensure_future(server.app(scope, receive, sent))
    try:
        async with asyncio.timeout(60):
            yield sent, gone
            await running
    finally:
        running.cancel()


@pytest.mark.parametrize("path", PATHS)
def test_a_stream_begins_before_the_first_token(model: Path, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer, "SILENCE_S", 0.01)
    alive = b'event: ping\ndata: {"type":"ping"}\n\n' if path == "/v1/messages" else b": keep-alive\n\n"

    async def ask(server: Server) -> None:
        server.answer, server.limit = "Moses", 0
        async with asking(server, path) as (sent, _):
            await sent.until(alive * 3)
            assert sent.status == 200 and sent.body == alive * sent.body.count(alive)
            server.more.set()
        assert sent.body.rstrip().endswith((b"[DONE]", b'"message_stop"}')) or b"response.completed" in sent.body

    run(model, QWEN_3, ask)


def test_a_stream_goes_on_while_a_call_is_held_back(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer, "SILENCE_S", 0.01)
    tools = [{"type": "function", "function": {"name": "now"}}]

    async def ask(server: Server) -> None:
        server.answer = '<tool_call>{"name": "now", "arguments": {"a": "b"}}</tool_call>'
        server.limit = server.count('<tool_call>{"name": "now", "arg')
        async with asking(server, "/v1/chat/completions", tools=tools) as (sent, _):
            await sent.until(b": keep-alive\n\n" * 2)
            assert b"now" not in sent.body
            server.more.set()
        assert b'"name":"now"' in sent.body

    run(model, QWEN_3, ask)


@pytest.mark.parametrize("path", PATHS)
def test_an_engine_that_stops_before_the_first_token_is_an_event(model: Path, path: str) -> None:
    async def ask(server: Server) -> None:
        server.answer, server.limit, server.cut = "Moses", 0, True
        server.more.set()
        async with asking(server, path) as (sent, _):
            pass
        assert sent.status == 200 and b"The engine stopped before the answer was complete." in sent.body
        assert 'request_errors_total{code="503",model_name="it"} 1.0' in (await server.http.get("/metrics")).text
        async with asking(server, path) as (sent, _):  # nothing can be queued now
            pass
        assert sent.status == 503

    run(model, QWEN_3, ask)


def test_a_client_that_leaves_before_the_first_token_takes_its_request_along(model: Path) -> None:
    async def ask(server: Server) -> None:
        server.answer, server.limit = "Moses", 0
        async with asking(server, "/v1/chat/completions") as (sent, gone):
            while not server.submits:
                await asyncio.sleep(0)
            gone.set()
        server.more.set()
        while not server.cancelled:
            await asyncio.sleep(0)
        assert sent.status == 200 and b"Moses" not in sent.body

    run(model, QWEN_3, ask)
