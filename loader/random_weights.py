"""A checkpoint of random weights in the public layout: for measuring, where the real ones would change nothing."""

import json
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from .checkpoint import INDEX

SHARD_BYTES = 1 << 30
STD = 0.02  # what most models are initialised with: activations neither vanish nor overflow
EMBEDDING_STD = 1.0  # attention adds less than that: tokens remain unlike each other, and choose experts of their own

_DTYPE = torch.bfloat16

Shape = tuple[int, ...]


def write_random_weights(
    model_dir: Path, shapes: Mapping[str, Shape], seed: int = 0, shard_bytes: int = SHARD_BYTES
) -> int:
    """Writes bfloat16 tensors of `shapes` (by name) and their index into `model_dir`; returns their bytes.

    Norm weights are ones, biases zeros, the rest is normal with deviation STD, the embedding with EMBEDDING_STD. Files
    have at most `shard_bytes`, or one tensor, which is also the most memory taken.
    """
    generator = torch.Generator().manual_seed(seed)
    shards = list(_shards(shapes, shard_bytes))
    files: dict[str, str] = {}
    total = 0
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors = {name: _random(name, shapes[name], generator) for name in names}
        save_file(tensors, model_dir / file, metadata={"format": "pt"})
        files |= dict.fromkeys(names, file)
        total += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": files}
    (model_dir / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return total


def _shards(shapes: Mapping[str, Shape], limit: int) -> Iterator[Sequence[str]]:
    names: list[str] = []
    size = 0
    for name, shape in shapes.items():
        nbytes = prod(shape) * _DTYPE.itemsize
        if names and size + nbytes > limit:
            yield names
            names, size = [], 0
        names.append(name)
        size += nbytes
    if names:
        yield names


def _random(name: str, shape: Shape, generator: torch.Generator) -> Tensor:
    if len(shape) == 1:
        return torch.zeros(shape, dtype=_DTYPE) if name.endswith("bias") else torch.ones(shape, dtype=_DTYPE)
    std = EMBEDDING_STD if name.endswith("embed_tokens.weight") else STD
    return torch.empty(shape, dtype=_DTYPE).normal_(0.0, std, generator=generator)
