"""The thread pool in a program of its own, under the thread sanitizer: races, lost wake-ups, failures, forks."""

import shutil
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).resolve().parents[2] / "tilerank" / "kernels" / "csrc"
FLAGS = ["-std=c++20", "-O1", "-g", "-pthread", "-Wall", "-Wextra", "-Werror"]


def build(folder: Path, *flags: str) -> Path:
    program = folder / "pool_test"
    sources = [Path(__file__).parent / "pool_test.cpp", CSRC / "core" / "pool.cpp", CSRC / "core" / "arena.cpp"]
    subprocess.run(
        ["g++", *FLAGS, *flags, f"-I{CSRC}", *map(str, sources), "-o", str(program)],
        check=True,
    )
    return program


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not shutil.which("g++"):
        pytest.skip("no g++")
    return build(tmp_path_factory.mktemp("pool"), "-fsanitize=thread")


@pytest.mark.parametrize("waiting", ["spin", "sleep"])
@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("case", ["barriers", "failures", "callers", "restart", "scratch", "pinning"])
def test_pool(program: Path, case: str, threads: int, waiting: str) -> None:
    result = subprocess.run([program, case, str(threads), waiting], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.fixture(scope="module")
def plain_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not shutil.which("g++"):
        pytest.skip("no g++")
    return build(tmp_path_factory.mktemp("pool"))


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("case", ["fork", "fork twice"])
def test_a_forked_child_starts_its_own_threads(plain_program: Path, case: str, threads: int) -> None:
    # The thread sanitizer does not allow new threads after a fork.
    result = subprocess.run([plain_program, case, str(threads), "sleep"], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
