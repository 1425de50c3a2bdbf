"""Runs the programs of peers/, which measure other systems in Python environments that have them."""

import json
import os
import subprocess
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import LaunchError
from ..processes.process import die_with


def missing_module(python: str, modules: Sequence[str]) -> str | None:
    """Return why the interpreter `python` cannot import one of `modules`, or None if it has all of them."""
    for module in modules:
        code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
        try:
            found = subprocess.run([python, "-P", "-c", code], check=False, stdin=subprocess.DEVNULL).returncode
        except OSError as e:
            return f"{python} cannot be run: {e.strerror}"
        if found != 0:
            return f"not installed: {python} has no module {module}"
    return None


def run_program(name: str, python: str, program: str, workload: dict[str, Any], scratch: Path) -> dict[str, Any]:
    """Run a program of peers/ with one pinned thread for each core, as tilerank has, and return its RESULT.

    workload: becomes its WORKLOAD, with the cores as "cores". name: of the peer. LaunchError with the last line of its
    stderr if it fails.
    """
    cores = workload["cores"]
    threads = {"OMP_NUM_THREADS": str(len(cores)), "GOMP_CPU_AFFINITY": " ".join(map(str, cores))}
    workload_file, result_file = scratch / "workload.json", scratch / "result.json"
    workload_file.write_text(json.dumps(workload))
    done = subprocess.run(
        [python, "-P", str(Path(__file__).resolve().parent / "peers" / program), str(workload_file), str(result_file)],
        env=os.environ | threads,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        preexec_fn=partial(die_with, os.getpid()),
    )
    if done.returncode != 0:
        last_line = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise LaunchError(f"{name} failed with exit status {done.returncode}: {last_line}")
    result: dict[str, Any] = json.loads(result_file.read_text())
    return result
