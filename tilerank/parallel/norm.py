"""The norms of a sharded model."""

from __future__ import annotations

import torch
from torch import Tensor

from tilerank.kernels import ops
from tilerank.kernels.joint_norm import head_squares, joint_norm_
from tilerank.kernels.tower_ops import layer_norm

from .parameters import Layer, PlainParameter
from .shard import HeadCut
from .sharding import Sharding


class RMSNorm(Layer):
    """Root-mean-square norm over the last dimension, of the hidden state or of each head; whole on every rank.

    zero_centered: the checkpoint stores the weight minus one (Qwen3.5).
    """

    def __init__(self, name: str, dim: int, eps: float, sharding: Sharding, *, zero_centered: bool = False) -> None:
        self.eps = eps
        self.zero_centered = zero_centered
        self.weight = PlainParameter((dim,), sharding.dtype)
        self.weight.fill(f"{name}.weight", (dim,), slice(0, dim))
        self._sharding = sharding

    def __call__(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.weight.data, self.eps, zero_centered=self.zero_centered)

    def add(
        self,
        part: Tensor,
        residual: Tensor,
        *,
        post_norm: RMSNorm | None = None,
        scale: Tensor | None = None,
        whole: bool = False,
        summed: bool = False,
    ) -> Tensor:
        """Add the sum over the ranks of `part` to `residual` and return the norm of the result, on every rank.

        part, residual: [m, dim]. post_norm: of the sum, before it is added; it has the same eps and centre. scale: [1],
        a factor of the result, before its norm. `residual` is updated in place, but only in the rows that this rank
        needs for its next call, unless `whole` (group.py: add_rms_norm). Each residual therefore belongs to one rank's
        calls. summed: `part` is the sum already, the same on every rank; then all rows are updated.
        """
        return self._sharding.add_rms_norm(
            part,
            residual,
            self.weight.data,
            self.eps,
            post_weight=None if post_norm is None else post_norm.weight.data,
            scale=scale,
            zero_centered=self.zero_centered,
            whole=whole,
            summed=summed,
        )


class WeightlessNorm(Layer):
    """RMSNorm without a weight."""

    def __init__(self, dim: int, eps: float, sharding: Sharding) -> None:
        self._dim, self._eps, self._dtype = dim, eps, sharding.dtype
        self._ones: Tensor

    def allocate(self) -> None:
        self._ones = torch.ones(self._dim, dtype=self._dtype)

    def __call__(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self._ones, self._eps)


class JointNorm(Layer):
    """The RMS norm of all query heads of a token together, and that of its key heads (MiniMax-M2), in place.

    Called with q[t, heads, dim] and k[t, heads, dim], this rank's heads by `cut` of those of the model, `heads` and
    `kv_heads`. The ranks add up their sums of squares. A KV head that several ranks hold counts on the first of them,
    and padded heads are zero.
    """

    def __init__(self, name: str, heads: int, kv_heads: int, cut: HeadCut, eps: float, sharding: Sharding) -> None:
        self.eps = eps
        q, kv = cut.q[sharding.rank], cut.kv[sharding.rank]
        self._widths = (heads * cut.head_dim, kv_heads * cut.head_dim)
        self._dim = cut.head_dim
        self.weights = [PlainParameter((span.size * cut.head_dim,), sharding.dtype) for span in (q, kv)]
        for weight, norm, span, width in zip(self.weights, ("q_norm", "k_norm"), (q, kv), self._widths, strict=True):
            rows = span.scaled(cut.head_dim)
            weight.fill(f"{name}.{norm}.weight", (width,), slice(rows.start, rows.stop))
        before = max((span.stop for span in cut.kv[: sharding.rank]), default=0)
        self._first_key = min(max(before - kv.start, 0), kv.size)
        self._sharding = sharding

    def __call__(self, q: Tensor, k: Tensor) -> None:
        squares = self._sharding.sum(head_squares(q, k, self._first_key))
        q_weight, k_weight = (weight.data.view(-1, self._dim) for weight in self.weights)
        joint_norm_(q, k, q_weight, k_weight, squares, *self._widths, self.eps)


class LayerNorm(Layer):
    """LayerNorm (Ba et al., 2016) with weight and bias over the last dimension; whole on every rank."""

    def __init__(self, name: str, dim: int, eps: float, sharding: Sharding) -> None:
        self.eps = eps
        self.weight = PlainParameter((dim,), sharding.dtype)
        self.bias = PlainParameter((dim,), sharding.dtype)
        for part, parameter in (("weight", self.weight), ("bias", self.bias)):
            parameter.fill(f"{name}.{part}", (dim,), slice(0, dim))

    def __call__(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight.data, self.bias.data, self.eps)
