"""What transformers says, for the tests of speech."""

from pathlib import Path

import pytest
from made_once import made_once
from references import run_reference

from tests.runtime.omni.speech_cases import CASES, DIMS, FRAMES, NEW_TOKENS, SAMPLINGS


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of a checkpoint and of what transformers says with it (reference_speech.py)."""
    model = {"by": "reference_speech", "family": "qwen3_omni_moe", "seed": 5, **DIMS, "cases": CASES}
    model |= {"frames": FRAMES, "samplings": SAMPLINGS}
    return made_once(tmp_path_factory, "speech", lambda out: run_reference(out, {"omni": model}, NEW_TOKENS))
