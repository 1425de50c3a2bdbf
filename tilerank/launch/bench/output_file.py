"""The files that benchmarks write at their end: `--json FILE`, `--chart FILE.svg`."""

import os
from pathlib import Path

from ..errors import LaunchError


def is_writable(path: Path) -> bool:
    """Return whether `path` can be written. Checked before a benchmark runs, so that no results are lost."""
    return not path.is_dir() and os.access(path if path.exists() else path.absolute().parent, os.W_OK)


def write_file(flag: str, path: Path, text: str) -> None:
    """Write `text` to `path`. LaunchError that names `flag` if the file cannot be written."""
    try:
        path.write_text(text)
    except OSError as e:
        raise LaunchError(f"{flag}: {path} cannot be written: {e.strerror}") from e
