"""Inputs of each layer beside the stream, made of the tokens and of the embeddings (Gemma 3n, Gemma 4).

    p = (table[token] * sqrt(width) + norm(projection(x0) / sqrt(hidden))) / sqrt(2)        x0: the embeddings
    x += post_norm(out(gelu(gate(x)) * p of the layer))                                     after the MLP of a layer

The table has a row of all layers for each token and is only looked up. It is cut over the ranks by its rows.
"""

from torch import Tensor

from tilerank.kernels import core, ops
from tilerank.kernels.heads import columns_of, join_heads, split_heads
from tilerank.parallel.embedding import VocabParallelEmbedding
from tilerank.parallel.linear import ColumnParallelLinear, GatheredLinear, RowParallelLinear
from tilerank.parallel.norm import RMSNorm
from tilerank.parallel.parameters import Layer, PlainParameter
from tilerank.parallel.shard import TILE, cut_uneven
from tilerank.parallel.sharding import Sharding

from ..step.batch import Batch


class PerLayerInput(Layer):
    """The input of one layer, `width` columns wide. post_norm: of the sum over the ranks, before it is added."""

    def __init__(self, name: str, number: int, hidden: int, width: int, eps: float, sharding: Sharding) -> None:
        # Never padded: the columns of `inputs` after those of the layer are those of the next one.
        cut = cut_uneven(width, sharding.size, TILE)
        self.gate = ColumnParallelLinear(
            f"{name}.per_layer_input_gate", hidden, width, sharding, cut=cut, activation="gelu_tanh"
        )
        self.out = RowParallelLinear(f"{name}.per_layer_projection", width, hidden, sharding, span=self.gate.span)
        self.post_norm = RMSNorm(f"{name}.post_per_layer_input_norm", hidden, eps, sharding)
        self._first = number * width + self.gate.span.start

    def __call__(self, x: Tensor, inputs: Tensor) -> Tensor:
        """x[t, hidden], the stream, and inputs[t, layers * width] -> this rank's part of [t, hidden]."""
        width = self.gate.span.size
        if not width:
            return self.out(columns_of(x, 0, 0))
        gate = self.gate(x)
        ops.mul_(gate, columns_of(inputs, self._first, width))
        return self.out(gate)


class PerLayerInputs(Layer):
    """The inputs of all layers: x0[t, hidden], the embedded tokens and media -> [t, layers * width] on every rank.

    vocab: rows of the table. pad: the token whose row counts for all tokens of media.
    """

    def __init__(
        self,
        name: str,
        vocab: int,
        pad: int,
        hidden: int,
        width: int,
        layers: int,
        eps: float,
        sharding: Sharding,
    ) -> None:
        self._hidden, self._width, self._eps, self._sharding = hidden, width, eps, sharding
        columns = layers * width
        self.table = VocabParallelEmbedding(f"{name}.embed_tokens_per_layer", vocab, columns, sharding)
        self.pad = PlainParameter((1, columns), sharding.dtype)
        self.pad.fill(f"{name}.embed_tokens_per_layer.weight", (vocab, columns), slice(pad, pad + 1), slice(0, columns))
        self.projection = GatheredLinear(f"{name}.per_layer_model_projection", hidden, columns, sharding)
        self.norm = RMSNorm(f"{name}.per_layer_projection_norm", width, eps, sharding)

    def of_layer(self, name: str, number: int) -> PerLayerInput:
        return PerLayerInput(name, number, self._hidden, self._width, self._eps, self._sharding)

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        of_tokens = self.table(batch.token_ids)
        columns = of_tokens.shape[1]
        if batch.inserts is not None:
            rows = batch.inserts.rows
            pad = core.view(self.pad.data, (columns,), (1,), 0)
            ops.put_rows_(of_tokens, rows, ops.repeat_row(pad, rows.shape[0], columns, of_tokens.dtype))
        ops.scale_(of_tokens, self._width**0.5)
        projected = self.projection(x)
        ops.scale_(projected, self._hidden**-0.5)
        normed = self.norm(split_heads(projected, 0, columns // self._width, self._width))
        inputs = ops.add(join_heads(normed), of_tokens)
        ops.scale_(inputs, 2**-0.5)
        return inputs
