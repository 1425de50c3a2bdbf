"""`tilerank serve` under load: many streams at once, and a short soak test in which a rank is killed."""

import asyncio
import signal

import httpx
import pytest
from known import LONGEST, known
from serving import serving

from tests.soak import Fault, ask, soak

STREAMS = 256


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
