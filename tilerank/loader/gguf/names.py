"""Names the tensors of a GGUF file as on the hub. No torch."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

from ..errors import CheckpointError, show
from .architecture import Architecture, Change, Keys, Order, Tower
from .architectures import architecture_of, tower_of
from .file import GGUFFile, GGUFTensor

_LAYER = re.compile(r"blk\.(\d{1,9})\.(.+)")
_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_HEADS = {
    "self_attn.q_proj": "num_attention_heads",
    "self_attn.k_proj": "num_key_value_heads",
    "self_attn.v_proj": "num_key_value_heads",
}
"""The field that counts the heads of a projection."""
_READ_BY_CONFIG = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


@dataclass(frozen=True)
class NamedTensor:
    """A tensor of the hub: all of a stored tensor, or some of its rows, from its element `first` on.

    shape: on the hub. order: of the rows or columns in the file, None if as on the hub. change: how the file changes
    the values, None if it does not.
    """

    stored: GGUFTensor
    shape: tuple[int, ...]
    first: int = 0
    order: Order | None = None
    change: Change | None = None

    @property
    def begin(self) -> int:
        """Return where the rows begin in their file."""
        return self.stored.description.begin + self._nbytes(self.first)

    @property
    def nbytes(self) -> int:
        return self._nbytes(prod(self.shape))

    def order_of(self, *, columns: bool) -> Order | None:
        """Return the order of the rows or of the columns; None if as on the hub."""
        return self.order if self.order is not None and self.order.of_columns == columns else None

    def _nbytes(self, elements: int) -> int:
        return elements // self.stored.type.block * self.stored.type.nbytes


@lru_cache(maxsize=2)
def named_tensors(gguf: GGUFFile) -> Mapping[str, NamedTensor]:
    """Return all tensors by their names on the hub, in storage order. Unknown tensors keep the names of the file.

    Draft layers (multi-token prediction), which follow the last layer, are left out.
    """
    architecture = architecture_of(gguf)
    config = architecture.config(gguf)
    layers, blocks = config["num_hidden_layers"], Keys(gguf).integer("block_count")
    found: dict[str, NamedTensor] = {}
    for name, tensor in gguf.tensors.items():
        if name in _READ_BY_CONFIG:
            continue
        layer = _LAYER.fullmatch(name)
        if layer is None:
            named = architecture.top.get(name) or _TOP.get(name, name)
            found[named] = NamedTensor(tensor, tensor.shape, change=architecture.changes.get(name.rpartition(".")[0]))
        elif not layers <= int(layer[1]) < blocks:
            found |= dict(_of_layer(architecture, config, layer[1], layer[2], tensor))
    if (pictures := tower_of(gguf)) is not None:
        tower, mmproj = pictures
        found = {_in_whole(name, tower): tensor for name, tensor in found.items()} | _of_tower(tower, mmproj)
    return found


def _in_whole(name: str, tower: Tower) -> str:
    """Return the name of a text model's tensor in the model that takes pictures."""
    begin = next((begin for begin in tower.text if name.startswith(begin)), None)
    return name if begin is None else tower.text[begin] + name.removeprefix(begin)


def _of_tower(tower: Tower, mmproj: GGUFFile) -> dict[str, NamedTensor]:
    names, orders = tower.names(mmproj), tower.orders(mmproj)
    found = {}
    for name, stored in mmproj.tensors.items():
        if name not in tower.copies:
            change = tower.changes.get(name.rpartition(".")[0])
            found[names.get(name, name)] = NamedTensor(stored, stored.shape, order=orders.get(name), change=change)
    return found


def _of_layer(
    architecture: Architecture, config: Mapping[str, Any], layer: str, rest: str, tensor: GGUFTensor
) -> Iterator[tuple[str, NamedTensor]]:
    """Yield the tensors of the hub that a tensor of a layer holds. rest: what follows `blk.N.` in its name."""
    module, _, end = rest.rpartition(".")
    names, suffix = architecture.names.get(rest), ""
    if names is None and end in ("weight", "bias"):
        names, suffix = architecture.names.get(module), f".{end}"
    if names is None:
        yield tensor.name, NamedTensor(tensor, tensor.shape)
        return
    parts = (names,) if isinstance(names, str) else names
    change, orders = architecture.changes.get(rest) or architecture.changes.get(module), architecture.orders(config)
    shape = _shape(tensor, architecture.axes.get(module))
    in_experts = "{}" in parts[0]
    experts, *shape_of_one = shape if in_experts else (1, *shape)
    heights = [shape_of_one[0]] if len(parts) == 1 else _heights(tensor, parts, shape_of_one[0], config)
    for expert in range(experts):
        first = expert * prod(shape_of_one)
        for part, height in zip(parts, heights, strict=True):
            name = f"model.layers.{layer}.{part.format(expert)}{suffix}"
            found = (height, *shape_of_one[1:])
            yield name, NamedTensor(tensor, found, first, orders.get(part), change)
            first += prod(found)


def _heights(tensor: GGUFTensor, parts: Sequence[str], rows: int, config: Mapping[str, Any]) -> list[int]:
    """Return the number of rows of each of several modules: that of its heads, or the same for all.

    Raises CheckpointError unless the tensor has as many rows.
    """
    heads = [config[_HEADS[part]] * config["head_dim"] for part in parts if part in _HEADS]
    heights = heads or [rows // len(parts)] * len(parts)
    if sum(heights) != rows:
        where, modules = f"{tensor.file}: tensor {show(tensor.name)[1:-1]}", ", ".join(parts)
        raise CheckpointError(f"{where}: expected {sum(heights)} rows for {modules}, found {rows}")
    return heights


def _shape(tensor: GGUFTensor, axis: int | None) -> tuple[int, ...]:
    """Return the shape on the hub, with a dimension of one element at `axis` if the file omits it."""
    shape = tensor.shape
    return shape if axis is None or len(shape) != axis + 1 else (*shape[:axis], 1, *shape[axis:])
