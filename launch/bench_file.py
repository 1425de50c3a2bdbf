"""Files that benchmarks write when they are done: `--json FILE`, `--chart FILE.svg`."""

import os
from pathlib import Path

from .errors import LaunchError


def is_writable(path: Path) -> bool:
    """To be asked before anything is measured, so that hours of figures are not lost."""
    return not path.is_dir() and os.access(path if path.exists() else path.absolute().parent, os.W_OK)


def write_file(flag: str, path: Path, text: str) -> None:
    """LaunchError naming the flag if the file cannot be written."""
    try:
        path.write_text(text)
    except OSError as e:
        raise LaunchError(f"{flag}: {path} cannot be written: {e.strerror}") from e
