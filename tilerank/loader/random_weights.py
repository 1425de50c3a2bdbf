"""Checkpoints of random weights in the public layout, for measurements that do not depend on the values."""

import json
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from .checkpoint import INDEX

SHARD_BYTES = 1 << 30
STD = 0.02  # the initialisation of most models; activations neither vanish nor overflow
EMBEDDING_STD = 1.0  # larger than what attention adds, so that tokens stay distinct and choose different experts

_DTYPE = torch.bfloat16

Shape = tuple[int, ...]


def write_random_weights(
    model_dir: Path, shapes: Mapping[str, Shape], seed: int = 0, shard_bytes: int = SHARD_BYTES
) -> int:
    """Write bfloat16 tensors of `shapes` (by name) and their index into `model_dir`; return the bytes of the tensors.

    Norm weights are ones, biases zeros, the embedding is normal with deviation EMBEDDING_STD, everything else with STD.
    A file has at most `shard_bytes` or a single tensor, and one file at a time is in memory.
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
