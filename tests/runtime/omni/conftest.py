"""What transformers says, for the tests of speech."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runtime.omni.speech_cases import CASES, DIMS, FRAMES, NEW_TOKENS, SAMPLINGS


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of a checkpoint and of what transformers says with it (reference_speech.py)."""
    out = tmp_path_factory.mktemp("speech")
    job = out / "job.json"
    counts = {"new_tokens": NEW_TOKENS, "frames": FRAMES, "samplings": SAMPLINGS}
    job.write_text(json.dumps({"out": str(out), "seed": 5, "dims": DIMS, "cases": CASES, **counts}))
    script = Path(__file__).parents[2] / "support" / "tools" / "reference_speech.py"
    subprocess.run([sys.executable, str(script), str(job)], check=True, stdout=subprocess.DEVNULL, timeout=300)
    return out
