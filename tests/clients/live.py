"""A server on a port of loopback, whose engine gives scripted answers, for clients that make their own connections."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn

from tests.runtime.server.scripted import QWEN_3, Server, serving

CALL = '<tool_call>\n{"name": "now", "arguments": {"zone": "Köln"}}\n</tool_call>'
REASONING = "<think>\nThe clock says it.\n</think>\n\n"


def scripted_answer(prompt: str) -> str:
    """Return JSON if the prompt asks for it, a call if there are tools and no result yet, and else a sentence."""
    if "JSON" in prompt:
        return '{"name": "Moses"}'
    if "<tool_call>" in prompt and "noon" not in prompt:
        return REASONING + CALL
    return "It is noon." if "noon" in prompt else REASONING + "Moses came."


@contextmanager
def live_server(model: Path, **options: Any) -> Iterator[tuple[str, Server]]:
    """Serve with the options of `serving`, and yield the URL and the server."""
    listener = socket.create_server(("127.0.0.1", 0))
    loop = asyncio.new_event_loop()
    ready, end = threading.Event(), asyncio.Event()
    servers: list[Server] = []

    async def run() -> None:
        async with serving(model, QWEN_3, **options) as server:
            server.answer = scripted_answer
            config = uvicorn.Config(server.app, log_config=None, lifespan="off")
            http = uvicorn.Server(config)
            served = asyncio.create_task(http.serve(sockets=[listener]))
            servers.append(server)
            ready.set()
            await end.wait()
            http.should_exit = True
            await served

    thread = threading.Thread(target=loop.run_until_complete, args=(run(),))
    thread.start()
    try:
        assert ready.wait(60)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", servers[0]
    finally:
        loop.call_soon_threadsafe(end.set)
        thread.join()
        loop.close()
        listener.close()
