"""The HTTP process: a loop of its own, outside of the ranks. Engines come and go over a control socket."""

import asyncio
import gc
import math
import resource
import signal
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType

import uvicorn
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from tilerank.loader.tokenizer import Tokenizer
from tilerank.runtime.server.apis.service import ServerSettings
from tilerank.runtime.server.app import make_app
from tilerank.runtime.server.http.access import ANY, Access, AccessMiddleware
from tilerank.runtime.server.http.drain import DrainMiddleware
from tilerank.runtime.server.http.root_path import RootPathMiddleware
from tilerank.runtime.server.link.client import MAX_QUEUED, EngineClient
from tilerank.runtime.server.link.handover import receive_connection
from tilerank.runtime.server.monitoring.request_log import LoggedRequest, RequestLogMiddleware

from ..logs import say
from .acceptor import Acceptor
from .host_links import DECODE_ENGINE, Front
from .http_timeouts import DeadlineProtocol

MAX_HEADER = 64 << 10
"""Bytes of a request's line and headers."""
MAX_CONNECTIONS = 4096
"""Open at a time, if the limit of open files allows as many."""
OTHER_FILES = 256
"""Open ones beside the connections, and those of connections that are being closed for a batch of new ones."""
CLOSE_S = 5
"""For clients that are slow to read the end of their answers."""
COUNT_S = 1.0
"""Between two counts of the requests that a stopping server still answers."""


@dataclass(frozen=True)
class Http:
    """The listening socket, the model that is served, and the web pages that may use it. tls: None for HTTP. root_path:
    below which requests are answered as well. on_end: is called with each request that has ended. in_pairs: as in
    EngineClient. front: where the decode ranks of another host connect."""

    listener: socket.socket
    tokenizer: Tokenizer
    about: ServerSettings
    access: Access
    max_queued: int = MAX_QUEUED
    tls: ssl.SSLContext | None = None
    root_path: str = ""
    on_end: Callable[[LoggedRequest], None] | None = None
    in_pairs: bool = False
    front: Front | None = None


def run(http: Http, control: socket.socket, drain_s: float, on_ready: Callable[[], None]) -> None:
    """Serve the engines whose connections arrive over `control`, until SIGTERM, SIGINT or SIGHUP, or until its other
    end is closed. New requests are then refused; those under way are answered if that takes at most `drain_s`
    seconds, and fail after that. `on_ready` is called when the first engine can take requests."""
    gc.collect()
    gc.freeze()  # what is there now stays, and the garbage collector need not visit it while requests wait
    asyncio.run(_serve(http, control, drain_s, on_ready))


async def _serve(http: Http, control: socket.socket, drain_s: float, on_ready: Callable[[], None]) -> None:
    connections = _allow_connections()
    loop = asyncio.get_running_loop()
    client = EngineClient(http.max_queued, in_pairs=http.in_pairs)
    api = make_app(client, http.tokenizer, http.about)
    api.router.redirect_slashes = False  # a redirect would send the client to what Host says
    gate = DrainMiddleware(api)
    app: ASGIApp = gate
    if http.access.origins:
        app = CORSMiddleware(app, allow_origins=http.access.origins, allow_methods=[ANY], allow_headers=[ANY])
    stop_requested = asyncio.Event()
    server = _HttpServer(
        uvicorn.Config(
            RequestLogMiddleware(RootPathMiddleware(AccessMiddleware(app, http.access), http.root_path), http.on_end),
            log_config=None,
            access_log=False,
            lifespan="off",
            h11_max_incomplete_event_size=MAX_HEADER,
            timeout_graceful_shutdown=CLOSE_S,
            server_header=False,
            http=DeadlineProtocol,
            ws="none",
        ),
        lambda: loop.call_soon_threadsafe(stop_requested.set),
        connections,
        http.tls,
    )
    engines: set[asyncio.Task[None]] = set()

    def on_control() -> None:
        taken = receive_connection(control)
        if taken is None:
            loop.remove_reader(control)
            stop_requested.set()
        else:
            attach(*taken)

    def attach(number: int, connection: socket.socket) -> None:
        engines.add(asyncio.create_task(client.attach(number, connection)))

    async def stop_when_requested() -> None:
        await stop_requested.wait()
        if not await _drained(gate, drain_s):
            client.fail_requests("The server stopped before the answer was complete.")
        server.should_exit = True

    async def announce_when_ready() -> None:
        await client.ready.wait()
        on_ready()

    loop.add_reader(control, on_control)
    if http.front is not None:
        http.front.open(lambda connection: loop.call_soon_threadsafe(attach, DECODE_ENGINE, connection))
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # uvicorn handles the other two
        loop.add_signal_handler(signal.SIGHUP, stop_requested.set)
    others = [asyncio.create_task(task()) for task in (stop_when_requested, announce_when_ready)]
    await server.serve(sockets=[http.listener])
    for task in (*others, *engines):
        task.cancel()
    await asyncio.gather(*others, *engines, return_exceptions=True)


def _allow_connections() -> int:
    """Return how many connections may be open, and raise the soft limit of open files for them.

    The usual 1024 protects programs that use select, and this one does not.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = max(soft, min(MAX_CONNECTIONS + OTHER_FILES, hard))
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    connections = min(MAX_CONNECTIONS, files - OTHER_FILES)
    why = "" if connections == MAX_CONNECTIONS else f", because this user may open {hard} files (ulimit -Hn)"
    say(f"tilerank: at most {connections} connections at a time{why}")
    return connections


async def _drained(gate: DrainMiddleware, within_s: float) -> bool:
    """Return whether all requests are answered in time. Says how many are not, whenever that changes."""
    deadline = time.monotonic() + within_s
    drained = asyncio.create_task(gate.drain())
    said = 0
    while not drained.done() and (left := deadline - time.monotonic()) > 0:
        if gate.running not in (0, said):
            said = gate.running
            requests = f"{said} request{'s' * (said != 1)}"
            say(f"tilerank: draining: {requests}, at most {math.ceil(left)} s; press Ctrl-C again to stop now")
        await asyncio.wait([drained], timeout=min(left, COUNT_S))
    return drained.done()


class _HttpServer(uvicorn.Server):
    """A server that accepts connections after a signal, too, and answers them with an error while it drains."""

    def __init__(
        self,
        config: uvicorn.Config,
        on_signal: Callable[[], object],
        connections: int,
        tls: ssl.SSLContext | None,
    ) -> None:
        super().__init__(config)
        self._tls = tls
        self._on_signal = on_signal
        self._connections = connections

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept the connections of the listening socket with an Acceptor in place of asyncio's server."""
        assert sockets is not None
        config, state = self.config, self.server_state
        await self.lifespan.startup()
        self.servers = [
            Acceptor(  # type: ignore[misc]
                listener,
                lambda: DeadlineProtocol(config, state, self.lifespan.state),
                self._connections,
                self._tls,
            )
            for listener in sockets
        ]
        self.started = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._on_signal()
