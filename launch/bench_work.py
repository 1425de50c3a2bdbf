"""What a model must read and compute at least for some tokens: the numerators of every share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from .errors import LaunchError

if TYPE_CHECKING:
    import torch

    from tilerank.kernels.formats import Format
    from tilerank.loader.config import ModelConfig
    from tilerank.loader.quantization import Quantization
    from tilerank.parallel.layer import Layer, WeightParameter

Operations = Literal["bf16", "int8", "fp32"]


@dataclass(frozen=True)
class Work:
    """Bytes to read from memory and operations (a product and a sum are two), by what is multiplied: each has
    a peak of its own, but for fp32 beside AMX, which has no tiles for it."""

    nbytes: float = 0.0
    bf16: float = 0.0
    int8: float = 0.0
    fp32: float = 0.0

    @property
    def flops(self) -> float:
        return self.bf16 + self.int8 + self.fp32

    def __add__(self, other: Work) -> Work:
        return Work(self.nbytes + other.nbytes, self.bf16 + other.bf16, self.int8 + other.int8, self.fp32 + other.fp32)

    def __mul__(self, times: float) -> Work:
        return Work(self.nbytes * times, self.bf16 * times, self.int8 * times, self.fp32 * times)


@dataclass(frozen=True)
class ModelWork:
    """A model as arithmetic, whole, without padding for ranks.

    step: read whatever is computed: all weights but the embedding table, of which a step reads a row a token (the
    output head counts, also if it is the same tensor), and but the experts. experts: reading all of them.
    expert_share: the part of them that a token goes to. token: computed for every token. head: computed for the last
    token of a prompt and every one after it. cached: reading the keys and values of a token in all layers. pair: what
    attention computes for a query and a key in all layers.
    """

    step: Work
    experts: Work
    expert_share: float
    token: Work
    head: Work
    cached: Work
    pair: Work

    def prefill(self, batch: int, tokens: int) -> Work:
        """`batch` prompts of `tokens` tokens up to the logits of their last ones; the weights are read once."""
        pairs = tokens * (tokens + 1) // 2
        return (
            self._weights(batch * tokens)
            + (self.token + self.cached) * (batch * tokens)
            + self.head * batch
            + self.pair * (batch * pairs)
        )

    def decode(self, batch: int, context: float) -> Work:
        """One step of `batch` sequences that hold `context` tokens each, the one that is being computed included."""
        return self._weights(batch) + (self.token + self.head) * batch + (self.cached + self.pair) * (batch * context)

    def _weights(self, tokens: int) -> Work:
        """Of experts those that are expected to be chosen by some of `tokens` tokens that choose evenly, each for
        itself."""
        return self.step + self.experts * (1 - (1 - self.expert_share) ** tokens)


def model_work(
    config: ModelConfig,
    dtype: torch.dtype,
    quantization: Quantization | None = None,
    kv_dtype: torch.dtype | None = None,
) -> ModelWork:
    """Counts the layers of our own model, unsharded; nothing is allocated.

    LaunchError for a layer or a cache that holds what this does not know.
    """
    from tilerank.loader.formats import weight_formats
    from tilerank.parallel.experts import ExpertsParameter
    from tilerank.parallel.layer import PackedParameter, Parameter, PlainParameter, Sharding
    from tilerank.parallel.layers import ParallelLMHead, QKVParallelLinear, VocabParallelEmbedding
    from tilerank.runtime.cache import PagedKV
    from tilerank.runtime.registry import model_class
    from tilerank.runtime.traffic import traffic_of

    formats = weight_formats(config, dtype, quantization)
    model = model_class(config.model_type)(config, Sharding(0, 1, dtype, None, formats=formats, kv_dtype=kv_dtype))
    lanes: Operations = "fp32" if dtype.itemsize == 4 else "bf16"
    token = head = pair = Work()
    expert_share = 0.0 if config.experts is None else config.experts.top_k / config.experts.count

    def visit(layer: Layer, in_head: bool) -> None:
        nonlocal token, head, pair
        if isinstance(layer, VocabParallelEmbedding):
            return
        if isinstance(layer, QKVParallelLinear):
            pair += Work(**{lanes: 2 * 2 * layer.q_heads * layer.head_dim})  # Q K^T and P V
        if isinstance(layer, ExpertsParameter):
            token += _products(layer) * expert_share
        elif isinstance(layer, PackedParameter):
            if in_head:
                head += _products(layer)
            else:
                token += _products(layer)
        elif isinstance(layer, Parameter) and not isinstance(layer, PlainParameter):
            raise LaunchError(
                f"the model has a {type(layer).__name__}, of which this does not know how much a token needs"
            )
        for child in layer.children():
            visit(child, in_head or isinstance(layer, ParallelLMHead))

    visit(model, False)
    for spec in model.cache_specs():
        if not isinstance(spec, PagedKV):
            raise LaunchError(
                f"the model has a {type(spec).__name__} cache, of which this does not know how much a token needs"
            )
    read = traffic_of(model, expert_share)
    return ModelWork(Work(read.weights), Work(read.experts), expert_share, token, head, Work(read.cached), pair)


def operations(format: Format) -> Operations:
    """What multiplies weights held so: what is neither int8 nor fp32 is multiplied as bf16."""
    from tilerank.kernels.formats import Int8

    if isinstance(format, Int8):
        return "int8"
    return "fp32" if format.activations.itemsize == 4 else "bf16"


def _products(matrix: WeightParameter) -> Work:
    """Of a row of x with all of the matrix."""
    return Work(**{operations(matrix.format): 2 * sum(piece.elements for piece in matrix.pieces())})
