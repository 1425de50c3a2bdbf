"""Collectives in shared memory and graphs in a program of their own, under the thread sanitizer."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.kernels.test_pool import CSRC, FLAGS

SOURCES = (
    *(f"shm/{name}" for name in ("shm_segment", "shm_collectives")),
    *(f"core/{name}" for name in ("graph", "pool", "arena", "registry", "cpu", "selftest", "selftest_amx")),
)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not shutil.which("g++"):
        pytest.skip("no g++")
    program = tmp_path_factory.mktemp("shm") / "shm_test"
    sources = [Path(__file__).parent / "shm_test.cpp", *(CSRC / f"{name}.cpp" for name in SOURCES)]
    subprocess.run(
        ["g++", *FLAGS, "-ffp-contract=off", "-fsanitize=thread", f"-I{CSRC}", *map(str, sources), "-o", str(program)],
        check=True,
    )
    return program


CASES = [("collectives", ranks, threads, "spin") for ranks, threads in ((2, 1), (3, 1), (2, 2), (5, 1))]
CASES += [("lost", 3, 1, "spin"), ("graphs", 1, 1, "spin"), ("graphs", 1, 2, "spin")]
CASES += [(*case[:-1], "sleep") for case in CASES]
CASES += [("graphs", 1, 6, "sleep")]  # threads that outnumber the cores take long to spin


@pytest.mark.parametrize(("case", "ranks", "threads", "waiting"), CASES)
def test_no_race_and_the_right_values(program: Path, case: str, ranks: int, threads: int, waiting: str) -> None:
    result = subprocess.run([program, case, str(ranks), str(threads), waiting], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
