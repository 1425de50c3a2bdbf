"""Requests wait in the HTTP process, and those of departed clients are withdrawn. Steps are counted, not seconds."""

import asyncio
import json
import socket
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from batching import DEMO, single_engine
from media_prompts import medium

from tilerank.runtime.lead.engine import Engine, Request
from tilerank.runtime.protocol.errors import RequestError
from tilerank.runtime.protocol.events import Event, TokenEvent
from tilerank.runtime.protocol.params import SamplingParams
from tilerank.runtime.protocol.prompt import Prompt
from tilerank.runtime.server.link import client as client_module
from tilerank.runtime.server.link import request_queue as queue_module
from tilerank.runtime.server.link.client import EngineClient, OverloadedError
from tilerank.runtime.server.link.connection import Progress, RefusedError
from tilerank.runtime.server.link.engine_loop import serve_connections
from tilerank.runtime.server.link.messages import Cancel, Submit, ToEngine
from tilerank.runtime.server.link.request_queue import CHOICE_TOKENS, MAX_BYTES, MAX_TOKENS, RequestQueue

TEXT = json.loads((DEMO / "eval_tokens.json").read_text())["sequences"][3]
LONG = TEXT[:200]


def submit(number: int, tokens: int, choices: int = 1, nbytes: int = 0) -> Submit:
    picture = medium(number, 1, 1)
    media = [type(picture)("image", bytes(nbytes), picture.size, picture.grid)] if nbytes else []
    return Submit(number, Prompt([1] * tokens, media), SamplingParams(), [0] * choices)


def request_queue() -> tuple[RequestQueue, list[ToEngine]]:
    sent: list[ToEngine] = []
    return RequestQueue(sent.append), sent


def test_prompts_are_sent_while_the_engine_has_room() -> None:
    """Two prompts fill it; the third is sent once the first has started, whatever follows it."""
    queue, sent = request_queue()
    half = MAX_TOKENS // 2 - CHOICE_TOKENS
    requests = [submit(i, half) for i in range(3)] + [submit(3, 1)]
    for request in requests:
        queue.add(request)
    assert sent == requests[:2] and len(queue) == 2
    queue.receive(0, last=False)
    assert sent == requests[:3] and len(queue) == 1
    queue.receive(0, last=False)  # its next token
    assert len(queue) == 1
    queue.receive(2, last=True)
    assert sent == requests and len(queue) == 0


def test_a_prompt_larger_than_all_room_is_sent_alone() -> None:
    queue, sent = request_queue()
    sizes = [(MAX_TOKENS * 3, 0), (1, 1), (1, MAX_BYTES), (1, 1)]
    requests = [submit(i, tokens, nbytes=nbytes) for i, (tokens, nbytes) in enumerate(sizes)]
    for request in requests:
        queue.add(request)
        assert sent == requests[:1]
    for i in range(3):
        queue.receive(i, last=False)
        assert sent == requests[: i + 2]


