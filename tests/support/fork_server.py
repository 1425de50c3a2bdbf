"""Starts ranks by forking one process that has imported torch and tilerank, which takes longer than most tests.

The process lives as long as the test run. There is one for each PYTHONPATH, which decides which tilerank is imported.
The rest of a rank's environment is read after the fork.
"""

import atexit
import gc
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

LENGTH = struct.Struct("<I")
STATUS = struct.Struct("<i")

_servers: dict[str, socket.socket] = {}
"""The process to fork, by its PYTHONPATH."""


class Forked:
    """A rank, with the part of the interface of subprocess.Popen that is used here."""

    def __init__(self, pid: int, stdout: int, status: int) -> None:
        self.pid = pid
        self.stdout = os.fdopen(stdout, "rb")
        self.returncode: int | None = None
        self._status = status

    def poll(self) -> int | None:
        return self._wait(0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._wait(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(f"rank process {self.pid}", timeout or 0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _wait(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._status], [], [], timeout)[0]:
            (self.returncode,) = STATUS.unpack(os.read(self._status, STATUS.size))
            os.close(self._status)
        return self.returncode


def fork(job: dict[str, Any], environ: dict[str, str], fds: tuple[int, ...]) -> Forked:
    """Run `ranks.main(job)` in a new process. It gets copies of `fds`, whose numbers there are job["fds"]."""
    path = environ["PYTHONPATH"]
    if path not in _servers:
        _servers[path] = _start(path)
    server = _servers[path]
    payload = json.dumps({"job": job, "environ": environ, "cwd": str(Path.cwd())}).encode()
    out_read, out_write = os.pipe()
    status_read, status_write = os.pipe()
    socket.send_fds(server, [LENGTH.pack(len(payload))], [out_write, status_write, *fds])
    server.sendall(payload)
    os.close(out_write)
    os.close(status_write)
    (pid,) = LENGTH.unpack(server.recv(LENGTH.size, socket.MSG_WAITALL))
    return Forked(pid, out_read, status_read)


def _start(path: str) -> socket.socket:
    ours, theirs = socket.socketpair()
    command = [sys.executable, __file__, str(theirs.fileno())]
    environ = os.environ | {"GOMP_SPINCOUNT": "0", "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    environ["PYTHONPATH"] = path
    process = subprocess.Popen(command, pass_fds=(theirs.fileno(),), env=environ, stdin=subprocess.DEVNULL)
    theirs.close()

    def stop() -> None:
        ours.close()
        process.wait()

    atexit.register(stop)
    return ours


def _serve(control: socket.socket, run: Callable[[dict[str, Any]], None]) -> None:
    children: dict[int, tuple[int, int]] = {}  # pidfd: (pid, descriptor that receives its exit status)
    while True:
        watched: list[socket.socket | int] = [control, *children]
        readable, _, _ = select.select(watched, [], [])
        for pidfd in set(children).intersection(readable):
            pid, status = children.pop(pidfd)
            os.write(status, STATUS.pack(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))
            os.close(status)
            os.close(pidfd)
        if control not in readable:
            continue
        header, fds, _, _ = socket.recv_fds(control, LENGTH.size, 16)
        if not header:  # the test run is over
            for pid, _ in children.values():
                os.kill(pid, signal.SIGKILL)
            return
        request = json.loads(control.recv(LENGTH.unpack(header)[0], socket.MSG_WAITALL))
        output, status, *passed = fds
        pid = os.fork()
        if pid == 0:
            for fd in (control.detach(), status, *children, *(status for _, status in children.values())):
                os.close(fd)
            _become(request, output, passed, run)
        children[os.pidfd_open(pid)] = (pid, status)
        for fd in (output, *passed):
            os.close(fd)
        control.sendall(LENGTH.pack(pid))


def _become(request: dict[str, Any], output: int, passed: list[int], run: Callable[[dict[str, Any]], None]) -> NoReturn:
    """Turn this process into the rank.

    At the end, exit handlers run, but torch's modules are not torn down, which would take longer than most tests. Ranks
    that are started by exec end in full (mpirun in tests/parallel/test_hosts.py).
    """
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environ"])
    code = 1
    try:
        run(request["job"] | {"fds": passed})
        code = 0
    except Exception:  # noqa: BLE001 the rank ends here, with the status that the interpreter would give it
        traceback.print_exc()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    gc.disable()  # while so much is imported that stays

    import torch
    from ranks import main

    # What every rank imports; the families are among it.
    from tilerank.runtime.lead import engine  # noqa: F401
    from tilerank.runtime.rank import registry

    registry._builders()
    torch.set_num_threads(1)
    gc.freeze()  # the ranks' collectors then leave these objects alone, so that their pages stay shared
    gc.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the test run handles it and ends this process
    _serve(socket.socket(fileno=int(sys.argv[1])), main)
