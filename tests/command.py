"""Runs the `tilerank` command for tests, by itself or under another launcher, and looks for what it left behind."""

import os
import shutil
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DEMO = Path(__file__).parent.parent / "assets" / "demo-lm"
COMMAND = (sys.executable, "-m", "tilerank")
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
        """The sentences for the user."""
        return [line for line in self.err.splitlines() if "tilerank: error: " in line]


class Run:
    """A running command. Use as a context manager: leaving it kills what is left."""

    def __init__(
        self,
        *arguments: object,
        launcher: Sequence[str] = (),
        command: Sequence[str] = COMMAND,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> None:
        self.mark = f"{MARK}={uuid.uuid4().hex}"
        name, _, value = self.mark.partition("=")
        self._shm = _shared_memory()
        self.process = subprocess.Popen(
            [*launcher, *command, *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=cwd,
            env={**os.environ, **(env or {}), name: value},
        )

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self.pids():
            os.kill(pid, 9)
        self.process.kill()
        self.process.communicate()

    def pids(self) -> list[int]:
        """Every living process of this run."""
        return [pid for pid, environment in _processes() if self.mark in environment]

    def rank_pid(self, rank: int, variable: str = "TILERANK_RANK") -> int | None:
        """The process of a rank, once it runs."""
        wanted = f"{variable}={rank}"
        found = [pid for pid, environment in _processes() if {self.mark, wanted} <= environment]
        return min(found, default=None)

    def await_line(self, text: str) -> str:
        """The next line of stderr with `text` in it."""
        assert self.process.stderr is not None
        seen = []
        watchdog = threading.Timer(60, self.process.kill)
        watchdog.start()
        try:
            for line in self.process.stderr:
                seen.append(line)
                if text in line:
                    return line
        finally:
            watchdog.cancel()
        raise AssertionError(f"no line with {text!r} came:\n" + "".join(seen))

    def finish(self, timeout_s: float = 90) -> Result:
        """Waits for the end, and asserts that it left neither a process nor shared memory."""
        out, err = self.process.communicate(timeout=timeout_s)
        await_true(lambda: not self.pids(), 3, f"processes left behind: {self.pids()}\n{err}")
        assert not _shared_memory() - self._shm
        return Result(self.process.returncode, out, err)


def run(*arguments: object, **options: Any) -> Result:
    with Run(*arguments, **options) as running:
        return running.finish()


def await_true(condition: Callable[[], object], seconds: float, otherwise: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.02)


def demo_copy(target: Path) -> Path:
    """A copy of the demo model whose files a test may change."""
    return Path(shutil.copytree(DEMO, target))


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


def _shared_memory() -> set[str]:
    """Names that we or torch may have put there; other programs on the machine come and go."""
    return {entry.name for entry in Path("/dev/shm").iterdir() if entry.name.startswith(("tilerank", "torch"))}
