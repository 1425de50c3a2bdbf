"""The sharded layers that models are made of.

Each is built from *logical* shapes, those of the config and the checkpoint, and a `Sharding`; it declares which
rectangles of which checkpoint tensors this rank holds (`pieces`) and computes its part. Names are opaque prefixes of
checkpoint tensors. Projections are held in the format that the sharding says, all else in `sharding.dtype`, whatever
the checkpoint's. A rank may hold nothing of a layer; it takes part in the collectives all the same.

The two patterns of tensor parallelism (Shoeybi et al., 2019): cut the rows of a weight and every rank computes some of
the outputs (column parallel, after the paper's transposed notation); cut the columns and every rank computes a partial
sum of all the outputs (row parallel). Column then row needs one sum over the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from tilerank.kernels import ops
from tilerank.kernels.formats import Float, Format, Fp8
from tilerank.kernels.heads import split_heads
from tilerank.kernels.linear import linear

from .layer import GatedBias, GatedParameter, PackedParameter, PlainParameter, row_unit
from .layer import Layer as Layer
from .layer import Piece as Piece
from .layer import Sharding as Sharding
from .layer import WeightFormats as WeightFormats
from .shard import Cut, Span


class _Linear(Layer):
    """x @ weight.T + bias for this rank's rectangle of the weight."""

    def __init__(self, n: int, k: int, format: Format, bias: torch.dtype | None) -> None:
        self.weight = PackedParameter(n, k, format)
        self.bias = None if bias is None else PlainParameter((n,), bias)

    def _fill_rows(self, name: str, features: tuple[int, int], rows: Span, row: int = 0) -> None:
        """Local rows from `row` on are those of `rows` of the weight (and bias) of a projection [out, in]."""
        taken = slice(rows.start, rows.stop)
        self.weight.fill(f"{name}.weight", features, taken, slice(0, features[1]), row=row)
        if self.bias is not None:
            self.bias.fill(f"{name}.bias", features[:1], taken, row=row)

    def _project(self, x: Tensor, *, out_dtype: torch.dtype | None = None) -> Tensor:
        bias = self.bias.data if self.bias is not None and self.bias.shape[0] else None
        if self.weight.is_empty:
            rows, n = x.shape[:-1], self.weight.n
            return ops.repeat_row(bias, rows.numel(), n, out_dtype or x.dtype).view(*rows, n)
        return linear(x, self.weight.packed, bias, out_dtype=out_dtype)


class ReplicatedLinear(_Linear):
    """A projection [out, in] too small to be cut, whole on every rank: x[..., in] -> [..., out], the same bits
    everywhere.
    """

    def __init__(self, name: str, in_features: int, out_features: int, sharding: Sharding) -> None:
        super().__init__(out_features, in_features, Float(sharding.dtype), None)
        self._fill_rows(name, (out_features, in_features), Span(0, out_features, out_features))

    def __call__(self, x: Tensor) -> Tensor:
        return self._project(x)


class ColumnParallelLinear(_Linear):
    """A projection [out, in] of which every rank computes some outputs: x[..., in] -> [..., span.size].

    `cut` says how the outputs are cut, by default on tile edges.
    """

    def __init__(
        self,
        name: str,
        in_features: int,
        out_features: int,
        sharding: Sharding,
        *,
        cut: Cut | None = None,
        bias: bool = False,
    ) -> None:
        self.cut = sharding.cut(out_features) if cut is None else cut
        self.span = self.cut.spans[sharding.rank]
        held = sharding.format_of(name, row=self.span.start)
        super().__init__(self.span.size, in_features, held, sharding.dtype if bias else None)
        self._fill_rows(name, (out_features, in_features), self.span)

    def __call__(self, x: Tensor) -> Tensor:
        return self._project(x)


