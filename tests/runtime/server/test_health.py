"""/health_generate: any number of clients share one probe. The uptime of /status."""

import asyncio
import time

import pytest
from command import DEMO

from tests.runtime.server.scripted import Server, run


def test_one_probe_answers_all_who_ask() -> None:
    async def ask(server: Server) -> None:
        server.answer, server.limit = "a", 0
        leaving = asyncio.create_task(server.http.get("/health_generate"))
        asking = [asyncio.create_task(server.http.get("/health_generate")) for _ in range(20)]
        await asyncio.sleep(0.05)
        leaving.cancel()  # the first one, which began the probe
        await asyncio.gather(leaving, return_exceptions=True)
        server.more.set()
        assert [answer.status_code for answer in await asyncio.gather(*asking)] == [200] * 20
        assert len(server.submits) == 1
        server.cut = True
        answers = await asyncio.gather(*(server.http.get("/health_generate") for _ in range(3)))
        assert [answer.status_code for answer in answers] == [503] * 3
        assert len(server.submits) == 2

    run(DEMO, None, ask)


def test_the_uptime_follows_no_jump_of_the_system_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask(server: Server) -> None:
        monkeypatch.setattr(time, "time", lambda: 0.0)
        assert 0 <= (await server.http.get("/status")).json()["uptime_s"] < 60

    run(DEMO, None, ask)
