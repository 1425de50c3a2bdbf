"""Coding agents edit a file with a scripted model: `pytest -m long tests/clients/test_agents.py`. Needs npm.

The model reads and edits in calls of each agent's own tools, or as Aider asks it to write; the protocol is tested.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.clients.live import live_server
from tests.runtime.server.scripted import make_model

PACKAGES = ["@anthropic-ai/claude-code@2", "@openai/codex@0", "@continuedev/cli@1"]
CONTEXT = 1 << 17
"""Tokens. Claude Code's first prompt has 48,000 of the scripted model's vocabulary."""
TASK, DONE = "Change morning to evening in greeting.txt.", "The greeting is an evening one."
RESULT = "<|im_start|>tool\n"
"""What begins each result of a call in the prompt."""
PATCH = """apply_patch <<'EOF'
*** Begin Patch
*** Update File: greeting.txt
@@
-Good morning
+Good evening
*** End Patch
EOF"""
PROVIDER = """
model = "it"
model_provider = "tilerank"

[model_providers.tilerank]
name = "tilerank"
base_url = "{url}/v1"
env_key = "TILERANK_API_KEY"
"""

CONTINUE = """
name: local
version: 0.0.1
schema: v1
models:
  - name: it
    provider: openai
    model: it
    apiBase: {url}/v1
    apiKey: any
    capabilities: [tool_use]
"""
SEARCH_REPLACE = """greeting.txt
```
<<<<<<< SEARCH
Good morning
=======
Good evening
>>>>>>> REPLACE
```
"""


@pytest.fixture(scope="module")
def agents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of the commands of the agents that npm has."""
    if shutil.which("npm") is None:
        pytest.skip("npm is missing")
    folder = tmp_path_factory.mktemp("agents")
    (folder / "package.json").write_text("{}")
    subprocess.run(["npm", "install", "--no-audit", "--no-fund", *PACKAGES], cwd=folder, check=True, timeout=300)
    # Its own script of the installation, which npm runs only where packages may have some.
    install = folder / "node_modules" / "@anthropic-ai" / "claude-code" / "install.cjs"
    subprocess.run(["node", install], cwd=install.parent, check=True, timeout=120)
    return folder / "node_modules" / ".bin"


def calls(*steps: tuple[str, dict[str, Any]]) -> Callable[[str], str]:
    """Return a model that makes these calls, each after the result of the one before, and then says DONE."""

    def answer(prompt: str) -> str:
        done = prompt.count(RESULT)
        if done == len(steps):
            return DONE
        name, arguments = steps[done]
        return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"

    return answer


def edit(command: Sequence[str | Path], folder: Path, **environment: str) -> str:
    """Run an agent in a folder, and return what it prints."""
    kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    ran = subprocess.run(
        command,
        cwd=folder,
        env=kept | {"HOME": str(folder.parent)} | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the folder with the file that is edited."""
    folder = tmp_path / "home" / "work"
    folder.mkdir(parents=True)
    (folder / "greeting.txt").write_text("Good morning\n")
    return folder


@pytest.mark.long
def test_claude_code_edits_a_file(agents: Path, folder: Path, tmp_path: Path) -> None:
    file = str(folder / "greeting.txt")
    with live_server(make_model(tmp_path / "model"), context_length=CONTEXT) as (url, server):
        server.answer = calls(
            ("Read", {"file_path": file}),
            ("Edit", {"file_path": file, "old_string": "morning", "new_string": "evening"}),
        )
        said = edit(
            [agents / "claude", "-p", TASK, "--permission-mode", "acceptEdits"],
            folder,
            ANTHROPIC_BASE_URL=url,
            ANTHROPIC_AUTH_TOKEN="any",
            ANTHROPIC_MODEL="it",
            ANTHROPIC_DEFAULT_HAIKU_MODEL="it",
            CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
        )
        assert server.app.state.metrics.errors == 0  # type: ignore[attr-defined]
    assert (folder / "greeting.txt").read_text() == "Good evening\n"
    assert said.strip() == DONE


@pytest.mark.long
def test_codex_edits_a_file(agents: Path, folder: Path, tmp_path: Path) -> None:
    with live_server(make_model(tmp_path / "model"), context_length=CONTEXT) as (url, server):
        server.answer = calls(("exec_command", {"cmd": "cat greeting.txt"}), ("exec_command", {"cmd": PATCH}))
        (folder.parent / "config.toml").write_text(PROVIDER.format(url=url))
        said = edit(
            [agents / "codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", TASK],
            folder,
            CODEX_HOME=str(folder.parent),
            TILERANK_API_KEY="any",
        )
        assert server.app.state.metrics.errors == 0  # type: ignore[attr-defined]
    assert (folder / "greeting.txt").read_text() == "Good evening\n"
    assert said.strip() == DONE


@pytest.mark.long
def test_continue_edits_a_file(agents: Path, folder: Path, tmp_path: Path) -> None:
    file = str(folder / "greeting.txt")
    with live_server(make_model(tmp_path / "model"), context_length=CONTEXT) as (url, server):
        server.answer = calls(
            ("Read", {"filepath": file}),
            ("Edit", {"file_path": file, "old_string": "morning", "new_string": "evening"}),
        )
        (folder.parent / "config.yaml").write_text(CONTINUE.format(url=url))
        said = edit(
            [agents / "cn", "-p", TASK, "--auto", "--config", folder.parent / "config.yaml"],
            folder,
            CONTINUE_TELEMETRY_ENABLED="0",
        )
        assert server.app.state.metrics.errors == 0  # type: ignore[attr-defined]
    assert (folder / "greeting.txt").read_text() == "Good evening\n"
    assert said.strip() == DONE


@pytest.mark.long
def test_aider_edits_a_file(folder: Path, tmp_path: Path) -> None:
    """In an environment of its own, since it pins all of its libraries."""
    if sys.version_info >= (3, 13):
        pytest.skip("aider runs on Python up to 3.12")
    programs = tmp_path / "aider" / "bin"
    subprocess.run([sys.executable, "-m", "venv", programs.parent], check=True)
    subprocess.run([programs / "pip", "install", "--quiet", "aider-chat==0.86.*"], check=True, timeout=900)
    with live_server(make_model(tmp_path / "model"), context_length=CONTEXT) as (url, server):
        server.answer = SEARCH_REPLACE
        options = ("--no-git", "--yes-always", "--no-check-update", "--no-show-model-warnings", "--edit-format", "diff")
        edit(
            [programs / "aider", "--model", "openai/it", *options, "--message", TASK, "greeting.txt"],
            folder,
            OPENAI_API_BASE=f"{url}/v1",
            OPENAI_API_KEY="any",
        )
        assert server.app.state.metrics.errors == 0  # type: ignore[attr-defined]
    assert (folder / "greeting.txt").read_text() == "Good evening\n"
