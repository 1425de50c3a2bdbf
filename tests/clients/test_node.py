"""Clients in JavaScript, with scripted answers: `pytest -m long tests/clients/test_node.py`. Needs npm."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.clients.live import live_server
from tests.runtime.server.scripted import make_model

SCRIPT = Path(__file__).parent / "node.mjs"
PACKAGES = ["@ai-sdk/openai@4", "@anthropic-ai/sdk@1", "ai@7", "openai@7", "zod@4"]
CHECKS = 7


@pytest.mark.long
def test_clients_in_javascript(tmp_path: Path) -> None:
    if shutil.which("npm") is None:
        pytest.skip("npm is missing")
    folder = tmp_path / "node"
    folder.mkdir()
    shutil.copy(SCRIPT, folder)
    (folder / "package.json").write_text("{}")
    subprocess.run(["npm", "install", "--no-audit", "--no-fund", *PACKAGES], cwd=folder, check=True, timeout=300)
    with live_server(make_model(tmp_path / "model")) as (url, _):
        ran = subprocess.run(["node", SCRIPT.name, url], cwd=folder, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.count("ok: ") == CHECKS
