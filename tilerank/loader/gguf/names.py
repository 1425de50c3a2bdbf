"""The tensors of a GGUF file under the names that Hugging Face gives them. No torch."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from .architectures import architecture_of
from .file import GGUFFile, GGUFTensor

_LAYER = re.compile(r"blk\.(\d+)\.(.+)\.(weight|bias)")
_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_READ_BY_CONFIG = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


@dataclass(frozen=True)
class NamedTensor:
    """A tensor by its name on the hub: the stored one, or one of its parts of the same shape, counted by `part`.

    heads: the number of heads whose rows lie as adjacent pairs of a rotation; 0: rows lie as the family has them.
    plus_one: values are stored plus one.
    """

    stored: GGUFTensor
    part: int
    shape: tuple[int, ...]
    heads: int = 0
    plus_one: bool = False

    @property
    def begin(self) -> int:
        """Return where the part begins in its file."""
        return self.stored.description.begin + self.part * self.nbytes

    @property
    def nbytes(self) -> int:
        return prod(self.shape) // self.stored.type.block * self.stored.type.nbytes


@lru_cache(maxsize=2)
def named_tensors(gguf: GGUFFile) -> Mapping[str, NamedTensor]:
    """Return all tensors by name, in storage order; those that no family has keep their names."""
    architecture = architecture_of(gguf)
    heads = dict[str, int]()
    if architecture.paired_rows:
        config = architecture.config(gguf)
        heads = {module: config[field] for module, field in architecture.paired_rows.items()}
    found: dict[str, NamedTensor] = {}
    for name, tensor in gguf.tensors.items():
        if name in _READ_BY_CONFIG:
            continue
        layer = _LAYER.fullmatch(name)
        if layer is None or layer[2] not in architecture.names:
            plus_one = architecture.norms_plus_one and name == "output_norm.weight"
            found[_TOP.get(name, name)] = NamedTensor(tensor, 0, tensor.shape, plus_one=plus_one)
            continue
        module, end = architecture.names[layer[2]], layer[3]
        if "{}" in module:
            found |= dict(_of_experts(f"model.layers.{layer[1]}.{module}.{end}", tensor))
            continue
        plus_one = architecture.norms_plus_one and layer[2].endswith("_norm")
        of_head = heads.get(module, 0)
        found[f"model.layers.{layer[1]}.{module}.{end}"] = NamedTensor(tensor, 0, tensor.shape, of_head, plus_one)
    return found


def _of_experts(name: str, tensor: GGUFTensor) -> Iterator[tuple[str, NamedTensor]]:
    """Yield each expert's part of a tensor of all of them, [experts, out, in]."""
    experts, *shape = tensor.shape
    for expert in range(experts):
        yield name.format(expert), NamedTensor(tensor, expert, tuple(shape))