class RowParallelLinear(_Linear):
    """A projection [out, in] of which every rank sees some inputs: x[..., span.size] -> [..., out], what this rank
    adds to the sum over the ranks.

    `span` is this rank's part of the inputs, as the layer before left it: `qkv.q_columns`, `gate_up.span`.
    The bias is added once, on rank 0.
    """

    def __init__(
        self, name: str, in_features: int, out_features: int, sharding: Sharding, *, span: Span, bias: bool = False
    ) -> None:
        self.span = span
        super().__init__(out_features, span.size, sharding.format_of(name, column=span.start), None)
        columns = slice(span.start, span.stop)
        self.weight.fill(f"{name}.weight", (out_features, in_features), slice(0, out_features), columns)
        if bias:
            held = out_features if sharding.rank == 0 else 0
            self.bias = PlainParameter((held,), sharding.dtype)
            self.bias.fill(f"{name}.bias", (out_features,), slice(0, held))

    def __call__(self, x: Tensor) -> Tensor:
        return self._project(x)


class QKVParallelLinear(_Linear):
    """The query, key and value projections of an attention layer, cut by heads and computed as one.

    x[t, hidden] -> q[t, q_heads, head_dim], k and v [t, kv_heads, head_dim], views of one tensor, with the local head
    counts `q_heads` and `kv_heads`. `kv_map` [kv_heads, 2] int32 tells the attention kernel which query heads each KV
    head serves: the first, and how many. `q_columns` is this rank's span of the output projection's inputs.
    """

    def __init__(
        self,
        name: str,
        hidden: int,
        q_heads: int,
        kv_heads: int,
        head_dim: int,
        sharding: Sharding,
        *,
        bias: bool = False,
        projections: Sequence[str] = ("q_proj", "k_proj", "v_proj"),
    ) -> None:
        self.heads = sharding.cut_heads(q_heads, kv_heads, head_dim, hidden)
        q, kv = self.heads.q[sharding.rank], self.heads.kv[sharding.rank]
        self.q_heads, self.kv_heads, self.head_dim = q.size, kv.size, head_dim
        self.q_columns = q.scaled(head_dim)
        self.kv_map = torch.tensor(self.heads.kv_map[sharding.rank], dtype=torch.int32)
        names = [f"{name}.{projection}" for projection in projections]
        parts = [span.scaled(head_dim) for span in (q, kv, kv)]
        held = sharding.fused_format(names, [part.start for part in parts])
        # Parts begin with a block of the format; the rows between them are zero, and nobody looks at what they yield.
        unit = row_unit(held) if isinstance(held, Fp8) else 1
        heights = [-(-part.size // unit) * unit for part in parts]
        self._first_k, self._first_v = heights[0], heights[0] + heights[1]
        super().__init__(self._first_v + parts[2].size, hidden, held, sharding.dtype if bias else None)
        for projection, heads, part, row in zip(
            names, (q_heads, kv_heads, kv_heads), parts, (0, self._first_k, self._first_v), strict=True
        ):
            self._fill_rows(projection, (heads * head_dim, hidden), part, row)

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rows = self._project(x)
        return (
            split_heads(rows, 0, self.q_heads, self.head_dim),
            split_heads(rows, self._first_k, self.kv_heads, self.head_dim),
            split_heads(rows, self._first_v, self.kv_heads, self.head_dim),
        )


class GateUpParallelLinear(Layer):
    """The gate and up projections of a gated MLP, and what becomes of them: silu(gate(x)) * up(x), in one kernel.

    x[..., hidden] -> [..., span.size]. `span` is this rank's part of the down projection's inputs.
    """

    def __init__(
        self,
        name: str,
        hidden: int,
        width: int,
        sharding: Sharding,
        *,
        bias: bool = False,
        projections: Sequence[str] = ("gate_proj", "up_proj"),
    ) -> None:
        self.cut = sharding.cut_width(name, width)
        self.span = self.cut.spans[sharding.rank]
        names = [f"{name}.{projection}" for projection in projections]
        held = sharding.fused_format(names, [self.span.start] * 2)
        self.weight = GatedParameter(self.span.size, hidden, held)
        self.bias = GatedBias(self.span.size, sharding.dtype) if bias else None
        taken = slice(self.span.start, self.span.stop)
        for part, projection in enumerate(names):
            row = part * self.span.size
            self.weight.fill(f"{projection}.weight", (width, hidden), taken, slice(0, hidden), row=row)
            if self.bias is not None:
                self.bias.fill(f"{projection}.bias", (width,), taken, row=row)

    def __call__(self, x: Tensor) -> Tensor:
        if self.weight.packed.is_plain:
            parts = [linear(x, self.weight.part(i), None if self.bias is None else self.bias.part(i)) for i in (0, 1)]
            return ops.silu_mul(torch.cat(parts, -1))
        bias = None if self.bias is None else self.bias.data
        gated = linear(x, self.weight.packed, bias, activation="silu_mul")
        return gated if gated.shape[-1] == self.span.size else gated[..., : self.span.size]


class VocabParallelEmbedding(Layer):
    """The embedding table, cut by rows: ids[t] int64 -> [t, hidden] on every rank."""

    def __init__(self, name: str, vocab: int, hidden: int, sharding: Sharding) -> None:
        self.cut = sharding.cut(vocab)
        self.span = self.cut.spans[sharding.rank]
        self.table = PlainParameter((self.span.size, hidden), sharding.dtype)
        rows = slice(self.span.start, self.span.stop)
        self.table.fill(f"{name}.weight", (vocab, hidden), rows, slice(0, hidden))
        self._sharding = sharding

    def __call__(self, ids: Tensor) -> Tensor:
        # Exactly one rank has the row, the others add zeros: the sum is exact.
        return self._sharding.sum(ops.embedding(ids, self.table.data, self.span.start))


class ParallelLMHead(_Linear):
    """The output head, cut by rows of the vocabulary: x[m, hidden] -> logits [m, vocab] in fp32 on every rank.

    Padding never shows: what comes back ends at the vocabulary.
    """

    def __init__(self, name: str, hidden: int, vocab: int, sharding: Sharding, *, bias: bool = False) -> None:
        self.cut = sharding.cut(vocab)
        self.span = self.cut.spans[sharding.rank]
        # Equal heights, at the price of one unit of zero rows, so that the parts can be gathered as they come.
        height = max(span.size for span in self.cut.spans)
        held = sharding.head_format(name, row=self.span.start)
        super().__init__(height, hidden, held, sharding.dtype if bias else None)
        self._fill_rows(name, (vocab, hidden), self.span)
        self._vocab = vocab
        self._starts = torch.tensor([0, *accumulate(span.real for span in self.cut.spans)])
        self._sharding = sharding

    def __call__(self, x: Tensor) -> Tensor:
        return self._sharding.gather_columns(self._project(x, out_dtype=torch.float32), self._starts, self._vocab)


class TiedEmbedding(Layer):
    """Embedding and output head of one weight, which is held once: ids[t] int64 -> [t, hidden] on every rank.

    The weight is packed for the head (`logits`), which reads all of it in every step; a look-up picks its rows there.
    """

    def __init__(self, name: str, vocab: int, hidden: int, sharding: Sharding) -> None:
        self._head = ParallelLMHead(name, hidden, vocab, sharding)
        self._sharding = sharding

    def __call__(self, ids: Tensor) -> Tensor:
        # Exactly one rank has the row: ids outside of a weight give zeros, and so do rows that pad it.
        return self._sharding.sum(self._head.weight.packed.embedding(ids, self._head.span.start))

    def logits(self, x: Tensor) -> Tensor:
        """x[m, hidden] -> [m, vocab] in fp32 on every rank."""
        return self._head(x)


class RMSNorm(Layer):
    """Root-mean-square norm over the last dimension, whole on every rank: of the hidden state, or of each head.

    `zero_centered`: the weight is stored minus one (Qwen3.5).
    """

    def __init__(self, name: str, dim: int, eps: float, sharding: Sharding, *, zero_centered: bool = False) -> None:
        self.eps = eps
        self.zero_centered = zero_centered
        self.weight = PlainParameter((dim,), sharding.dtype)
        self.weight.fill(f"{name}.weight", (dim,), slice(0, dim))
        self._sharding = sharding

    def __call__(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.weight.data, self.eps, zero_centered=self.zero_centered)

    def add(self, part: Tensor, residual: Tensor, *, whole: bool = False) -> Tensor:
        """Adds the sum of every rank's `part` to `residual` and returns the norm of what that gives, on every rank.

        part, residual: [m, dim]. One residual goes with one rank's calls: it is kept up in place, as far as this rank
        needs it there, or `whole` (parallel/group.py: add_rms_norm).
        """
        return self._sharding.add_rms_norm(
            part, residual, self.weight.data, self.eps, zero_centered=self.zero_centered, whole=whole
        )
