"""Starts the ranks of a multi-rank test.

`run_ranks(3, "module:function", kwargs={...})` starts three processes, which join a group over loopback and each call
`function(team, **kwargs)`; their results (JSON) are returned by rank. The ranks are forked from a process that has
imported torch and nothing else, so every rank imports the module anew.

Tests of failures use `Ranks` directly, to kill and stop single ranks. `present` leaves ranks out. `namespaces` puts
each rank in a network namespace, where `store` is the address on which rank 0 listens, and `SECRET` what ranks prove to
have. `hosts` gives each rank the name of a host, as if the ranks were on several.
"""

import contextlib
import ctypes
import importlib
import json
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from fork_server import Forked, fork

CLONE_NEWNET = 0x40000000
SECRET = "the secret of the ranks of a test"


class RankFailed(AssertionError):
    """A rank ended without returning its result."""


class Ranks:
    """Running rank processes. Use as a context manager: none of them outlives it."""

    def __init__(
        self,
        size: int,
        target: str,
        *,
        kwargs: dict[str, Any] | None = None,
        env: dict[str, str] | None = None,
        threads: int = 1,
        collectives: str = "auto",
        timeout_s: float = 30.0,
        spin: bool = False,
        present: Sequence[int] | None = None,
        namespaces: Sequence[str] | None = None,
        hosts: Sequence[str] | None = None,
        store: tuple[str, int] | None = None,
    ) -> None:
        module, _, function = target.partition(":")
        environ = os.environ | {"GOMP_SPINCOUNT": "0", "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        # PYTHONPATH of the environment comes first: `make test-amx` tests another build of the core.
        support = Path(__file__).parent
        paths = [environ.get("PYTHONPATH", ""), str(support), str(support.parents[1])]
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        environ |= env or {}
        name = f"@tilerank-{secrets.token_hex(16)}"
        with listen(name, 0) as listener:
            self.processes: list[Forked] = []
            self._output: list[list[bytes]] = []
            for rank in range(size) if present is None else present:
                job = {
                    "rank": rank,
                    "size": size,
                    "store": store or (name, 0),
                    "listen": store is not None,
                    "hosts": hosts,
                    "namespace": namespaces[rank] if namespaces else None,
                    "module": module,
                    "function": function,
                    "kwargs": kwargs or {},
                    "threads": threads,
                    "collectives": collectives,
                    "timeout_s": timeout_s,
                    "spin": spin,
                }
                fds = (listener.fileno(),) if rank == 0 and store is None else ()
                self._start(job, environ, fds)

    def _start(self, job: dict[str, Any], environ: dict[str, str], fds: tuple[int, ...]) -> None:
        process = fork(job, environ, fds)
        output: list[bytes] = []
        threading.Thread(target=lambda: output.extend(process.stdout), daemon=True).start()
        self.processes.append(process)
        self._output.append(output)

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
            process.wait()

    def signal(self, rank: int, number: signal.Signals) -> None:
        self.processes[rank].send_signal(number)

    def wait_for(self, rank: int, line: str, timeout: float = 300.0) -> None:
        """Wait until the rank has printed `line`."""
        deadline = time.monotonic() + timeout
        while line.encode() + b"\n" not in self._output[rank]:
            if self.processes[rank].poll() is not None or time.monotonic() > deadline:
                raise RankFailed(f"rank {rank} did not print {line!r}:\n{self.output(rank)}")
            time.sleep(0.01)

    def wait(self, rank: int, timeout: float = 300.0) -> int:
        """Return the exit status, or the negated number of the signal that killed the rank."""
        return self.processes[rank].wait(timeout)

    def output(self, rank: int) -> str:
        return b"".join(self._output[rank]).decode(errors="replace")

    def results(self, timeout: float) -> list[Any]:
        """Return the results of all ranks. Once a rank fails, end the others and raise RankFailed with all output."""
        deadline = time.monotonic() + timeout
        while any(process.poll() is None for process in self.processes):
            failed = any(process.poll() for process in self.processes)
            if failed:
                time.sleep(1.0)  # so that the others can report errors as well
            if failed or time.monotonic() > deadline:
                break
            time.sleep(0.005)
        codes = [process.poll() for process in self.processes]
        if any(code != 0 for code in codes):
            self.__exit__()
            said = "\n".join(f"--- rank {r}, exit {code}:\n{self.output(r)}" for r, code in enumerate(codes))
            raise RankFailed(f"ranks ended with {codes} (None: still running after {timeout:g} s)\n{said}")
        return [json.loads(self._result_line(rank)) for rank in range(len(self.processes))]

    def result(self, rank: int, timeout: float = 300.0) -> Any:
        """Return the result of one rank; the others may be dead or stopped."""
        code = self.wait(rank, timeout)
        if code != 0:
            raise RankFailed(f"rank {rank} ended with {code}:\n{self.output(rank)}")
        return json.loads(self._result_line(rank))

    def _result_line(self, rank: int) -> str:
        for _ in range(200):  # the reading thread may finish a moment after the process
            for line in reversed(self._output[rank]):
                if line.startswith(b"result: "):
                    return line.decode().removeprefix("result: ")
            time.sleep(0.01)
        raise RankFailed(f"rank {rank} returned nothing:\n{self.output(rank)}")


def run_ranks(
    size: int,
    target: str,
    *,
    kwargs: dict[str, Any] | None = None,
    env: dict[str, str] | None = None,
    threads: int = 1,
    timeout: float = 400.0,
    collectives: str = "auto",
    spin: bool = False,
) -> list[Any]:
    """Call `target` ("module:function", importable from tests/) as `function(team, **kwargs)` on `size` ranks."""
    with Ranks(size, target, kwargs=kwargs, env=env, threads=threads, collectives=collectives, spin=spin) as ranks:
        return ranks.results(timeout)


def enter(namespace: str) -> None:
    """Move this thread, and those it starts, into a network namespace made by `ip netns add`."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}") as file:
        if libc.setns(file.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter network namespace {namespace}")


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket: unix for "@name", an abstract name, otherwise TCP."""
    if not host.startswith("@"):
        return socket.create_server((host, port))
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("\0" + host[1:])
    listener.listen()
    return listener


def main(job: dict[str, Any]) -> None:
    import torch

    from tilerank.kernels import core
    from tilerank.parallel.join import join
    from tilerank.parallel.rendezvous import Membership

    torch.set_num_threads(1)
    core.start_pool(None, job["threads"], spin=False)
    rank = int(os.environ["PMI_RANK"]) if job["rank"] is None else job["rank"]
    if job["namespace"]:
        enter(job["namespace"])
    if job["hosts"]:
        mock.patch("tilerank.parallel.rendezvous.host_id", lambda: job["hosts"][rank]).start()
    listens = job["listen"] and rank == 0
    listen_fd = listen(*job["store"]).detach() if listens else next(iter(job["fds"]), None)
    host, port = job["store"]
    member = Membership(rank, job["size"], host, port, listen_fd, timeout_s=job["timeout_s"], secret=SECRET)
    function = getattr(importlib.import_module(job["module"]), job["function"])
    team = join(member, job["collectives"], spin=job["spin"])
    try:
        result = function(team, **job["kwargs"])
    finally:
        team.close()
    sys.stdout.flush()
    with open(1, "wb", closefd=False) as out:  # buffered even if PYTHONUNBUFFERED is set, so that a line is one write
        out.write(f"result: {json.dumps(result)}\n".encode())


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))


def eventually(output: Callable[[], str], text: str) -> str:
    """Return the output of a process. Wait two seconds at most for `text`: the thread that reads may lag behind."""
    for _ in range(200):
        if text in output():
            break
        time.sleep(0.01)
    return output()
