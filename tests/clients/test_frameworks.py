"""Frameworks through which people reach models: `pytest -m long tests/clients/test_frameworks.py`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.clients.live import live_server
from tests.runtime.server.scripted import make_model
from tilerank.loader.pooling import Pooling

CLIENTS = Path(__file__).parent
PACKAGES = [
    *("langchain>=1,<2", "langchain-anthropic>=1,<2", "langchain-openai>=1,<2", "litellm>=1,<2", "llm>=0.36,<1"),
    "llama-index-embeddings-openai-like>=0.2,<1",
]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with the frameworks."""
    environment = tmp_path_factory.mktemp("frameworks") / "venv"
    subprocess.run([sys.executable, "-m", "venv", environment], check=True, timeout=120)
    found = environment / "bin" / "python"
    subprocess.run([found, "-m", "pip", "install", "--quiet", *PACKAGES], check=True, timeout=400)
    return found


def checks(python: Path, tmp_path: Path, script: str, *arguments: str) -> int:
    """Run a script of clients, and return how many checks it printed."""
    environment = os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # which it would download
    environment.pop("PYTHONPATH", None)
    command = [str(python), str(CLIENTS / script), *arguments]
    ran = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout.count("ok: ")


@pytest.mark.long
def test_frameworks(python: Path, tmp_path: Path) -> None:
    with live_server(make_model(tmp_path / "model")) as (url, _):
        assert checks(python, tmp_path, "frameworks.py", url) == 9


@pytest.mark.long
def test_frameworks_that_embed(python: Path, tmp_path: Path) -> None:
    def vector(ids: list[int]) -> bytes:
        return np.array([len(ids), ids[0], ids[-1], 0.1], "<f4").tobytes()

    with live_server(make_model(tmp_path / "model"), pooling=Pooling("embed", width=4)) as (url, server):
        server.values = vector
        right = {
            text: np.frombuffer(vector(server.tokenizer.encode(text)), "<f4").tolist()
            for text in (f"text {number}" for number in range(30))
        }
        assert checks(python, tmp_path, "embedders.py", url, json.dumps(right)) == 2
