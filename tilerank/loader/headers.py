"""The safetensors files that a model directory lists, and what headers say of tensors. No torch."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import CheckpointError, show
from .files import is_listed, model_file, read_json_object
from .gguf.file import open_gguf
from .gguf.names import named_tensors

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_HEADER = 100_000_000  # the safetensors library's own limit
_OTHERS = {
    "consolidated*.safetensors": "which has Mistral's own layout; the repository has model-*.safetensors as well",
    "*.gguf": "which is a model of its own; give its path instead of the directory's",
    **dict.fromkeys(("*.bin", "*.pt", "*.pth"), "a format that is not read"),
}
"""What an error says of files that have weights in other forms, by their names."""


def listed_tensors(model_dir: Path) -> dict[str, set[str] | None]:
    """Return the tensors that the index lists for each file name; None for the only file, if there is no index."""
    if is_listed(model_dir, SINGLE):
        return {SINGLE: None}
    if not is_listed(model_dir, INDEX):
        others = ((path, note) for pattern, note in _OTHERS.items() for path in sorted(model_dir.glob(pattern)))
        found = next((f"found {path.name}, {note}" for path, note in others), "found neither")
        raise CheckpointError(f"{model_dir}: expected {SINGLE} or {INDEX}, {found}")
    where = model_dir / INDEX
    weight_map = read_json_object(model_dir, INDEX, CheckpointError).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            f"{where}: weight_map: expected an object of tensor and file names, found {show(weight_map)}"
        )
    listed: dict[str, set[str] | None] = {}
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not name.endswith(".safetensors"):
            raise CheckpointError(
                f"{where}: weight_map: {show(tensor)}: expected a .safetensors file, found {show(name)}"
            )
        names = listed.setdefault(name, set())
        assert names is not None
        names.add(tensor)
    return listed


@dataclass(frozen=True)
class StoredTensor:
    """What a header says of a tensor: its dtype (BF16, I8), its shape, and the bytes of its file that hold it."""

    dtype: str
    shape: tuple[int, ...]
    file: Path
    begin: int
    end: int


def stored_tensors(model_dir: Path) -> dict[str, StoredTensor] | None:
    """Return what the headers say of every tensor, by name, in a GGUF file by its name on the hub; None without a whole
    checkpoint.

    A directory may hold config.json alone, for a plan. Files that are missing or damaged are no concern here, because
    `Checkpoint` refuses them before anything is loaded.
    """
    if model_dir.is_file():
        return {
            name: StoredTensor(one.stored.type.name, one.shape, one.stored.file, one.begin, one.begin + one.nbytes)
            for name, one in named_tensors(open_gguf(model_dir)).items()
        }
    tensors: dict[str, StoredTensor] = {}
    try:
        for name in listed_tensors(model_dir):
            tensors |= _tensors(model_file(model_dir, name, CheckpointError))
    except (CheckpointError, OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
    return tensors


def stored_prefix(model_dir: Path, *prefixes: str) -> str:
    """Return the first of `prefixes` that begins names of the checkpoint's tensors, before a dot; the first of all if
    none does."""
    names = stored_tensors(model_dir) or ()
    return next((one for one in prefixes if any(name.startswith(f"{one}.") for name in names)), prefixes[0])


def _tensors(path: Path) -> dict[str, StoredTensor]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > MAX_HEADER:
            raise CheckpointError(f"{path}: expected a header of at most {MAX_HEADER} bytes, found {length}")
        entries = json.loads(file.read(length))
    return {name: _tensor(path, 8 + length, entry) for name, entry in entries.items() if name != "__metadata__"}


def _tensor(path: Path, data: int, entry: dict[str, Any]) -> StoredTensor:
    begin, end = entry["data_offsets"]
    shape = tuple(int(size) for size in entry["shape"])
    return StoredTensor(str(entry["dtype"]), shape, path, data + int(begin), data + int(end))
