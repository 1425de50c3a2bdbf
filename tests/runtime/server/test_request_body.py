"""The memory that requests take before they run is bounded."""

import asyncio
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import Response

from tests.runtime.server.scripted import Server, make_model, run
from tilerank.runtime.server.http import memory
from tilerank.runtime.server.http.body import read_pieces
from tilerank.runtime.server.http.errors import ApiError
from tilerank.runtime.server.http.memory import MemoryBudget, MemoryMiddleware, ServerMemory, request_memory

FULL = "The server holds too many large requests or answers."


def test_bodies_are_bounded_together_until_they_are_released(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request has 4 bytes, and those that do not run yet may have 10 together."""
    monkeypatch.setattr(memory, "MAX_READ", 10)

    async def test() -> None:
        released, go_on = asyncio.Event(), asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            request = Request(scope, receive)
            try:
                body = b"".join([piece async for piece in read_pieces(request, 100)])
            except ApiError as e:
                assert not await request.is_disconnected()  # the body has been read to its end
                body = str(e).encode()
            else:
                if scope["path"] == "/released":
                    request_memory(request).release()
                    released.set()
                await go_on.wait()
            await Response(body)(scope, receive, send)

        transport = httpx.ASGITransport(MemoryMiddleware(app, ServerMemory(media=False)))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            asking = [asyncio.create_task(client.post("/released", content=b"1234"))]
            await released.wait()
            asking += [asyncio.create_task(client.post("/", content=b"1234")) for _ in range(2)]
            await asyncio.sleep(0.05)
            assert (await client.post("/", content=b"1234")).text == FULL
            go_on.set()
            assert [answer.text for answer in await asyncio.gather(*asking)] == ["1234"] * 3
            assert (await client.post("/", content=b"1234")).text == "1234"

    asyncio.run(asyncio.wait_for(test(), 60))


def test_memory_is_given_in_order_of_arrival(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        budget, order = MemoryBudget(10), list[int]()

        async def take(nbytes: int) -> None:
            await budget.wait(nbytes)
            order.append(nbytes)

        await take(8)
        waiting = [asyncio.create_task(take(nbytes)) for nbytes in (5, 1, 4)]
        await asyncio.sleep(0)
        assert order == [8]  # 1 would fit, but 5 came before
        waiting[0].cancel()
        await asyncio.sleep(0.01)
        assert order == [8, 1]
        budget.give(8)
        await asyncio.sleep(0.01)
        assert order == [8, 1, 4]
        with pytest.raises(ApiError, match=FULL):
            budget.take(6)
        monkeypatch.setattr(memory, "WAIT_S", 0.01)
        with pytest.raises(ApiError, match=FULL):
            await budget.wait(6)
        budget.take(5)
        budget.give(10)
        await take(11)  # more than all, and no other holds any

    asyncio.run(test())


def test_memory_is_given_back_if_the_request_is_cancelled_at_its_turn() -> None:
    async def test() -> None:
        budget = MemoryBudget(10)
        await budget.wait(10)
        waiting = asyncio.create_task(budget.wait(10))
        await asyncio.sleep(0)
        budget.give(10)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        budget.take(10)

    asyncio.run(test())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("bodies") / "model")


def test_a_full_server_refuses_and_forgets_nothing(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large and small requests, on every API, answered or refused: nothing stays counted. A large one that finds no
    memory is refused with 503 after a while, and small ones pass it."""
    monkeypatch.setattr(memory, "WAIT_S", 0.1)
    large: Any = {"messages": [{"role": "user", "content": "a", "extra": "b" * 300_000}]}
    message: Any = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}

    async def ask(server: Server) -> None:
        server.answer = "a"
        service = server.app.state.memory  # type: ignore[attr-defined]
        budgets = (service.read, service.small, service.large)
        for path, body, status in (
            ("/v1/chat/completions", large, 200),
            ("/v1/chat/completions", message | {"stream": True}, 200),
            ("/v1/chat/completions", {"messages": []}, 400),
            ("/v1/chat/completions/render", message, 200),
            ("/v1/completions", {"prompt": [1] * 3000}, 200),
            ("/v1/responses", {"input": "a"}, 200),
            ("/v1/messages", message, 200),
            ("/v1/messages/count_tokens", {"messages": message["messages"]}, 200),
            ("/tokenize", {"messages": message["messages"]}, 200),
            ("/tokenize", {"prompt": "a" * 200_000}, 400),
            ("/detokenize", {"tokens": [1]}, 200),
        ):
            answer = await server.http.post(path, json=body)
            assert answer.status_code == status, answer.text
            assert [budget._held for budget in budgets] == [0, 0, 0], path
        service.large.take(memory.MAX_LARGE)
        refused, small = await asyncio.gather(*(server.chat(*one["messages"]) for one in (large, message)))
        assert (refused.status_code, refused.headers["Retry-After"], refused.json()["error"]["message"]) == (
            503,
            "5",
            FULL,
        )
        assert small.status_code == 200

    run(model, "{{ messages | length }}", ask)


def test_the_event_loop_runs_between_the_parts_of_large_bodies(model: Path) -> None:
    """Each of them is parsed and checked in turns of its own, and no other is in between."""
    text = {"type": "text", "text": ""}
    body = json.dumps({"messages": [{"role": "user", "content": [text] * 1000}]}).encode()
    requests = 8

    async def ask(server: Server) -> None:
        server.answer = "a"
        turns = 0

        async def beat() -> None:
            nonlocal turns
            while True:
                await asyncio.sleep(0)
                turns += 1

        beating = asyncio.create_task(beat())
        lock = server.app.state.memory.turn  # type: ignore[attr-defined]
        seen: list[int] = []
        acquire, release = lock.acquire, lock.release

        async def acquired() -> bool:
            await acquire()
            seen.append(turns)
            return True

        def released() -> None:
            seen.append(turns)
            release()

        lock.acquire, lock.release = acquired, released
        answers = await asyncio.gather(
            *(server.http.post("/v1/chat/completions", content=body) for _ in range(requests))
        )
        assert {answer.status_code for answer in answers} == {200}
        beating.cancel()
        assert len(seen) == 2 * 2 * requests and all(after > before for before, after in pairwise(seen))

    run(model, "{{ messages | length }}", ask)
