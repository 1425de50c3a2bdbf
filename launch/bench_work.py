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
class Part:
    """Of a model, what goes with the tokens that pass through it. token: computed for each. pair: computed for a query
    and a key. experts: reading all of them."""

    token: Work = Work()
    pair: Work = Work()
    experts: Work = Work()

    def __add__(self, other: Part) -> Part:
        return Part(self.token + other.token, self.pair + other.pair, self.experts + other.experts)

    def of(self, tokens: int, pairs: float, expert_share: float) -> Work:
        """Of experts those that are expected to be chosen by some of the tokens, which choose evenly, each for
        itself."""
        return self.token * tokens + self.pair * pairs + self.experts * (1 - (1 - expert_share) ** tokens)


@dataclass(frozen=True)
class ModelWork:
    """A model as arithmetic, whole, without padding for ranks.

    step: read whatever is computed: all weights but the embedding table, of which a step reads a row a token (the
    output head counts, also if it is the same tensor), and but the experts. cached: reading the keys and values of
    a token in all layers. expert_share: the part of a layer's experts that a token goes to.
    body: what every token goes through, up to its queries, keys and values of the last layer. end: the rest of that
    layer and the head, for the last token of a prompt and every one after it.
    """

    step: Work
    cached: Work
    body: Part
    end: Part
    expert_share: float = 0.0

    def prefill(self, batch: int, tokens: int) -> Work:
        """`batch` prompts of `tokens` tokens up to the logits of their last ones; the weights are read once."""
        pairs = tokens * (tokens + 1) // 2
        body = self.body.of(batch * tokens, batch * pairs, self.expert_share)
        end = self.end.of(batch, batch * tokens, self.expert_share)
        return self.step + self.cached * (batch * tokens) + body + end

    def decode(self, batch: int, context: float) -> Work:
        """One step of `batch` sequences that hold `context` tokens each, the one that is being computed included."""
        parts = [part.of(batch, batch * context, self.expert_share) for part in (self.body, self.end)]
        return self.step + self.cached * (batch * context) + parts[0] + parts[1]


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
    from tilerank.runtime.models.llama import DecoderLayer
    from tilerank.runtime.registry import model_class
    from tilerank.runtime.traffic import traffic_of

    formats = weight_formats(config, dtype, quantization)
    model = model_class(config.model_type)(config, Sharding(0, 1, dtype, None, formats=formats, kv_dtype=kv_dtype))
    lanes: Operations = "fp32" if dtype.itemsize == 4 else "bf16"
    expert_share = 0.0 if config.experts is None else config.experts.top_k / config.experts.count
    decoder = [layer for layer in model.children() if isinstance(layer, DecoderLayer)]
    parts = {False: Part(), True: Part()}

    def visit(layer: Layer, in_end: bool) -> None:
        in_end = in_end or layer is decoder[-1] or isinstance(layer, ParallelLMHead)
        if isinstance(layer, VocabParallelEmbedding):
            return
        if isinstance(layer, QKVParallelLinear):
            parts[in_end] += Part(pair=Work(**{lanes: 2 * 2 * layer.q_heads * layer.head_dim}))  # Q K^T and P V
            in_end = False
        elif isinstance(layer, ExpertsParameter):
            parts[in_end] += Part(_products(layer) * expert_share, experts=Work(layer.nbytes()))
        elif isinstance(layer, PackedParameter):
            parts[in_end] += Part(_products(layer))
        elif isinstance(layer, Parameter) and not isinstance(layer, PlainParameter):
            raise LaunchError(
                f"the model has a {type(layer).__name__}, of which this does not know how much a token needs"
            )
        for child in layer.children():
            visit(child, in_end)

    visit(model, False)
    for spec in model.cache_specs():
        if not isinstance(spec, PagedKV):
            raise LaunchError(
                f"the model has a {type(spec).__name__} cache, of which this does not know how much a token needs"
            )
    read = traffic_of(model)
    return ModelWork(Work(read.weights), Work(read.cached), parts[False], parts[True], expert_share)


def operations(format: Format) -> Operations:
    """What multiplies weights held so: what is neither int8 nor fp32 is multiplied as bf16."""
    from tilerank.kernels.formats import Int8

    if isinstance(format, Int8):
        return "int8"
    return "fp32" if format.activations.itemsize == 4 else "bf16"


def _products(matrix: WeightParameter) -> Work:
    """Of a row of x with all of the matrix."""
    return Work(**{operations(matrix.format): 2 * sum(piece.elements for piece in matrix.pieces())})
