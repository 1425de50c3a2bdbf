"""Connections beyond the limit: those without a request give way, and new ones wait for those with one."""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
from uvicorn import Config
from uvicorn.server import ServerState

from tests.launch.test_http_timeouts import REQUEST, App
from tilerank.launch.serving import acceptor as acceptor_module
from tilerank.launch.serving.acceptor import Acceptor
from tilerank.launch.serving.http_timeouts import DeadlineProtocol


@asynccontextmanager
async def accepting(app: Any, limit: int) -> AsyncIterator[int]:
    """A server on the port that is returned."""
    config = Config(app, log_config=None, lifespan="off")
    config.load()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        acceptor = Acceptor(listener, partial(DeadlineProtocol, config, ServerState(), {}), limit)
        yield listener.getsockname()[1]
        acceptor.close()
        await acceptor.wait_closed()


async def ask(port: int) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(REQUEST)
    answer = await reader.readuntil(b"\r\n")
    writer.close()
    return answer


@pytest.mark.parametrize("data", [b"", b"GET / HTTP/1.1\r\nX: "], ids=["idle", "half a head"])
def test_the_idle_give_way(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, data: bytes) -> None:
    """The one that came first, and with lines of one kind in the log (log_limit.py), however many come."""
    monkeypatch.setattr(acceptor_module, "GRACE_S", 0.0)
    monkeypatch.setattr(acceptor_module, "RETRY_S", 0.001)
    app = App()
    app.go_on.set()

    async def run() -> None:
        async with accepting(app, 3) as port:
            idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
            for _, writer in idle:
                writer.write(data)
                await asyncio.sleep(0.01)
            for _ in range(3):
                assert (await ask(port)).startswith(b"HTTP/1.1 200")
            with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
                await idle[0][0].readexactly(1)
            for _ in range(50):
                idle.append(await asyncio.open_connection("127.0.0.1", port))
            assert (await ask(port)).startswith(b"HTTP/1.1 200")
            for _, writer in idle:
                writer.close()

    with caplog.at_level(logging.WARNING, logger="tilerank"):
        asyncio.run(asyncio.wait_for(run(), 60))
    assert {(record.msg, record.getMessage()) for record in caplog.records} == {
        (
            "all %d connections are in use; those without a request are closed",
            "all 3 connections are in use; those without a request are closed",
        )
    }


def test_new_connections_wait_while_all_have_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptor_module, "GRACE_S", 0.0)
    monkeypatch.setattr(acceptor_module, "RETRY_S", 0.001)
    app = App()

    async def run() -> None:
        async with accepting(app, 2) as port:
            asking = [asyncio.create_task(ask(port)) for _ in range(6)]
            await asyncio.sleep(0.1)
            assert not any(task.done() for task in asking)
            app.go_on.set()
            for answer in await asyncio.gather(*asking):
                assert answer.startswith(b"HTTP/1.1 200")

    asyncio.run(asyncio.wait_for(run(), 60))
