"""Finds pointers of Git LFS, which a clone without its extension leaves in place of large files."""

from pathlib import Path

_BEGIN = b"version https://git-lfs.github.com/spec/"
_MOST = 1024
"""Bytes of a pointer, by the specification of Git LFS."""


def refuse_pointer(path: Path, error: type[ValueError]) -> None:
    """Raise `error` if a file is a pointer. Raises OSError if it cannot be read."""
    if path.stat().st_size > _MOST:
        return
    with path.open("rb") as file:
        if file.read(len(_BEGIN)) == _BEGIN:
            raise error(f"{path}: expected the file, found a pointer to it; `git lfs pull` in its directory gets it")
