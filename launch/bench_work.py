"""What a model must read and compute at least for some tokens: the numerators of every share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .errors import LaunchError

if TYPE_CHECKING:
    import torch

    from tilerank.loader.config import ModelConfig
    from tilerank.loader.quantization import Quantization
    from tilerank.parallel.layer import Layer


@dataclass(frozen=True)
class Work:
    """Bytes to read from memory and operations (a product and a sum are two), by what multiplies: AMX tiles of bf16 or
    int8, or fp32 lanes, for which there is no peak to compare with."""

    nbytes: float
    bf16: float = 0.0
    int8: float = 0.0
    fp32: float = 0.0

    @property
    def flops(self) -> float:
        return self.bf16 + self.int8 + self.fp32


@dataclass(frozen=True)
class ModelWork:
    """A model as arithmetic, whole, without padding for ranks.

    weight_bytes: what a step reads of the weights whatever it computes: all but the embedding table, of which it reads
    a row a token (the output head counts, also if it is the same tensor). matrix_elements: of the projections that
    every token passes. head_elements: of the output head, which only the last token of a prompt passes.
    kv_bytes: keys and values of a token in all layers. pair_flops: of attention, for a query and a key in all layers.
    """

    weight_bytes: int
    matrix_elements: int
    head_elements: int
    kv_bytes: int
    pair_flops: int

    def prefill(self, batch: int, tokens: int) -> Work:
        """`batch` prompts of `tokens` tokens up to the logits of their last ones; the weights are read once."""
        pairs = tokens * (tokens + 1) // 2
        flops = batch * (2 * tokens * self.matrix_elements + 2 * self.head_elements + pairs * self.pair_flops)
        return Work(self.weight_bytes + batch * tokens * self.kv_bytes, bf16=flops)

    def decode(self, batch: int, context: float) -> Work:
        """One step of `batch` sequences that hold `context` tokens each, the one that is being computed included."""
        flops = batch * (2 * (self.matrix_elements + self.head_elements) + context * self.pair_flops)
        return Work(self.weight_bytes + batch * context * self.kv_bytes, bf16=flops)


def model_work(config: ModelConfig, dtype: torch.dtype, quantization: Quantization | None = None) -> ModelWork:
    """Counts the layers of our own model, unsharded; nothing is allocated.

    LaunchError for a layer that holds weights in a way that this does not know.
    """
    from tilerank.loader.formats import weight_formats
    from tilerank.parallel.layer import PackedParameter, Parameter, PlainParameter, Sharding
    from tilerank.parallel.layers import ParallelLMHead, QKVParallelLinear, VocabParallelEmbedding
    from tilerank.runtime.cache import PagedKV
    from tilerank.runtime.registry import model_class

    formats = weight_formats(config, dtype, quantization)
    model = model_class(config.model_type)(config, Sharding(0, 1, dtype, None, formats=formats))
    weight_bytes = matrices = heads = pair_flops = 0

    def visit(layer: Layer, in_head: bool) -> None:
        nonlocal weight_bytes, matrices, heads, pair_flops
        if isinstance(layer, VocabParallelEmbedding):
            return
        if isinstance(layer, QKVParallelLinear):
            pair_flops += 4 * layer.q_heads * layer.head_dim
        if isinstance(layer, PackedParameter | PlainParameter):
            weight_bytes += layer.nbytes()
            elements = sum(piece.elements for piece in layer.pieces())
            if isinstance(layer, PackedParameter):
                heads += elements if in_head else 0
                matrices += 0 if in_head else elements
        elif isinstance(layer, Parameter):
            raise LaunchError(
                f"the model has a {type(layer).__name__}, of which this does not know how much a token needs"
            )
        for child in layer.children():
            visit(child, in_head or isinstance(layer, ParallelLMHead))

    visit(model, False)
    specs = model.cache_specs()
    if not all(isinstance(spec, PagedKV) for spec in specs):
        raise LaunchError("the model has a cache of which this does not know how much a token needs")
    kv_bytes = sum(
        2 * spec.kv_heads * spec.head_dim * spec.dtype.itemsize for spec in specs if isinstance(spec, PagedKV)
    )
    return ModelWork(weight_bytes, matrices, heads, kv_bytes, pair_flops)
