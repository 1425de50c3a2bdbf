"""The thread pool, collectives in shared memory and graphs in programs of their own, under the thread sanitizer."""

import shutil
import subprocess
from pathlib import Path

import pytest
from made_once import made_once

CSRC = Path(__file__).resolve().parents[2] / "tilerank" / "kernels" / "csrc"
FLAGS = ["-std=c++20", "-O1", "-g", "-pthread", "-Wall", "-Wextra", "-Werror"]


POOL = ("core/pool", "core/arena")
SHM = (
    *(f"shm/{name}" for name in ("shm_segment", "shm_collectives")),
    *(f"core/{name}" for name in ("graph", "pool", "arena", "registry", "cpu", "selftest", "selftest_amx")),
)


def build(factory: pytest.TempPathFactory, folder: str, name: str, sources: tuple[str, ...], *flags: str) -> Path:
    if not shutil.which("g++"):
        pytest.skip("no g++")
    files = [Path(__file__).parent / f"{name}.cpp", *(CSRC / f"{source}.cpp" for source in sources)]

    def compile(out: Path) -> None:
        subprocess.run(["g++", *FLAGS, *flags, f"-I{CSRC}", *map(str, files), "-o", str(out / name)], check=True)

    return made_once(factory, folder, compile) / name


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory, "pool-checked", "pool_test", POOL, "-fsanitize=thread")


@pytest.mark.parametrize("waiting", ["spin", "sleep"])
@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("case", ["barriers", "failures", "callers", "restart", "scratch", "pinning"])
def test_pool(program: Path, case: str, threads: int, waiting: str) -> None:
    result = subprocess.run([program, case, str(threads), waiting], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.fixture(scope="module")
def plain_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory, "pool", "pool_test", POOL)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("case", ["fork", "fork twice"])
def test_a_forked_child_starts_its_own_threads(plain_program: Path, case: str, threads: int) -> None:
    # The thread sanitizer does not allow new threads after a fork.
    result = subprocess.run([plain_program, case, str(threads), "sleep"], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.fixture(scope="module")
def shm_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory, "shm-checked", "shm_test", SHM, "-ffp-contract=off", "-fsanitize=thread")


CASES = [("collectives", ranks, threads, "spin") for ranks, threads in ((2, 1), (3, 1), (2, 2), (5, 1))]
CASES += [("lost", 3, 1, "spin"), ("graphs", 1, 1, "spin"), ("graphs", 1, 2, "spin")]
CASES += [(*case[:-1], "sleep") for case in CASES]
CASES += [("graphs", 1, 6, "sleep")]  # threads that outnumber the cores take long to spin


@pytest.mark.parametrize(("case", "ranks", "threads", "waiting"), CASES)
def test_no_race_and_the_right_values(shm_program: Path, case: str, ranks: int, threads: int, waiting: str) -> None:
    result = subprocess.run([shm_program, case, str(ranks), str(threads), waiting], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
