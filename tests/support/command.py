"""Runs the `tilerank` command for tests, directly or under another launcher, and checks what it leaves behind.

Deadlines in this file are for commands that hang: even a machine with ten times the load must meet them.
"""

import contextlib
import json
import os
import re
import selectors
import shutil
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

from tilerank.kernels import core

DEMO = Path(__file__).parents[2] / "assets" / "demo-lm"
COMMAND = (sys.executable, "-m", "tilerank")
PATIENCE_S = 300.0
SOON_S = 40.0  # five seconds by design, which a busy machine may exceed; a wait for a deadline of its own takes 60 s
ENDLESS = 1 << 18
NEWEST_ISA = next(rung.name for rung in core.isa_report() if rung.usable)
"""What commands run on unless a test says otherwise, so that none measures rates, which may differ between runs."""
MARK = "TILERANK_TEST_RUN"  # in the environment of every process of a run

# Open MPI as root, and with more ranks than cores. Version 4 reads OMPI_MCA_*, version 5 PRTE_MCA_*.
OPEN_MPI_AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
OPEN_MPI_ENVIRONMENT = OPEN_MPI_AS_ROOT | {
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}


@dataclass(frozen=True)
class Result:
    status: int
    out: str
    err: str

    @property
    def errors(self) -> list[str]:
        """The error sentences for the user."""
        return [line for line in self.err.splitlines() if "tilerank: error: " in line]


def assert_refused(result: Result, sentence: str, status: int = 1) -> None:
    """Check the whole error against the pattern `sentence`."""
    assert result.status == status, result.err
    assert len(result.errors) == 1, result.err
    assert re.fullmatch(f"tilerank: error: {sentence}", result.errors[0]), result.errors[0]
    assert "Traceback" not in result.err
    assert result.out == ""


