"""The gated delta net (Yang et al., arXiv 2412.06464), a mixer that keeps a state of fixed size for a sequence.

q, k, v = silu(conv(x W_qkv));  beta = sigmoid(x W_b);  g = -exp(A_log) softplus(x W_a + dt_bias)
S = exp(g) S;  S = S + k (beta (v - S^T k))^T;  o = S^T q          for each token and value head
y = norm(o) silu(x W_z) W_out
"""

import torch
from torch import Tensor

from tilerank.kernels.delta import causal_conv, delta_gating, delta_rule, delta_step, gated_norm
from tilerank.kernels.state_slots import StateSlots
from tilerank.kernels.weight_formats import Float
from tilerank.parallel.cost import Cost, Work
from tilerank.parallel.delta_projection import DeltaHeads, DeltaProjection
from tilerank.parallel.linear import RowParallelLinear
from tilerank.parallel.parameters import PlainParameter, WholeParameter
from tilerank.parallel.sharding import Sharding

from ..step.batch import Batch, LogitRows
from ..step.cache import HeadPlace, RecurrentState
from .decoder import Mixer
from .padded_heads import head_multiple


class GatedDeltaNet(Mixer[StateSlots]):
    """The delta net of Qwen3.5, under its names. A rank without heads computes nothing. grouped: as in DeltaProjection.

    A_log and dt_bias stay float32: a rounding of the decay grows with the number of tokens.
    """

    def __init__(
        self,
        name: str,
        hidden: int,
        heads: DeltaHeads,
        conv_width: int,
        eps: float,
        sharding: Sharding,
        *,
        grouped: tuple[str, ...] = (),
    ) -> None:
        multiple = head_multiple(heads.key_dim, sharding)
        self.projection = DeltaProjection(name, hidden, heads, sharding, head_multiple=multiple, grouped=grouped)
        held, values = self.projection.held, self.projection.values
        self.held = held
        self.conv = PlainParameter((held.channels, 1, conv_width), sharding.dtype)
        row = 0
        for rows in self.projection.channels:
            taken = slice(rows.stored.start, rows.stored.stop), slice(0, 1), slice(0, conv_width)
            self.conv.fill(f"{name}.conv1d.weight", (rows.total, 1, conv_width), *taken, row=row)
            row += rows.span.size
        self.a_log, self.dt_bias = (PlainParameter((held.value_heads,), torch.float32) for _ in range(2))
        for parameter, tensor in ((self.a_log, "A_log"), (self.dt_bias, "dt_bias")):
            parameter.fill(f"{name}.{tensor}", (heads.value_heads,), slice(values.start, values.stop))
        self.norm = WholeParameter(f"{name}.norm.weight", (heads.value_dim,), sharding.dtype)
        width = heads.value_heads * heads.value_dim
        span = values.scaled(heads.value_dim)
        self.out = RowParallelLinear(f"{name}.out_proj", width, hidden, sharding, span=span)
        self.cache_spec = RecurrentState(
            held.channels,
            conv_width,
            held.value_heads,
            heads.key_dim,
            heads.value_dim,
            sharding.dtype,
            sharding.state_drafts,
            HeadPlace.apart(self.projection.cut.spans[sharding.rank], heads.key_heads),
            HeadPlace.apart(values, heads.value_heads),
        )
        self._eps = eps
        self._activations = sharding.dtype

    def __call__(
        self, x: Tensor, rope: Tensor, batch: Batch, cache: StateSlots, only: LogitRows | None = None
    ) -> Tensor:
        if not self.held.value_heads:
            return self.out(x[: x.shape[0] if only is None else only.rows.shape[0], :0])
        qkv, z, b, a = self.projection(x)
        slots, kept, starts, lengths = batch.state_slots, batch.kept_drafts, batch.query_starts, batch.seq_lens
        assert slots is not None and kept is not None
        a_log, dt_bias, keys = self.a_log.data, self.dt_bias.data, self.held.key_heads
        qkv = causal_conv(qkv, self.conv.data.flatten(1), cache.conv, slots, kept, starts, lengths)
        if slots.shape[0] == x.shape[0]:  # every sequence has one row
            o = delta_step(qkv, a, b, a_log, dt_bias, cache, slots, kept, lengths, keys)
        else:
            g, beta = delta_gating(a, b, a_log, dt_bias)
            o = delta_rule(qkv, g, beta, cache, slots, kept, starts, lengths, keys)
        if only is not None:
            o, z = only.take(o), only.take(z)
        return self.out(gated_norm(o, z, self.norm.data, self._eps))

    def cost(self) -> Cost:
        gated = 3 * self.held.value_heads * self.held.value_dim  # outputs and gates, and what they become
        return super().cost() + self._cost_of_rule() + Cost(elementwise=gated * self._activations.itemsize)

    def cost_of_caching(self) -> Cost:
        return self.projection.cost() + self.conv.cost() + self._cost_of_rule()

    def _cost_of_rule(self) -> Cost:
        """The products of the matrices S with k and q, their updates, and the convolution of q, k and v."""
        held = self.held
        operations = 6 * held.value_heads * held.key_dim * held.value_dim
        rule = Work(**{Float(self._activations).operands: operations})
        return Cost(token=rule, elementwise=2 * held.channels * self._activations.itemsize)
