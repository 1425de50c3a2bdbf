"""`tilerank serve`: the OpenAI API in front of a model, on ranks that this command starts or another launcher started.

Rank 0 starts the HTTP process and talks to it over a pair of sockets; both end when the other does.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

from tilerank.loader.config import read_model_type

from . import logs, start
from .doctor import own_version
from .errors import LaunchError
from .generate import GenerateJob, add_model_arguments, model_directory
from .logs import say
from .rank import run_rank
from .rendezvous import identify
from .start import whole_number
from .topology import read_topology

if TYPE_CHECKING:
    from tilerank.parallel.join import Team
    from tilerank.runtime.engine import Engine

    from .placement import Placement

HTTP_FDS = "TILERANK_HTTP_FDS"
"""In the environment of the HTTP process: its listening socket and the control socket."""
API_KEY = "TILERANK_API_KEY"
DRAIN_S = 600.0
"""Longest wait for answers that are under way, once the server is told to stop; told again, it ends at once."""
END_S = 5.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    http = parser.add_argument_group("HTTP")
    http.add_argument(
        "--host", default="127.0.0.1", metavar="ADDR", help="address to listen on (default: this machine only)"
    )
    http.add_argument(
        "--port", type=whole_number(0, 65535), default=8000, metavar="N", help="0: any free one (default: 8000)"
    )
    http.add_argument(
        "--served-model-name", metavar="NAME", help="what clients call it (default: the directory's name)"
    )
    http.add_argument(
        "--api-key", metavar="KEY", help=f"that clients must show (better in {API_KEY}: others see options)"
    )
    add_model_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if HTTP_FDS in os.environ:
        return _be_http(args)
    start.check_arguments(args)
    job = ServeJob(args)
    identity = identify(os.environ)
    if start.ours_to_start(args, identity):
        job.prepare()
        job.listener.close()  # rank 0 opens it again
        return start.start_ranks(args, identity, job.check_size, end_s=DRAIN_S + END_S)
    return run_rank(identity, args, job)


class ServeJob(GenerateJob):
    """What `serve` does on its ranks."""

    def prepare(self) -> None:
        from tilerank.loader.tokenizer import Tokenizer

        Tokenizer(self._model_dir)
        self.listener = _listen(self._args.host, self._args.port)

    def build(self, team: Team) -> Engine:
        engine = super().build(team)
        # The HTTP process hears it as well, answers what is under way and hangs up; that ends the ranks.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        return engine

    def lead(self, engine: Engine, size: int, placement: Placement) -> None:
        from tilerank.runtime.server.lead import lead

        host, port = self.listener.getsockname()[:2]
        ours, theirs = socket.socketpair()
        control, http_control = socket.socketpair()
        with ours, control:
            http = _start_http(self._args.argv, self.listener, http_control, placement)
            socket.send_fds(control, [b"e"], [theirs.fileno()])
            for handed_over in (self.listener, http_control, theirs):
                handed_over.close()
            try:
                say(f"tilerank: {self._model_dir} is served at http://{_url_host(host)}:{port}/v1")
                lead(engine, ours)
            finally:
                control.close()
                _end(http)


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
    except OSError as e:
        raise LaunchError(f"--host {host}: {e.strerror}") from e
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1024)
    except OSError as e:
        listener.close()
        raise LaunchError(f"--host {host} --port {port} cannot be listened on: {e.strerror}") from e
    return listener


def _start_http(
    argv: list[str], listener: socket.socket, control: socket.socket, placement: Placement
) -> subprocess.Popen[bytes]:
    fds = (listener.fileno(), control.fileno())
    allowed = set(read_topology().allowed_cpus)
    taken = {core for rank in placement.ranks for core in rank.affinity}

    def settle() -> None:
        # Beside the ranks where there is room: a core that ranks spin on is late to answer.
        os.sched_setaffinity(0, allowed - taken or allowed)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    return subprocess.Popen(
        [sys.executable, "-P", "-m", "tilerank", *argv],
        env=os.environ | {HTTP_FDS: "{},{}".format(*fds)},
        stdin=subprocess.DEVNULL,
        pass_fds=fds,
        preexec_fn=settle,
    )


def _end(http: subprocess.Popen[bytes]) -> None:
    """It has seen that its engine is gone, and that no other will come."""
    try:
        http.wait(END_S)
    except subprocess.TimeoutExpired:
        http.kill()
        http.wait()


def _be_http(args: argparse.Namespace) -> int:
    from tilerank.runtime.server.app import About
    from tilerank.runtime.server.tools import tool_parser

    from .http import Http, run

    logs.configure(0, args.log_level, prefix=False)
    model_dir = model_directory(args)
    listener, control = (socket.socket(fileno=int(fd)) for fd in os.environ[HTTP_FDS].split(","))
    about = About(
        args.served_model_name or model_dir.resolve().name,
        own_version() or "unknown",
        args.api_key or os.environ.get(API_KEY) or None,
        tool_parser(read_model_type(model_dir)),
    )
    run(Http(listener, model_dir, about), control, DRAIN_S)
    return 0


def _url_host(host: str) -> str:
    return f"[{host}]" if ":" in host else host
