"""Which of the GGUF files of a folder or a repository are a model, and of which quantisation, by their names."""

import re
from collections.abc import Iterable
from pathlib import PurePath

from ..errors import LaunchError

_NO_MODELS = ("mtp-", "imatrix")
"""Beginnings of the names of files that are no models by themselves."""
_MMPROJ = "mmproj"
"""Is somewhere in the names of files by which models take pictures."""
_END = re.compile(r"(-\d{5}-of-\d{5})?\.gguf$")
_QUANTISATION = re.compile(r"[-.]((?:UD-)?\w+)$", re.ASCII)


def models_among(files: Iterable[str]) -> dict[str, list[str]]:
    """Return the files of each model, in order, by their path without the number of a part and without `.gguf`."""
    found: dict[str, list[str]] = {}
    for file in sorted(files):
        if file.endswith(".gguf") and not is_mmproj(file) and not PurePath(file).name.startswith(_NO_MODELS):
            found.setdefault(_END.sub("", file), []).append(file)
    return found


def files_of(quantisation: str, models: dict[str, list[str]], where: str, instead: str = "") -> list[str]:
    """Return the files of the model whose name ends with a quantisation such as Q4_K_M, in upper or lower case.

    where, instead: begin and end the LaunchError that is raised unless there is one such model.
    """
    ends = tuple(f"{before}{quantisation.lower()}" for before in "-.")
    found = [files for name, files in models.items() if name.lower().endswith(ends)]
    if len(found) > 1:
        names = ", ".join(files[0] for files in found[:5])
        raise LaunchError(f"{where}: expected GGUF files of one model for {quantisation}, found {names}")
    if not found:
        others = ", ".join(quantisations(models)) or "none"
        raise LaunchError(f"{where}: expected GGUF files of {quantisation}, found those of {others}{instead}")
    return found[0]


def quantisations(models: Iterable[str]) -> list[str]:
    """Return what the names of models end with."""
    return list(dict.fromkeys(match[1] if (match := _QUANTISATION.search(name)) else name for name in models))


def is_mmproj(file: str) -> bool:
    return file.endswith(".gguf") and _MMPROJ in PurePath(file).name.lower()