def test_media_that_the_engine_holds_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are held until the last choice of a request has ended; text passes."""
    monkeypatch.setattr(queue_module, "MAX_HELD", 10)
    queue, sent = request_queue()
    first, large, small, text = submit(0, 1, 2, nbytes=6), submit(2, 1, nbytes=5), submit(3, 1, nbytes=1), submit(4, 1)
    for request in (first, large, small, text):
        queue.add(request)
    for number, last in ((0, False), (1, False), (0, True), (4, True), (1, False)):
        queue.receive(number, last=last)
        assert sent == [first, text]
    queue.receive(1, last=True)
    assert sent == [first, text, large, small]


def test_a_request_that_is_cancelled_in_the_queue_is_never_sent() -> None:
    queue, sent = request_queue()
    requests = [submit(0, MAX_TOKENS), submit(1, 5), submit(2, 5, choices=3), submit(5, 5)]
    for request in requests:
        queue.add(request)
    queue.cancel(1)
    queue.cancel(3)  # one choice of three
    assert len(queue) == 4
    queue.cancel(0)  # the engine has it, and answers
    assert sent == [requests[0], Cancel(0)]
    queue.receive(0, last=True)
    assert sent == [requests[0], Cancel(0), requests[2], Cancel(3), requests[3]]


class Served:
    """An engine that serves the client over a socket, in a thread of its own. `gate`: steps wait while it is clear.

    submitted: what the engine got. ended: the number of steps at the end of each request, by its place in `submitted`.
    """

    def __init__(self, engine: Engine) -> None:
        self.client = EngineClient()
        self.submitted: list[Request] = []
        self.ended: dict[int, int] = {}
        self.steps = 0
        self.gate = threading.Event()
        self.gate.set()
        self.waits = threading.Event()  # a step waits at the gate
        self._engine = engine

    def run(self, work: Callable[["Served"], Awaitable[None]]) -> None:
        async def all_of_it() -> None:
            ours, theirs = socket.socketpair()
            talking = asyncio.create_task(self.client.attach(0, ours))
            thread = threading.Thread(target=serve_connections, args=(self._engine, [theirs], []))
            thread.start()
            await self.client.ready.wait()
            try:
                await work(self)
            finally:
                self.gate.set()
                ours.shutdown(socket.SHUT_RDWR)
                await talking
                thread.join(60)

        asyncio.run(asyncio.wait_for(all_of_it(), 100))

    async def at_the_gate(self) -> None:
        while not self.waits.is_set():
            await asyncio.sleep(0.001)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return single_engine(DEMO, dtype=torch.float32, context_length=256, max_total_tokens=8192)


@pytest.fixture
def served(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Served:
    served = Served(engine)
    step, take, numbers = engine.step, engine.submit, list[int]()

    def gated() -> list[Event]:
        if not served.gate.is_set():
            served.waits.set()
            assert served.gate.wait(60)
        served.steps += 1
        events = step()
        for event in events:
            if isinstance(event, TokenEvent) and event.finish_reason:
                served.ended[numbers.index(event.request)] = served.steps
        return events

    def counted(request: Request) -> int:
        served.submitted.append(request)
        numbers.append(take(request))
        return numbers[-1]

    monkeypatch.setattr(engine, "step", gated)
    monkeypatch.setattr(engine, "submit", counted)
    return served


async def collect(choice: AsyncGenerator[Progress]) -> list[int]:
    found = []
    async for token in choice:
        assert isinstance(token, TokenEvent)
        found.append(token.token_id)
    return found


def test_abandoned_requests_do_not_hold_the_engine(served: Served) -> None:
    """150 clients come while a step runs, and leave before it ends. The next request has its answer at once."""

    async def work(served: Served) -> None:
        params = SamplingParams(max_new_tokens=20, ignore_eos=True)
        served.gate.clear()
        with served.client.submit(Prompt(LONG[:5]), params, [0]) as (first,):
            await served.at_the_gate()
            with ExitStack() as leaving:
                for i in range(150):
                    leaving.enter_context(served.client.submit(Prompt([i, *LONG]), params, [1, 2, 3]))
                await asyncio.sleep(0.01)
                state = served.client.state
                assert state is not None and state.waiting > 300  # queued, where they cost nothing
            one = SamplingParams(max_new_tokens=1, ignore_eos=True)
            with served.client.submit(Prompt(LONG[:9]), one, [0]) as (last,):
                await asyncio.sleep(0.01)
                steps = served.steps
                served.gate.set()
                assert len(await collect(last)) == 1
                assert served.ended[1] - steps <= 3
            assert len(await collect(first)) == 20
        assert [len(request.prompt.token_ids) for request in served.submitted] == [5, 9]

    served.run(work)


def test_as_many_wait_as_may(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Choices and tokens of prompts are counted until they are sent or withdrawn."""
    served.client = EngineClient(max_queued=3)
    monkeypatch.setattr(queue_module, "MAX_TOKENS", 0)  # one request at a time

    async def work(served: Served) -> None:
        client, params = served.client, SamplingParams(max_new_tokens=3, ignore_eos=True)
        served.gate.clear()
        with client.submit(Prompt(LONG[:5]), params, [0]) as (first,):
            await served.at_the_gate()
            with client.submit(Prompt(LONG[:6]), params, [1, 2]):
                client.check_room()
                monkeypatch.setattr(client_module, "MAX_QUEUED_TOKENS", 6)
                with pytest.raises(OverloadedError, match="6 tokens"):
                    client.check_room()
                monkeypatch.setattr(client_module, "MAX_QUEUED_TOKENS", 1000)
                with (
                    client.submit(Prompt(LONG[:7]), params, [3]),
                    pytest.raises(OverloadedError, match="3 requests wait already"),
                ):
                    client.check_room()
                client.check_room()
            served.gate.set()
            assert len(await collect(first)) == 3
        client.check_room()

    served.run(work)


def test_choices_share_a_prompt_and_differ_in_their_seeds(served: Served, engine: Engine) -> None:
    params = SamplingParams(max_new_tokens=6, ignore_eos=True, temperature=1.0)
    seeds = [3, 4, 5]

    async def work(served: Served) -> None:
        with served.client.submit(Prompt(LONG), params, seeds) as streams:
            found = await asyncio.gather(*(collect(stream) for stream in streams))
        assert len({id(request.prompt) for request in served.submitted}) == 1
        assert [request.params.seed for request in served.submitted] == seeds
        for answer, seed in zip(found, seeds, strict=True):
            alone: Any = SamplingParams(max_new_tokens=6, ignore_eos=True, temperature=1.0, seed=seed)
            assert answer == await collect(served.client.generate(Prompt(LONG), alone))
        assert len(set(map(tuple, found))) == 3

    served.run(work)


def test_a_closed_choice_ends_alone(served: Served, engine: Engine) -> None:
    async def work(served: Served) -> None:
        params = SamplingParams(max_new_tokens=30, ignore_eos=True)
        with served.client.submit(Prompt(LONG), params, [0, 1]) as (one, other):
            assert await anext(one)
            await one.aclose()
            assert len(await collect(other)) == 30
        assert engine.state().cache_used == 0

    served.run(work)


def test_a_refused_request_leaves_the_queue(served: Served) -> None:
    async def work(served: Served) -> None:
        for _ in range(50):
            with served.client.submit(Prompt(LONG * 2), SamplingParams(), [0, 1]) as streams:
                for stream in streams:
                    with pytest.raises(RefusedError, match="400 tokens"):
                        await anext(stream)
        assert served.client.state is not None and served.client.state.waiting == 0

    served.run(work)


def test_media_of_many_socket_buffers_arrive_whole(
    served: Served, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    picture = medium(1, 40, 40)  # 4.9 MB
    found: list[Prompt] = []

    def refuse(request: Request) -> int:
        found.append(request.prompt)
        raise RequestError("not today")

    monkeypatch.setattr(engine, "submit", refuse)

    async def work(served: Served) -> None:
        with pytest.raises(RefusedError, match="not today"):
            await anext(served.client.generate(Prompt([1], [picture]), SamplingParams()))

    served.run(work)
    assert found[0].media == [picture]
    assert found[0].__dict__["digests"] == [picture.digest()]  # as it was sent, not computed again
