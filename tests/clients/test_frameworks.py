"""Frameworks through which people reach models: `pytest -m long tests/clients/test_frameworks.py`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clients.live import live_server
from tests.runtime.server.scripted import make_model

SCRIPT = Path(__file__).parent / "frameworks.py"
PACKAGES = ["langchain>=1,<2", "langchain-anthropic>=1,<2", "langchain-openai>=1,<2", "litellm>=1,<2", "llm>=0.36,<1"]
CHECKS = 9


@pytest.mark.long
def test_frameworks(tmp_path: Path) -> None:
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True, timeout=120)
    subprocess.run([python, "-m", "pip", "install", "--quiet", *PACKAGES], check=True, timeout=400)
    environment = os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # which it would download
    environment.pop("PYTHONPATH", None)
    with live_server(make_model(tmp_path / "model")) as (url, _):
        command = [str(python), str(SCRIPT), url]
        ran = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.count("ok: ") == CHECKS
