"""Fixtures of the kernel tests."""

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from rungs import RUNGS

from tilerank.kernels import core


def pytest_configure() -> None:
    """Fail if the core under test is not the build that PYTHONPATH names (`make test-sanitize`)."""
    # A shell starts jobs in the background with SIGINT ignored, and so would the commands that tests interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.disable()
    for folder in filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)):
        if Path(folder, "tilerank").exists():
            assert Path(core.__file__).is_relative_to(folder), f"expected tilerank of {folder}, found {core.__file__}"


def pytest_collection_finish() -> None:
    """Keep torch, transformers and all tests, which stay in memory, out of every later garbage collection."""
    gc.freeze()
    gc.enable()


@pytest.fixture
def restored() -> Iterator[None]:
    """Restore the rung and the pool after the test. During the test torch has one thread: on a busy machine, its pool
    would make tiny products take milliseconds."""
    before, threads = core.isa(), torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    core.start_pool(None, 1, spin=False)
    core.force_isa(before)
    torch.set_num_threads(threads)


@pytest.fixture(params=RUNGS)
def rung(request: pytest.FixtureRequest, restored: None) -> str:
    """A rung of the ISA ladder, on three threads. The arena's next blocks hold NaN, so that reading them shows."""
    core.force_isa(request.param)
    core.start_pool(None, 3, spin=False)
    core.empty((1 << 20,), torch.float32).fill_(float("nan"))
    return str(request.param)
