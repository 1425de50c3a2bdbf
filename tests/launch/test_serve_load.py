"""`tilerank serve` under load: many streams or pictures at once, and a short soak test in which a rank is killed."""

import asyncio
import base64
import signal
from typing import Any

import httpx
import pytest
from command import await_true
from known import LONGEST, known
from media_files import DEMO_VL, encoded
from PIL import Image
from serving import serving

from tests.soak import Fault, ask, soak

STREAMS = 256
PICTURES = 128
CHAT = "/v1/chat/completions"


@pytest.mark.long
def test_256_streams_get_the_same_text_as_alone() -> None:
    requests = known(24)

    async def run_all(url: str) -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits) as client:

            async def one(i: int) -> None:
                asked, count = requests[i % len(requests)], 1 + 5 * i % LONGEST
                found = await ask(client, asked.path, asked.body | {"max_tokens": count, "temperature": 0}, True)
                assert found == {0: asked.text(count)}

            async with asyncio.timeout(1200), asyncio.TaskGroup() as group:
                for i in range(STREAMS):
                    group.create_task(one(i))

    with serving("--tp", 2) as server:
        asyncio.run(run_all(server.url))
        assert server.gauge("kv_cache_usage_perc") == 0


def test_a_short_soak() -> None:
    seen = soak(12, [Fault("TILERANK_RANK=1", signal.SIGKILL)], requests=12, judge_memory=False)
    assert seen.outcomes["greedy", "done"] and seen.outcomes["nonsense", "done"], seen


def test_128_pictures_get_the_same_answers_as_alone() -> None:
    """Of different sizes, with a cache for few of them, while clients of others hang up."""
    requests = [about_pictures(i, 1 + (i % 16 == 0)) for i in range(PICTURES)]
    left = [about_pictures(i, 1) | {"max_tokens": 2000, "ignore_eos": True} for i in range(PICTURES, PICTURES + 8)]

    async def run_all(url: str) -> list[Any]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits) as client:

            async def one(i: int) -> Any:
                answer = await ask(client, CHAT, requests[i], stream=i % 2 == 0)
                if i % 16 == 0:
                    endless.pop().cancel()
                return answer

            endless = [asyncio.create_task(client.post(CHAT, json=body)) for body in left]
            return await asyncio.gather(*map(one, range(PICTURES)))

    async def run_alone(url: str) -> list[Any]:
        async with httpx.AsyncClient(base_url=url, timeout=None) as client:
            return [await ask(client, CHAT, body, stream=False) for body in requests]

    options = ("--tp", 2, "--model-path", DEMO_VL)
    with serving(*options) as server:
        alone = asyncio.run(run_alone(server.url))
    with serving(*options, "--max-total-tokens", 8192, "--mm-cache-gib", 0.002) as server:
        assert asyncio.run(run_all(server.url)) == alone
        await_true(lambda: server.gauge("kv_cache_usage_perc") == 0, 110, "pages are in use without requests")
    assert len({answer[0] for answer in alone}) > PICTURES // 8, "they are too much alike to show a mistake"


def about_pictures(i: int, count: int) -> dict[str, Any]:
    """Return a request with `count` of the demo model's test pictures in sizes of their own."""
    paths = sorted((DEMO_VL / "testset").glob("*.png"))
    parts: list[dict[str, Any]] = []
    for number in range(i, i + count):
        with Image.open(paths[number % len(paths)]) as image:
            png = encoded(image.resize((image.width + number * 7 % 60 - 20, image.height + number * 11 % 60 - 20)))
        url = f"data:image/png;base64,{base64.b64encode(png).decode()}"
        parts.append({"type": "image_url", "image_url": {"url": url}})
    content = [*parts, {"type": "text", "text": "What is in the picture?"}]
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 40, "temperature": 0}
