"""The file by which a model in GGUF takes pictures: the one of --mmproj, or one that lies beside the model."""

import argparse
from collections.abc import Iterable
from pathlib import Path, PurePath

from tilerank.loader.gguf.architectures import architecture_of, mismatch, missing_tokens
from tilerank.loader.gguf.file import open_gguf, open_mmproj, use_mmproj

from ..errors import LaunchError
from .gguf_names import is_mmproj

_EXACT = ("bf16", "f16", "f32")
"""Ends of the names of files without quantised weights. Towers compute in bf16, so that this type comes first."""


def find_mmproj(args: argparse.Namespace) -> None:
    """Add an mmproj file to the model that `find_model` has found, if it is a GGUF file: that of --mmproj, or the one
    beside the model that fits it. LaunchError for --mmproj with another model, and for several that fit alike."""
    given = getattr(args, "mmproj", None)
    for name in ("model", "model_path"):
        model: Path | None = getattr(args, name, None)
        if model is not None and model.is_file():
            use_mmproj(model, given)
            if given is None:
                use_mmproj(model, _beside(model))
        elif model is not None and given is not None:
            raise LaunchError(f"--mmproj is for a model in GGUF; {model} is a directory")


def takes_pictures(model: Path) -> bool:
    """Return whether a GGUF file takes pictures, once it has an mmproj file: its vocabulary has tokens for them."""
    gguf = open_gguf(model)
    tower = architecture_of(gguf).tower
    return tower is not None and not missing_tokens(gguf, tower)


def mmproj_of(model: str, files: Iterable[str], where: str) -> str | None:
    """Return the mmproj file that is nearest to a model: in its folder, or else in the next one above it that has any.

    If there are several, it is the one whose type comes first in _EXACT. None if there is no such file. LaunchError,
    which begins with `where`, for two of the same type.
    """
    found = [file for file in sorted(files) if is_mmproj(file)]
    folders = (folder for folder in PurePath(model).parents if any(PurePath(file).parent == folder for file in found))
    if (nearest := next(folders, None)) is None:
        return None
    best, *others = sorted((file for file in found if PurePath(file).parent == nearest), key=_exactness)
    if others and _exactness(others[0]) == _exactness(best):
        raise LaunchError(f"{where} has several mmproj files: {best}, {others[0]}; --mmproj names one")
    return best


def _beside(model: Path) -> Path | None:
    """Return the mmproj file of a model in its folder, or above it in a snapshot of a repository of the hub."""
    folders = list(model.parents)
    depth = next((i for i, folder in enumerate(folders) if folder.parent.name == "snapshots"), 0)
    files = [path for folder in folders[: depth + 1] for path in folder.glob("*.gguf") if is_mmproj(path.name)]
    if not files or not takes_pictures(model):
        return None
    fitting = [str(path) for path in files if mismatch(open_gguf(model), open_mmproj(path)) is None]
    found = mmproj_of(str(model), fitting, str(model.parent))
    return None if found is None else Path(found)


def _exactness(file: str) -> int:
    """Return the place of a file's type in _EXACT."""
    name = PurePath(file).stem.lower()
    return next((i for i, end in enumerate(_EXACT) if name.endswith(end)), len(_EXACT))