class Run:
    """A running command. Use as a context manager: leaving it kills what is left."""

    def __init__(
        self,
        *arguments: object,
        launcher: Sequence[str] = (),
        command: Sequence[str] = COMMAND,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        stdin: int | IO[bytes] = subprocess.DEVNULL,
    ) -> None:
        self.mark = f"{MARK}={uuid.uuid4().hex}"
        name, _, value = self.mark.partition("=")
        self._shm = shared_memory()
        self.process = subprocess.Popen(
            [*launcher, *command, *map(str, arguments)],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            cwd=cwd,
            env={"TILERANK_ISA": NEWEST_ISA, **os.environ, **(env or {}), name: value},
        )
        assert self.process.stdout is not None and self.process.stderr is not None
        self._streams = {"out": self.process.stdout, "err": self.process.stderr}
        self._said = {"out": b"", "err": b""}
        self._heard = 0  # bytes of stderr up to the end of the last line that await_line returned
        self._selector = selectors.DefaultSelector()
        for which, stream in self._streams.items():
            self._selector.register(stream, selectors.EVENT_READ, which)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):  # it has already ended
                os.kill(pid, 9)
        self.process.kill()
        self.process.wait()
        for which in list(self._streams):
            self.close(which)
        self._selector.close()

    def pids(self) -> list[int]:
        """Return the pids of all running processes of this run."""
        return [pid for pid, environment in _processes() if self.mark in environment]

    def rank_pid(self, rank: int, variable: str = "TILERANK_RANK") -> int | None:
        """Return the pid of a rank, once it runs."""
        wanted = f"{variable}={rank}"
        found = [pid for pid, environment in _processes() if {self.mark, wanted} <= environment]
        return min(found, default=None)

    def await_line(self, text: str) -> str:
        """Return the next line of stderr that contains `text`."""

        def found() -> tuple[int, str] | None:
            end = self._heard
            for line in self._said["err"][end:].splitlines(keepends=True):
                end += len(line)
                if text.encode() in line and line.endswith(b"\n"):
                    return end, line.decode(errors="replace")
            return None

        self._read_until(found, f"no line with {text!r} came")
        hit = found()
        assert hit is not None
        self._heard = hit[0]
        return hit[1]

    def heard(self) -> str:
        """Return all of stderr so far."""
        while self._take_in(0):
            pass
        return self._said["err"].decode(errors="replace")

    def await_output(self, nbytes: int) -> None:
        """Wait until stdout has `nbytes` bytes."""
        self._read_until(lambda: len(self._said["out"]) >= nbytes, f"no {nbytes} bytes came out")

    def close(self, which: str) -> None:
        """Close the reading end of "out" or "err", as a reader that ends does."""
        stream = self._streams.pop(which)
        self._selector.unregister(stream)
        stream.close()

    def finish(self, timeout_s: float = PATIENCE_S) -> Result:
        """Wait for the end, and assert that neither a process nor shared memory is left."""
        self._read_until(lambda: not self._streams, "it does not end", timeout_s)
        status = self.process.wait(timeout_s)
        out, err = (said.decode(errors="replace") for said in self._said.values())
        await_true(lambda: not self.pids(), 10, f"processes left behind: {self.pids()}\n{err}")
        assert not shared_memory() - self._shm
        return Result(status, out, err)

    def _read_until(self, condition: Callable[[], object], otherwise: str, timeout_s: float = PATIENCE_S) -> None:
        """Read the command's output until `condition` holds. Everything read is kept for later calls."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if not self._take_in(max(deadline - time.monotonic(), 0)):
                raise AssertionError(f"{otherwise}:\n{self._said['out']!r}\n{self._said['err'].decode()}")

    def _take_in(self, timeout_s: float) -> bool:
        """Return False if nothing arrived in time."""
        ready = self._selector.select(timeout_s) if self._streams else []
        for key, _ in ready:
            data = os.read(key.fd, 1 << 16)
            self._said[key.data] += data
            if not data:
                self.close(key.data)
        return bool(ready)


def run(*arguments: object, **options: Any) -> Result:
    with Run(*arguments, **options) as running:
        return running.finish()


def await_true(condition: Callable[[], object], seconds: float, otherwise: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.02)


def free_port() -> int:
    """Return a free port of this machine, below the range of ephemeral ports. Test processes with neighbouring pids
    look in different places."""
    for port in range(20000 + os.getpid() * 16 % 10000, 32000):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")


def endless_copy(target: Path) -> Path:
    """Copy the demo model, with a context that takes minutes to fill at any speed; for --ignore-eos."""
    model = demo_copy(target)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": ENDLESS}))
    return model


def demo_copy(target: Path) -> Path:
    """Copy the demo model for a test that changes its files."""
    return Path(shutil.copytree(DEMO, target))


def demo_without_tokenizer(target: Path) -> Path:
    """Copy the demo model without the files of its tokenizer."""
    return Path(shutil.copytree(DEMO, target, ignore=shutil.ignore_patterns("tokenizer*", "chat_template*")))


def _processes() -> list[tuple[int, set[str]]]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                variables = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if state not in "ZX":
                found.append((int(entry.name), set(variables)))
    return found


def shared_memory() -> set[str]:
    """Return names in /dev/shm that may be ours or torch's; other programs on the machine create and remove theirs."""
    return {entry.name for entry in Path("/dev/shm").iterdir() if entry.name.startswith(("tilerank", "torch"))}


def hold(rank: int, directory: Path) -> tuple[dict[str, str], Path]:
    """Return an environment in which this rank waits before it loads, each time that it starts, and the FIFO in
    `directory` that releases it when something is written to it."""
    fifo = directory / "go"
    os.mkfifo(fifo)
    return _hooked(TILERANK_TEST_HOLD=f"{rank}:{fifo}"), fifo


def known_peaks(isa: str) -> dict[str, str]:
    """Return an environment in which `tilerank bench` takes the peaks of the machine as known. To measure them takes
    seconds, and more on busy cores; the test of `bench kernels` does."""
    rates = {"stream_read_gbs": 20.0, "stream_update_gbs": 25.0, "first_touch_gbs": 5.0, "core_to_core_ns": 100.0}
    of_tiles = {"amx_bf16_tflops": 4.0, "amx_int8_tops": 8.0}
    of_vectors = {"vector_fp32_tflops": 0.25, "vector_bf16_tflops": 0.5, "vector_int8_tops": 1.0}
    compute = {"amx": of_tiles, "reference": {}}.get(isa, of_vectors)
    known = dict.fromkeys(of_tiles) | rates | compute | {"isa": isa}
    return _hooked(TILERANK_TEST_PEAKS=json.dumps(known))


def _hooked(**variables: str) -> dict[str, str]:
    """Return `variables`, and the PYTHONPATH that has the hooks which they configure."""
    path = os.pathsep.join(filter(None, [str(Path(__file__).parent / "hold"), os.environ.get("PYTHONPATH", "")]))
    return {"PYTHONPATH": path, **variables}
