"""Systems to compare with. The programs of peers/ measure them in Python environments that have them."""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tilerank.launch.errors import LaunchError
from tilerank.launch.processes.process import die_with

PROGRAMS = Path(__file__).resolve().parent / "peers"


@dataclass(frozen=True)
class Peer:
    """A system to compare with, and the Python interpreter in whose environment it is installed."""

    name: str
    python: str

    def missing_module(self, modules: Sequence[str]) -> str | None:
        """Return why the interpreter cannot import one of `modules`, or None if it has all of them."""
        for module in modules:
            code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
            try:
                found = subprocess.run([self.python, "-P", "-c", code], check=False, stdin=subprocess.DEVNULL)
            except OSError as e:
                return f"{self.python} cannot be run: {e.strerror}"
            if found.returncode != 0:
                return f"not installed: {self.python} has no module {module}"
        return None

    def missing_header(self, headers: Sequence[str]) -> str | None:
        """Return why the interpreter's environment lacks one of `headers`, or None if it has all of them."""
        folder = Path(self.python).absolute().parents[1] / "include"
        lacking = [folder / header for header in headers if not (folder / header).exists()]
        return f"not installed: there is no {lacking[0]}" if lacking else None

    def run(self, program: str, workload: dict[str, Any], scratch: Path) -> dict[str, Any]:
        """Run a program of peers/ with one pinned thread for each core, as tilerank has, and return its RESULT.

        workload: becomes its WORKLOAD, with the cores as "cores". LaunchError with the last line of its stderr if it
        fails.
        """
        cores = workload["cores"]
        threads = {"OMP_NUM_THREADS": str(len(cores)), "GOMP_CPU_AFFINITY": " ".join(map(str, cores))}
        workload_file, result_file = scratch / "workload.json", scratch / "result.json"
        workload_file.write_text(json.dumps(workload))
        done = subprocess.run(
            [self.python, "-P", str(PROGRAMS / program), str(workload_file), str(result_file)],
            env=os.environ | threads,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            preexec_fn=partial(die_with, os.getpid()),
        )
        if done.returncode != 0:
            last_line = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise LaunchError(f"{self.name} failed with exit status {done.returncode}: {last_line}")
        result: dict[str, Any] = json.loads(result_file.read_text())
        return result


def add_peers_argument(parser: argparse.ArgumentParser, names: Iterable[str], default: str = "transformers") -> None:
    """Add --with, which chooses peers from `names`."""
    parser.add_argument(
        "--with",
        dest="peers",
        type=peers_of(names),
        default=default,
        metavar="NAME[=PYTHON],...",
        help=f"peers from {', '.join(names)}; PYTHON is the interpreter that has the peer, by default this one "
        f"(default: {default})",
    )


def add_scratch_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--scratch",
        type=Path,
        metavar="DIR",
        help="keep the weights that peers convert in DIR, for later runs (default: a temporary directory)",
    )


@contextlib.contextmanager
def scratch_of(args: argparse.Namespace) -> Iterator[Path]:
    """Yield the directory of --scratch, or a temporary one."""
    if args.scratch:
        yield args.scratch
    else:
        with tempfile.TemporaryDirectory(prefix="tilerank-bench-") as scratch:
            yield Path(scratch)


def peers_of(names: Iterable[str]) -> Callable[[str], list[Peer]]:
    """Return an argparse type: "transformers,vllm=/path/to/python"."""

    def parse(text: str) -> list[Peer]:
        peers = []
        for part in text.split(","):
            name, _, python = part.partition("=")
            if name not in names:
                raise argparse.ArgumentTypeError(f"expected some of {', '.join(names)}, found {name!r}")
            peers.append(Peer(name, python or sys.executable))
        return peers

    return parse


def ready_peers(peers: Sequence[Peer], obstacle: Callable[[Peer], str | None]) -> list[Peer]:
    """Return the peers that can be measured, and print why the others cannot."""
    ready = []
    for peer in peers:
        if (reason := obstacle(peer)) is None:
            ready.append(peer)
        else:
            print(f"{peer.name}: skipped, {reason}")
    return ready
