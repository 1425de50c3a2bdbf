"""Mean squares of the inputs of projections against sums by hand, for any number of ranks."""

import pytest
import torch
import torch.nn.functional as F
from thread_ranks import fill, on_all_ranks, random_checkpoint
from torch import Tensor

from tilerank.parallel.experts import ParallelExperts
from tilerank.parallel.input_squares import InputSquares
from tilerank.parallel.linear import GateUpParallelLinear, RowParallelLinear
from tilerank.parallel.parameters import Layer
from tilerank.parallel.sharding import Sharding


@pytest.mark.parametrize("size", [1, 2, 4])
def test_means_are_those_of_whole_inputs(size: int) -> None:
    """A width of 80 is 3 units, so that the last of 4 ranks holds nothing. No token chooses expert 2."""
    hidden, width, count = 40, 80, 3
    shapes: dict[str, tuple[int, ...]] = {}
    for name in ("m", *(f"experts__{e}" for e in range(count))):
        shapes |= {f"{name}__{part}_proj__weight": (width, hidden) for part in ("gate", "up")}
        shapes[f"{name}__down_proj__weight"] = (hidden, width)
    checkpoint = random_checkpoint(3, **shapes)
    x = torch.randn(5, hidden, generator=torch.Generator().manual_seed(4))
    ids = torch.tensor([[0], [1], [1], [1], [1]], dtype=torch.int32)

    class Block(Layer):
        def __init__(self, sharding: Sharding) -> None:
            self.gate_up = GateUpParallelLinear("m", hidden, width, sharding)
            self.down = RowParallelLinear("m.down_proj", width, hidden, sharding, span=self.gate_up.span)
            self.experts = ParallelExperts("experts", hidden, width, count, sharding, top_k=1)

    def body(sharding: Sharding) -> Tensor:
        block = Block(sharding)
        fill(block, checkpoint)
        squares = InputSquares(block)
        for rows in (slice(0, 3), slice(3, 5)):
            block.down(block.gate_up(x[rows]))
        block.experts(x, ids, torch.ones(5, 1))
        assert sharding.group is not None
        found = dict(squares.means(sharding.group))
        assert set(found) == {name.removesuffix(".weight") for name in checkpoint}
        return torch.cat([found[name] for name in sorted(found)])

    def means(name: str, x: Tensor) -> dict[str, Tensor]:
        gate, up = (checkpoint[f"{name}.{part}_proj.weight"] for part in ("gate", "up"))
        inputs = {"gate_proj": x, "up_proj": x, "down_proj": F.silu(x @ gate.T) * (x @ up.T)}
        return {f"{name}.{part}": rows.double().square().mean(0) for part, rows in inputs.items()}

    expected = means("m", x) | means("experts.0", x[:1]) | means("experts.1", x[1:])
    for part in ("gate_proj", "up_proj", "down_proj"):
        of_all = expected[f"experts.0.{part}"] + 4 * expected[f"experts.1.{part}"]
        expected[f"experts.2.{part}"] = of_all / 5
    wanted = torch.cat([expected[name] for name in sorted(expected)]).float()
    for found in on_all_ranks(size, "split", body):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-7)
