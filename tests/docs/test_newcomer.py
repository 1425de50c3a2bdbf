"""The three commands of README.md, from a clone to a chat with a model of the hub: `pytest -m long tests/docs`."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hub import Hub

ROOT = Path(__file__).parents[2]
DEMO_VL = ROOT / "assets" / "demo-vl"


@pytest.mark.long
def test_from_a_clone_to_a_chat(tmp_path: Path) -> None:
    """With a stand-in of the hub, which has a model of the name in README.md, and nothing but the system's commands."""
    commands = re.search(r"^## Three commands\n+```\n(.*?)```", (ROOT / "README.md").read_text(), re.M | re.S)
    assert commands is not None
    clone, make, chat = commands[1].splitlines()
    model = chat.split()[-1]
    hub = Hub({model: DEMO_VL})
    environment = {name: value for name, value in os.environ.items() if name.startswith("PIP_")} | {
        "PATH": os.defpath,
        "HOME": str(tmp_path),
        "HF_ENDPOINT": hub.url,
        "PYTHON": sys.executable,
    }
    steps = [clone.replace("...", str(ROOT)), make, f"{chat} --temperature 0 --max-new-tokens 24"]
    conversation = f"/image {ROOT / 'assets' / 'red-triangle.png'}\nWhat is in the picture?\n"
    try:
        done = subprocess.run(
            ["sh", "-ec", "\n".join(steps)],
            cwd=tmp_path,
            env=environment,
            input=conversation,
            capture_output=True,
            text=True,
            timeout=3000,
        )
    finally:
        hub.close()
    assert done.returncode == 0, done.stdout + done.stderr
    assert ", the end is not God." in done.stdout
    assert done.stdout.splitlines()[-1] == "a red triangle at the bottom left"
    assert f"{model}: downloading" in done.stderr
