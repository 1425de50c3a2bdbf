"""Readers of the small files of a model; all failures are raised as the caller's own error.

A model is a directory, or a GGUF file, which stands in for some of these files (gguf/documents.py).
"""

import json
import os
from pathlib import Path
from typing import Any

from .errors import CheckpointError, ConfigError, show
from .gguf.documents import document, documents_of
from .gguf.file import open_gguf
from .lfs_pointer import refuse_pointer

# The largest such file in public use is a tokenizer.json of about 35 MB.
MAX_BYTES = 1 << 28


def is_listed(model_dir: Path, name: str) -> bool:
    """Return whether a model has an entry `name`. A dangling symbolic link counts, so that an incomplete download is
    refused when the file is read, instead of being treated as a model without that file."""
    if model_dir.is_file():
        return name in documents_of(model_dir)
    return os.path.lexists(model_dir / name)


def model_file(model_dir: Path, name: str, error: type[ValueError], folder: str = "") -> Path:
    """Return the path of the file `name` in a model directory, or in its `folder`; raise `error` if there is none.

    `name` has to be one path component, and no symbolic link out of the directory, except into the `blobs` of the
    Hugging Face cache entry whose snapshot the directory is (X/snapshots/REVISION/NAME -> X/blobs/HASH).
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
    try:
        refuse_pointer(path, error)
    except OSError as failure:
        raise error(f"{path}: cannot be read: {failure.strerror}") from failure
    return path


def read_bytes(model_dir: Path, name: str, error: type[ValueError], folder: str = "") -> bytes:
    """Return the content of a file (see model_file); raise `error` if it cannot be read or exceeds MAX_BYTES."""
    if model_dir.is_file() and name in documents_of(model_dir):
        try:
            return document(open_gguf(model_dir), name).encode()
        except (CheckpointError, ConfigError) as failure:
            raise error(str(failure)) from failure
    path = model_file(model_dir, name, error, folder)
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise error(f"{path}: expected at most {MAX_BYTES} bytes, found {size}")
        return path.read_bytes()
    except OSError as failure:
        raise error(f"{path}: cannot be read: {failure.strerror}") from failure


def read_text(model_dir: Path, name: str, error: type[ValueError], folder: str = "") -> str:
    """Return the content of a UTF-8 file (see model_file); raise `error` if it cannot be read."""
    try:
        return read_bytes(model_dir, name, error, folder).decode()
    except UnicodeDecodeError as failure:
        raise error(f"{model_dir / folder / name}: not UTF-8 at byte {failure.start}") from None


def read_json_object(model_dir: Path, name: str, error: type[ValueError], folder: str = "") -> dict[str, Any]:
    """Return the JSON object in a file (see model_file); raise `error` if it holds anything else.

    NaN and infinities are floats, because released files have them in fields that are not read; `Fields.number` refuses
    them.
    """
    text, where = read_text(model_dir, name, error, folder), model_dir / folder / name
    try:
        value = json.loads(text)
    except RecursionError:
        raise error(f"{where}: not valid JSON: nested too deeply") from None
    except ValueError as failure:
        raise error(f"{where}: not valid JSON: {failure}") from None
    if not isinstance(value, dict):
        raise error(f"{where}: expected a JSON object, found {show(value)}")
    return value
