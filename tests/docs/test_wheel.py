"""A wheel runs where there is neither a compiler nor this repository."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from command import DEMO

ROOT = Path(__file__).parents[2]


@pytest.mark.long
def test_a_wheel_generates_in_a_bare_environment(tmp_path: Path) -> None:
    subprocess.run(["make", "wheel", f"VENV={sys.prefix}"], cwd=ROOT, check=True)
    (wheel,) = (ROOT / "dist").glob("tilerank-*-manylinux*.whl")
    subprocess.run([sys.executable, "-m", "venv", tmp_path], check=True)
    subprocess.run([tmp_path / "bin" / "pip", "install", "--quiet", wheel], check=True)
    result = subprocess.run(
        [tmp_path / "bin" / "tilerank", "generate", DEMO, "--tp", "3", "--prompt", "In the beginning God"],
        cwd=tmp_path,
        env={"PATH": os.defpath},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ", the end is not God." in result.stdout
