"""The way of a request from the HTTP process to prefill ranks and on to decode ranks, with scripted engines."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest

from tilerank.runtime.protocol.engine_state import EngineState
from tilerank.runtime.protocol.events import EndedEvent, Event, FailedEvent, PrefilledEvent, TokenEvent
from tilerank.runtime.protocol.framing import encode
from tilerank.runtime.protocol.params import SamplingParams, Start
from tilerank.runtime.protocol.prompt import Prompt
from tilerank.runtime.server.link.client import EngineClient
from tilerank.runtime.server.link.connection import EngineGoneError, RefusedError
from tilerank.runtime.server.link.messages import Cancel, Events, Submit, engine_inbox

LONG, PARAMS = Prompt(list(range(100))), SamplingParams(max_new_tokens=1)


class ScriptedEngine:
    """An engine whose messages the test reads and writes."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._inbox = engine_inbox()
        self._received: list[Any] = []
        self.send(EngineState(256, 256, least_given=33))

    def send(self, message: EngineState | Events) -> None:
        self._socket.sendall(encode(message))

    def tell(self, *events: Event) -> None:
        self.send(Events(list(events)))

    async def receive(self) -> Any:
        """Return the next message of the HTTP process."""
        while not self._received:
            self._received += self._inbox.feed(await asyncio.get_running_loop().sock_recv(self._socket, 1 << 16))
        return self._received.pop(0)

    def close(self) -> None:
        self._socket.close()


Talk = Callable[[EngineClient, ScriptedEngine, ScriptedEngine], Awaitable[None]]


def run(talk: Talk) -> None:
    """Let a test talk as the prefill ranks and as the decode ranks of a client."""

    async def all_of_it() -> None:
        async with connected(2) as (client, [prefill, decode], _):
            await talk(client, prefill, decode)

    asyncio.run(asyncio.wait_for(all_of_it(), 60))


@asynccontextmanager
async def connected(count: int) -> AsyncIterator[tuple[EngineClient, list[ScriptedEngine], list[asyncio.Task[None]]]]:
    """Yield a client, its engines, and a task for each engine that ends when the client has noticed its end."""
    client, pairs = EngineClient(in_pairs=True), [socket.socketpair() for _ in range(count)]
    attached = [asyncio.create_task(client.attach(i, pair[0])) for i, pair in enumerate(pairs)]
    for pair in pairs:
        pair[1].setblocking(False)
    engines = [ScriptedEngine(pair[1]) for pair in pairs]
    await client.all_ready.wait()
    yield client, engines, attached
    for engine in engines:
        engine.close()
    await asyncio.gather(*attached)


async def tokens_of(client: EngineClient, prompt: Prompt = LONG, params: SamplingParams = PARAMS) -> list[Any]:
    async with aclosing(client.generate(prompt, params)) as events:
        return [event async for event in events]


def test_the_prompt_is_computed_before_the_answer() -> None:
    """The slots are released with the first token, and the start is that of both groups together."""

    async def talk(client: EngineClient, prefill: ScriptedEngine, decode: ScriptedEngine) -> None:
        answer = asyncio.create_task(tokens_of(client))
        submit = await prefill.receive()
        assert isinstance(submit, Submit) and submit.prompt.token_ids == LONG.token_ids
        assert (submit.params, submit.seeds, submit.slots) == (SamplingParams(max_new_tokens=0), [0], [])
        prefill.tell(PrefilledEvent(submit.number, [[4, 7, 5], [2]], Start(64, 2.0)))
        request = await decode.receive()
        assert isinstance(request, Submit) and (request.params, request.slots) == (PARAMS, [[4, 7, 5], [2]])
        decode.tell(TokenEvent(request.number, 9, 0.0, "length", start=Start(32, 0.5)))
        assert await prefill.receive() == Cancel(submit.number)
        (token,) = await answer
        assert token == TokenEvent(request.number, 9, 0.0, "length", start=Start(64, 2.5))
        assert client.totals.transferred_prompts == 1 and 0 < client.totals.transfer_s < 60

    run(talk)


@pytest.mark.parametrize(
    ("prompt", "params"),
    [
        (Prompt(list(range(32))), PARAMS),
        (LONG, SamplingParams(max_new_tokens=1, prompt_logprobs=0)),
        (LONG, SamplingParams(max_new_tokens=1, hidden_layers=(0,))),
        (LONG, SamplingParams(max_new_tokens=0)),
    ],
    ids=["short", "scored", "hidden states", "without an answer"],
)
def test_what_prefill_ranks_cannot_do_is_left_to_decode_ranks(prompt: Prompt, params: SamplingParams) -> None:
    async def talk(client: EngineClient, prefill: ScriptedEngine, decode: ScriptedEngine) -> None:
        answer = asyncio.create_task(tokens_of(client, prompt, params))
        request = await decode.receive()
        assert request.slots == []
        decode.tell(TokenEvent(request.number, 9, 0.0, "length"))
        assert len(await answer) == 1

    run(talk)


