"""The gated MLP (Shazeer, arXiv 2002.05202)."""

from collections.abc import Callable, Sequence

from torch import Tensor

from tilerank.kernels.linear import GatedActivation
from tilerank.parallel.linear import GATE_UP, GateUpParallelLinear, RowParallelLinear
from tilerank.parallel.sharding import Sharding

from .decoder import FeedForward
from .text_config import TextConfig


class GatedMLP(FeedForward):
    """down(silu(gate(x)) * up(x)), `width` columns wide.

    bias: of all three, zero where the checkpoint lacks it. projections: as in GateUpParallelLinear. down: the name of
    the third projection. activation: in place of silu. dimension: the name of the width in plans.
    """

    def __init__(
        self,
        name: str,
        hidden: int,
        width: int,
        sharding: Sharding,
        *,
        bias: bool = False,
        projections: Sequence[str] = GATE_UP,
        down: str = "down_proj",
        activation: GatedActivation = "silu_mul",
        dimension: str = "MLP width",
    ) -> None:
        self.gate_up = GateUpParallelLinear(
            name,
            hidden,
            width,
            sharding,
            bias=bias,
            optional_bias=True,
            projections=projections,
            activation=activation,
            dimension=dimension,
        )
        self.down = RowParallelLinear(
            f"{name}.{down}", width, hidden, sharding, span=self.gate_up.span, bias=bias, optional_bias=True
        )

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.gate_up(x))


def dense_mlps(
    c: TextConfig,
    sharding: Sharding,
    *,
    bias: bool = False,
    projections: Sequence[str] = GATE_UP,
    activation: GatedActivation = "silu_mul",
) -> Callable[[str, int], GatedMLP]:
    """Return what makes the MLP of a layer from its name and the number of the layer, `intermediate_size` wide."""

    def mlp(name: str, _: int) -> GatedMLP:
        return GatedMLP(
            name,
            c.hidden_size,
            c.intermediate_size,
            sharding,
            bias=bias,
            projections=projections,
            activation=activation,
        )

    return mlp
