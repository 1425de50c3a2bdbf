"""Other requests run while the server refuses or answers bodies that are as costly as they may be."""

import asyncio
import time
from pathlib import Path

import pytest

from tests.runtime.server.scripted import Server, make_model, run
from tilerank.runtime.server.http.json_values import MAX_STRUCTURES, MAX_TOKEN_IDS

MOST_S = 2.0
"""CPU time between two beats, which a busy machine does not stretch. Without bounds, the first took 10 to 60 s."""
PARTS = b",".join([b"{}"] * 600)
MESSAGE = b'{"role":"user","content":[%b]}' % b",".join([b'{"type":"text","text":""}'] * (MAX_STRUCTURES // 5 - 9))
ITEM = b'{"role":"user","content":[%b]}' % b",".join([b'{"type":"input_text","text":""}'] * (MAX_STRUCTURES // 5 - 9))
BODIES = {
    "strings for numbers": ("/v1/completions", b'{"prompt":[%b]}' % b",".join([b'"a"'] * MAX_TOKEN_IDS), 413),
    "wrong parts": ("/v1/responses", b'{"input":[%b]}' % b",".join([b'{"content":[%b]}' % PARTS] * 4000), 413),
    "empty lists": (
        "/v1/chat/completions",
        b'{"messages":[{"role":"user","extra":[%b]}]}' % b",".join([b"[]"] * 2**21),
        413,
    ),
    "text parts": ("/v1/chat/completions", b'{"messages":[%b]}' % MESSAGE, 200),
    "items": ("/v1/responses", b'{"input":[%b]}' % ITEM, 200),
    "token ids": ("/v1/completions", b'{"prompt":[%b]}' % b",".join([b"7"] * 64 * 4096), 400),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("heartbeat") / "model")


@pytest.mark.parametrize("name", BODIES)
def test_the_event_loop_goes_on(model: Path, name: str) -> None:
    path, body, status = BODIES[name]

    async def ask(server: Server) -> None:
        server.answer = "a"
        longest = 0.0

        async def beat() -> None:
            nonlocal longest
            before = time.process_time()
            while True:
                await asyncio.sleep(0)
                longest, before = max(longest, time.process_time() - before), time.process_time()

        beating = asyncio.create_task(beat())
        answers = await asyncio.gather(*(server.http.post(path, content=body) for _ in range(3)))
        beating.cancel()
        assert [answer.status_code for answer in answers] == [status] * 3, answers[0].text
        assert longest < MOST_S

    run(model, "{{ messages | length }}", ask)
