"""Makes what takes long once in a test run, for all of its workers."""

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Return a directory that `make` has filled. The first worker that asks for it makes it, and others wait. Tests
    do not change its files."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "made"
    folder.mkdir(exist_ok=True)
    out, complete = folder / name, folder / f"{name}.complete"
    with open(folder / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not complete.exists():
            shutil.rmtree(out, ignore_errors=True)  # what a failed worker left behind
            out.mkdir()
            make(out)
            complete.touch()
    return out
