"""Slow clients are disconnected, and no others. The deadlines here are zero or infinite, so that load cannot matter."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from uvicorn import Config
from uvicorn.server import ServerState

from tilerank.launch.serving import http_timeouts
from tilerank.launch.serving.http_timeouts import DeadlineProtocol

REQUEST = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\nab"
ENDLESS = 1e6


class App:
    """Answers in `pieces` once `go_on` is set. `left`: the client disconnected during an answer of several pieces."""

    def __init__(self, pieces: int = 1) -> None:
        self.asked, self.go_on, self.ended = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.pieces = pieces
        self.left = False

    async def __call__(self, scope: Any, receive: Callable[[], Awaitable[Any]], send: Callable[[Any], Any]) -> None:
        while (await receive()).get("more_body"):
            pass
        self.asked.set()
        await self.go_on.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for i in range(self.pieces):
            await send({"type": "http.response.body", "body": b"x" * (1 << 16), "more_body": i + 1 < self.pieces})
        self.left = (await receive())["type"] == "http.disconnect" and self.pieces > 1
        self.ended.set()


async def connected(app: Any) -> tuple[DeadlineProtocol, asyncio.StreamReader, asyncio.StreamWriter]:
    """Return the server's end of a connection, and the client's."""
    made: asyncio.Future[DeadlineProtocol] = asyncio.get_running_loop().create_future()
    config = Config(app, log_config=None, lifespan="off", timeout_keep_alive=10**6)
    config.load()

    def protocol() -> DeadlineProtocol:
        made.set_result(DeadlineProtocol(config, ServerState(), {}))
        return made.result()

    server = await asyncio.get_running_loop().create_server(protocol, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname()[:2], limit=1 << 20)
    server.close()
    return await made, reader, writer


async def gone(reader: asyncio.StreamReader) -> bool:
    try:
        return await asyncio.wait_for(reader.read(), 110) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize("sent", [b"", REQUEST[:20], REQUEST[:-1]], ids=["nothing", "half a head", "half a body"])
def test_who_does_not_get_done_with_a_request(monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    async def run() -> None:
        monkeypatch.setattr(http_timeouts, "REQUEST_S", ENDLESS)
        protocol, reader, writer = await connected(App())
        writer.write(sent)
        await writer.drain()
        assert protocol._sending is not None
        protocol._sending.cancel()
        monkeypatch.setattr(http_timeouts, "REQUEST_S", 0)
        protocol._await_request()
        assert await gone(reader)

    asyncio.run(run())


def test_who_waits_for_an_answer_may_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The deadline for the next request starts anew after the answer."""

    async def run() -> None:
        monkeypatch.setattr(http_timeouts, "REQUEST_S", ENDLESS)
        app = App()
        protocol, reader, writer = await connected(app)
        for _ in range(2):
            writer.write(REQUEST)
            await asyncio.wait_for(app.asked.wait(), 110)
            assert protocol._sending is None
            app.go_on.set()
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
            await reader.readuntil(b"\r\n0\r\n\r\n")
            assert protocol._sending is not None
            app.asked.clear()
            app.go_on.clear()
        writer.close()
        await writer.wait_closed()

    asyncio.run(run())


@pytest.mark.parametrize("takes", [True, False])
def test_who_does_not_take_an_answer(monkeypatch: pytest.MonkeyPatch, takes: bool) -> None:
    async def run() -> None:
        monkeypatch.setattr(http_timeouts, "REQUEST_S", ENDLESS)
        monkeypatch.setattr(http_timeouts, "TAKE_S", ENDLESS if takes else 0)
        app = App(pieces=1000)  # more than the buffers hold
        protocol, reader, writer = await connected(app)
        writer.write(REQUEST)
        app.go_on.set()
        if takes:
            total = 0
            while total < 1000 << 16:
                total += len(await asyncio.wait_for(reader.read(1 << 20), 110))
            writer.close()
        await asyncio.wait_for(app.ended.wait(), 110)
        assert protocol._taking is None or not takes
        assert protocol.transport.is_closing() or takes

    asyncio.run(run())
