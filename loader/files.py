"""Reads the small files of a model directory; whatever is in them, only the caller's own error comes out."""

import json
import math
import os
from pathlib import Path
from typing import Any, NoReturn

# The largest such file in public use is a tokenizer.json of about 35 MB.
MAX_BYTES = 1 << 28


def show(value: object) -> str:
    """A value from a file as it appears in an error sentence: short, on one line, printable in any encoding."""
    text = ascii(value)
    return text if len(text) <= 80 else text[:77] + "..."


def is_listed(model_dir: Path, name: str) -> bool:
    """Whether a model directory has an entry `name`. A symbolic link to nowhere counts: half a download is no reason
    to do without a file, so it is for the reader to refuse it."""
    return os.path.lexists(model_dir / name)


def model_file(model_dir: Path, name: str, error: type[ValueError], folder: str = "") -> Path:
    """Returns the path of the file `name` of a model directory, or of a `folder` in it; raises `error` if it is missing
    or not inside.

    Inside means: one path component, and not a symbolic link out of the directory, except into the `blobs` of the
    Hugging Face cache entry that the directory is a snapshot of (X/snapshots/REVISION/NAME -> X/blobs/HASH).
    """
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise error(f"{model_dir}: expected the name of a file inside the model directory, found {show(name)}")
    path = model_dir / folder / name
    try:
        root, real = model_dir.resolve(), path.resolve(strict=True)
        regular = real.is_file()
    except FileNotFoundError:
        found = "a symbolic link to a missing file" if path.is_symlink() else "no such file"
        raise error(f"{path}: {found}") from None
    except (OSError, RuntimeError) as failure:  # RuntimeError: a loop of symbolic links
        raise error(f"{path}: cannot be read: {failure}") from failure
    blobs = root.parent.parent / "blobs" if root.parent.name == "snapshots" else None
    if not real.is_relative_to(root) and real.parent != blobs:
        raise error(f"{path}: expected a file inside the model directory, found a symbolic link to {real}")
    if not regular:
        raise error(f"{path}: expected a regular file")
    return path


def read_bytes(model_dir: Path, name: str, error: type[ValueError], folder: str = "") -> bytes:
    """Returns the content of a file (see model_file); raises `error` if that is not possible."""
    path = model_file(model_dir, name, error, folder)
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise error(f"{path}: expected at most {MAX_BYTES} bytes, found {size}")
        return path.read_bytes()
    except OSError as failure:
        raise error(f"{path}: cannot be read: {failure.strerror}") from failure


def read_text(model_dir: Path, name: str, error: type[ValueError], folder: str = "") -> str:
    """Returns the content of a UTF-8 file (see model_file); raises `error` if that is not possible."""
    try:
        return read_bytes(model_dir, name, error, folder).decode()
    except UnicodeDecodeError as failure:
        raise error(f"{model_dir / folder / name}: not UTF-8 at byte {failure.start}") from None


def read_json_object(model_dir: Path, name: str, error: type[ValueError]) -> dict[str, Any]:
    """Returns the JSON object in the file `name` of a model directory; raises `error` if it holds no such thing.

    NaN and infinities, which Python's parser lets through, are refused: no later comparison would catch a NaN.
    """
    text = read_text(model_dir, name, error)
    try:
        value = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)
    except RecursionError:
        raise error(f"{model_dir / name}: not valid JSON: nested too deeply") from None
    except ValueError as failure:
        raise error(f"{model_dir / name}: not valid JSON: {failure}") from None
    if not isinstance(value, dict):
        raise error(f"{model_dir / name}: expected a JSON object, found {show(value)}")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:20]} is beyond the range of a double")
    return value
