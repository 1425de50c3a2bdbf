"""Reads parts of the tensors of GGUF files, as views of the mapped files."""

from __future__ import annotations

import mmap
from pathlib import Path

import torch
from torch import Tensor

from ..errors import CheckpointError
from .names import NamedTensor

_FLOAT_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def map_bytes(path: Path) -> mmap.mmap:
    """Map a file for reading. The mapping is copy-on-write, because torch needs writable memory."""
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as failure:
        raise CheckpointError(f"{path}: cannot be mapped: {failure}") from failure


def read_part(tensor: NamedTensor, mapped: mmap.mmap, index: tuple[slice, ...]) -> Tensor:
    """Return the rectangle `index` of a tensor, floats or blocks, as `Checkpoint.read` does."""
    type = tensor.stored.type
    dtype = _FLOAT_DTYPES.get(type.name, torch.uint8)
    # The view's storage holds only this tensor, so that the caller may drop its pages.
    count = tensor.nbytes // dtype.itemsize
    data = torch.frombuffer(mapped, dtype=dtype, count=count, offset=tensor.begin)
    if type.is_float:
        return data.view(tensor.shape)[index]
    *before, columns = tensor.shape
    blocks = data.view(*before, columns // type.block, type.nbytes)
    *rows, values = index
    if values.start % type.block or values.stop % type.block:
        where, found = f"{tensor.stored.file}: tensor {tensor.stored.name}", f"{values.start} to {values.stop}"
        raise CheckpointError(f"{where}: expected columns of whole blocks of {type.block}, found {found}")
    return blocks[(*rows, slice(values.start // type.block, values.stop // type.block))]
