"""Real models of the registry as files and directories, and what transformers computes with them."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from registry_models import NotAvailable

from tests.real_weights import oracle
from tilerank.launch.bench.scoring.text import DEFAULT_TEXT
from tilerank.loader.tokenizer import Tokenizer

WINDOW, WINDOWS = 1024, 4


@dataclass(frozen=True)
class Model:
    """A GGUF file and a directory with its values in fp32."""

    file: Path
    directory: Path


def windows_of(model: Path) -> list[list[int]]:
    """Return the first windows of the text of `bench quality`, in the tokens of a model."""
    ids = Tokenizer(model).encode(DEFAULT_TEXT.read_text())[: WINDOW * WINDOWS]
    return [ids[first : first + WINDOW] for first in range(0, len(ids), WINDOW)]


def wanted(
    directory: Path,
    out: Path,
    *,
    prompts: Sequence[str] = (),
    windows: Sequence[list[int]] = (),
    new_tokens: int = 0,
    python: str | Path = sys.executable,
) -> Path:
    """Return a file with what transformers computes in the environment of `python` (oracle.py)."""
    job = {"model": str(directory), "prompts": prompts, "windows": windows, "new_tokens": new_tokens, "out": str(out)}
    path = out.with_suffix(".json")
    path.write_text(json.dumps(job))
    subprocess.run([python, oracle.__file__, "answer", str(path)], check=True)
    return out


def install(*arguments: str | Path, python: str | Path = sys.executable) -> None:
    """Install packages with the pip of an environment. Raises NotAvailable."""
    pip = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", *arguments]
    done = subprocess.run(pip, capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["pip failed"])[-1]
        raise NotAvailable(f"pip cannot install {arguments[-1]}: {reason}")


def directory_of(file: Path, out: Path) -> Path:
    """Return the directory of the values of a GGUF file. Raises NotAvailable."""
    if (directory := out / "model-fp32").is_dir():
        return directory
    packages = out / "packages"
    install("--no-deps", "--target", packages, "accelerate", "gguf")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(packages), os.environ.get("PYTHONPATH", "")])}
    convert = [sys.executable, oracle.__file__, "convert", str(file), str(directory)]
    subprocess.run(convert, check=True, env=environment)
    return directory