def test_decode_ranks_compute_the_prompt_if_prefill_ranks_are_lost() -> None:
    async def talk(client: EngineClient, prefill: ScriptedEngine, decode: ScriptedEngine) -> None:
        answers = [asyncio.create_task(tokens_of(client))]
        await prefill.receive()
        prefill.close()
        for _ in range(2):  # one request that waited for them, and one that comes later
            request = await decode.receive()
            assert request.slots == []
            decode.tell(TokenEvent(request.number, 9, 0.0, "length"))
            assert len(await answers[-1]) == 1
            answers.append(asyncio.create_task(tokens_of(client)))
        await decode.receive()
        answers[-1].cancel()

    run(talk)


def test_requests_fail_if_decode_ranks_are_lost() -> None:
    async def talk(client: EngineClient, prefill: ScriptedEngine, decode: ScriptedEngine) -> None:
        answer = asyncio.create_task(tokens_of(client))
        submit = await prefill.receive()
        decode.close()
        with pytest.raises(EngineGoneError, match="stopped before"):
            await answer
        assert await prefill.receive() == Cancel(submit.number)
        assert client.state is None
        with pytest.raises(EngineGoneError, match="No engine is ready"):
            await tokens_of(client)

    run(talk)


def test_a_prompt_that_prefill_ranks_refuse_is_refused() -> None:
    async def talk(client: EngineClient, prefill: ScriptedEngine, decode: ScriptedEngine) -> None:
        answer = asyncio.create_task(tokens_of(client))
        submit = await prefill.receive()
        prefill.tell(FailedEvent(submit.number, "it does not fit"))
        with pytest.raises(RefusedError, match="it does not fit"):
            await answer

    run(talk)


def test_a_request_that_ends_early_is_cancelled_where_it_is() -> None:
    """While its prompt is computed, and once decode ranks have it: these answer a Cancel, prefill ranks as well."""

    async def talk(client: EngineClient, prefill: ScriptedEngine, decode: ScriptedEngine) -> None:
        answer = asyncio.create_task(tokens_of(client))
        submit = await prefill.receive()
        answer.cancel()
        assert await prefill.receive() == Cancel(submit.number)
        prefill.tell(
            PrefilledEvent(submit.number, [[1]]), EndedEvent(submit.number)
        )  # computed before it was cancelled
        answer = asyncio.create_task(tokens_of(client))
        submit = await prefill.receive()
        prefill.tell(PrefilledEvent(submit.number, [[0]]))
        request = await decode.receive()
        assert request.number == 1
        answer.cancel()
        assert await decode.receive() == Cancel(request.number)
        assert await prefill.receive() == Cancel(submit.number)

    run(talk)


def test_choices_share_a_prompt_and_may_end_alone() -> None:
    """One of three choices is closed while the prompt is computed."""

    async def talk(client: EngineClient, prefill: ScriptedEngine, decode: ScriptedEngine) -> None:
        with client.submit(LONG, PARAMS, [5, 6, 7]) as choices:
            submit = await prefill.receive()
            closing = asyncio.create_task(anext(choices[1]))
            await asyncio.sleep(0)
            closing.cancel()
            await asyncio.gather(closing, return_exceptions=True)
            prefill.tell(PrefilledEvent(submit.number, [[0, 1, 2]]))
            request = await decode.receive()
            assert (request.seeds, request.slots) == ([5, 6, 7], [[0, 1, 2]])
            assert await decode.receive() == Cancel(request.number + 1)
            for number in (0, 2):
                decode.tell(TokenEvent(request.number + number, number, 0.0, "length"))
            tokens = [await anext(choices[number]) for number in (0, 2)]
            assert [token.token_id for token in tokens if isinstance(token, TokenEvent)] == [0, 2]
            assert await prefill.receive() == Cancel(submit.number)

    run(talk)


def test_the_prompt_is_computed_in_the_replica_of_its_answer() -> None:
    """Of two replicas, each with prefill ranks. One that has lost these computes prompts itself, and does not use those
    of the other."""

    async def talk(client: EngineClient, engines: list[ScriptedEngine], attached: list[asyncio.Task[None]]) -> None:
        answers = [asyncio.create_task(tokens_of(client, Prompt([number] * 100))) for number in range(2)]
        for number, (prefill, decode) in enumerate([engines[:2], engines[2:]]):
            submit = await prefill.receive()
            assert submit.prompt.token_ids == [number] * 100
            prefill.tell(PrefilledEvent(submit.number, [[number]]))
            request = await decode.receive()
            assert (request.prompt.token_ids, request.slots) == ([number] * 100, [[number]])
            decode.tell(TokenEvent(request.number, 9, 0.0, "length"))
            assert await prefill.receive() == Cancel(submit.number)
        await asyncio.gather(*answers)
        engines[0].close()
        await attached[0]
        # Both begin like what a replica has seen.
        answers = [asyncio.create_task(tokens_of(client, Prompt([number] * 99))) for number in range(2)]
        assert (await engines[1].receive()).slots == []
        assert (await engines[2].receive()).prompt.token_ids == [1] * 99
        for answer in answers:
            answer.cancel()

    async def all_of_it() -> None:
        async with connected(4) as replicas:
            await talk(*replicas)

    asyncio.run(asyncio.wait_for(all_of_it(), 60))
