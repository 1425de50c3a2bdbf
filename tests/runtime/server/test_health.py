"""/health_generate: any number of clients share one probe. The uptime of /status."""

import asyncio
import time
from collections.abc import AsyncGenerator

import httpx
import pytest
from command import DEMO

from tilerank.loader.generation_config import SamplingDefaults
from tilerank.loader.tokenizer import Tokenizer
from tilerank.runtime.protocol.events import TokenEvent
from tilerank.runtime.protocol.params import SamplingParams
from tilerank.runtime.protocol.prompt import Prompt
from tilerank.runtime.server.apis.service import ServerSettings
from tilerank.runtime.server.app import make_app
from tilerank.runtime.server.link.client import EngineClient, EngineGoneError


class Client(EngineClient):
    """Counts its requests, which wait for `go_on` and then fail if there is an `error`."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0
        self.go_on = asyncio.Event()
        self.error: Exception | None = None

    async def generate(self, prompt: Prompt, params: SamplingParams) -> AsyncGenerator[TokenEvent]:
        self.asked += 1
        await self.go_on.wait()
        if self.error is not None:
            raise self.error
        yield TokenEvent(0, 1, 0.0, "length")


async def accept(grammar: str) -> None: ...


def connected(client: EngineClient) -> httpx.AsyncClient:
    settings = ServerSettings("demo", "0", None, SamplingDefaults(), None, accept)
    transport = httpx.ASGITransport(make_app(client, Tokenizer(DEMO), settings))
    return httpx.AsyncClient(transport=transport, base_url="http://server")


def test_one_probe_answers_all_who_ask() -> None:
    async def run() -> None:
        client = Client()
        async with connected(client) as http:
            leaving = asyncio.create_task(http.get("/health_generate"))
            asking = [asyncio.create_task(http.get("/health_generate")) for _ in range(20)]
            await asyncio.sleep(0.05)
            leaving.cancel()  # the first one, which began the probe
            await asyncio.gather(leaving, return_exceptions=True)
            client.go_on.set()
            assert [answer.status_code for answer in await asyncio.gather(*asking)] == [200] * 20
            assert client.asked == 1
            client.error = EngineGoneError("No engine is ready.")
            answers = await asyncio.gather(*(http.get("/health_generate") for _ in range(3)))
            assert [answer.status_code for answer in answers] == [503] * 3
            assert client.asked == 2

    asyncio.run(asyncio.wait_for(run(), 60))


def test_the_uptime_follows_no_jump_of_the_system_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with connected(Client()) as http:
            monkeypatch.setattr(time, "time", lambda: 0.0)
            assert 0 <= (await http.get("/status")).json()["uptime_s"] < 60

    asyncio.run(asyncio.wait_for(run(), 60))
