"""Runs many requests, a bounded number at a time, so that their prompts need not all be in memory."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

from tilerank.runtime.protocol.sizes import MAX_RUNNING
from tilerank.runtime.server.link.client import EngineClient, OverloadedError

REQUESTS = MAX_RUNNING + 64
"""Requests under way for each engine: those that it runs, and some that wait for its next step."""
FULL_S = 0.05
"""Between two looks at a queue that is full."""
T = TypeVar("T")


async def run_all(client: EngineClient, items: Iterable[T], run: Callable[[T], Awaitable[None]], engines: int) -> None:
    """Run a request to `client` for each item. The first one that fails cancels the others, and its exception is
    raised. Raises EngineGoneError if an engine has ended. engines: of the client."""
    room = asyncio.Semaphore(REQUESTS * engines)

    async def run_one(item: T) -> None:
        try:
            await run(item)
        finally:
            room.release()

    try:
        async with asyncio.TaskGroup() as tasks:
            for item in items:
                await room.acquire()
                tasks.create_task(run_one(item))
                await _queue_room(client)
    except ExceptionGroup as e:
        raise e.exceptions[0] from None


async def _queue_room(client: EngineClient) -> None:
    """Wait until another request may be queued. The task that was created last runs first."""
    await asyncio.sleep(0)
    while True:
        try:
            return client.check_room()
        except OverloadedError:
            await asyncio.sleep(FULL_S)
