"""The HTTP process: a loop of its own, outside of the ranks. Engines come and go over a control socket."""

import asyncio
import logging
import signal
import socket
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from tilerank.loader.tokenizer import Tokenizer
from tilerank.runtime.server.app import About, make_app
from tilerank.runtime.server.client import EngineClient

log = logging.getLogger(__name__)

MAX_HEADER = 64 << 10
"""Bytes of a request's line and headers."""
MAX_CONNECTIONS = 4096


@dataclass(frozen=True)
class Http:
    """Where to listen, and what is served."""

    listener: socket.socket
    model_dir: Path
    about: About


def run(http: Http, control: socket.socket, drain_s: float) -> None:
    """Serves until SIGTERM or SIGINT, or until the other end of `control` is closed: whoever starts engines sends a
    socket to each over it. What runs is answered before, if that takes at most `drain_s` seconds and no second signal
    comes."""
    client = EngineClient()
    config = uvicorn.Config(
        make_app(client, Tokenizer(http.model_dir), http.about),
        log_config=None,
        access_log=False,
        lifespan="off",
        h11_max_incomplete_event_size=MAX_HEADER,
        limit_concurrency=MAX_CONNECTIONS,
        timeout_graceful_shutdown=round(drain_s),
        server_header=False,
        http="h11",
        ws="none",
    )
    asyncio.run(_serve(uvicorn.Server(config), http.listener, client, control))


async def _serve(server: uvicorn.Server, listener: socket.socket, client: EngineClient, control: socket.socket) -> None:
    control.setblocking(False)
    loop = asyncio.get_running_loop()
    engines: set[asyncio.Task[None]] = set()

    def on_control() -> None:
        data, fds, _, _ = socket.recv_fds(control, 16, 1)
        if not data:
            loop.remove_reader(control)
            server.should_exit = True
            return
        for fd in fds:
            engines.add(asyncio.create_task(client.attach(socket.socket(fileno=fd))))

    for number in (signal.SIGTERM, signal.SIGINT):
        # uvicorn raises what ended it once more at its end, for a shell to see; to be told to stop is no failure.
        signal.signal(number, lambda *_: None)
    loop.add_reader(control, on_control)
    await server.serve(sockets=[listener])
    for task in engines:
        task.cancel()
    await asyncio.gather(*engines, return_exceptions=True)
