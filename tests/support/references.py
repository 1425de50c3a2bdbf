"""Runs tools/reference.py, which computes what is right with other implementations."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).parent / "tools" / "reference.py"


def run_reference(out: Path, models: dict[str, dict[str, Any]], new_tokens: int = 0) -> Path:
    """Write what is right for these models to `out`, in a process of its own. Returns `out`."""
    job = out / "job.json"
    job.write_text(json.dumps({"out": str(out), "models": models, "new_tokens": new_tokens}))
    subprocess.run([sys.executable, str(SCRIPT), str(job)], check=True, stdout=subprocess.DEVNULL, timeout=300)
    return out
