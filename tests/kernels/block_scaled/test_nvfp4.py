"""Products and experts with NVFP4 weights on every rung, against float64 arithmetic on the values of the format."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.kernels.block_scaled.forms import BF16, E2M1, F32, F64, assert_close
from tilerank.kernels import core
from tilerank.kernels.errors import KernelError
from tilerank.kernels.latent import head_linear
from tilerank.kernels.linear import linear
from tilerank.kernels.moe import moe
from tilerank.kernels.packed_experts import PackedExperts
from tilerank.kernels.weight import Weight
from tilerank.kernels.weight_formats.nvfp4 import Nvfp4, Nvfp4Weight


def numbers_of(scales: Tensor) -> Tensor:
    """Return the numbers of codes of e4m3 from 0 to 126, by definition of the format."""
    exponents, mantissas = scales.double() // 8, scales.double() % 8
    return torch.where(exponents == 0, mantissas * 2.0**-9, (1 + mantissas / 8) * (exponents - 7).exp2())


def fill(weight: Weight, seed: int) -> Tensor:
    """Write random codes, scales of every size and factors; return the values [n, k] in float64."""
    assert isinstance(weight, Nvfp4Weight)
    draw = torch.Generator().manual_seed(seed)
    n, k = weight.n, weight.k
    codes = torch.randint(0, 16, (n, k), generator=draw, dtype=torch.uint8)
    scales = torch.randint(0, 127, (n, -(-k // 16)), generator=draw, dtype=torch.uint8)
    factors = torch.rand(n, 1, generator=draw) / 448
    weight.write_codes(codes)
    weight.write_scales(scales.view(torch.float8_e4m3fn))
    weight.write_factors(factors)
    by_column = numbers_of(scales).repeat_interleave(16, 1)[:, :k]
    return E2M1[codes.int() & 7] * (1 - 2.0 * (codes > 7)) * by_column * factors.double()


@pytest.mark.parametrize("n, k", [(1, 1), (33, 130), (130, 1104)])
def test_product(rung: str, n: int, k: int) -> None:
    core.start_pool(None, 3, spin=False)
    weight = Nvfp4().empty(n, k)
    values = fill(weight, seed=1)
    assert torch.equal(weight.unpack(), values.float())
    x = torch.randn(130, k, generator=torch.Generator().manual_seed(0)).to(BF16)
    counts = (1, 2, 5, 8, 9, 17, 29, 130) if rung != "reference" else (1, 3)
    whole = linear(x[: counts[-1]], weight, out_dtype=F32)
    assert_close(whole, x[: counts[-1]], values)
    for m in counts:
        assert torch.equal(linear(x[:m], weight, out_dtype=F32), whole[:m]), m


def test_all_codes_and_scales(rung: str) -> None:
    """Every code times every scale is exact, subnormals included, and so is a factor that is a power of two."""
    codes, scales = torch.arange(16).repeat(127), torch.arange(127).repeat_interleave(16)
    weight = Nvfp4().empty(16 * 127, 48)
    weight.write_codes(codes.to(torch.uint8)[:, None].clone(), 0, 37)
    weight.write_scales(scales.to(torch.uint8)[:, None].clone().view(torch.float8_e4m3fn), 0, 2)
    weight.write_factors(torch.full((16 * 127, 1), 0.25))
    values = (E2M1[codes & 7] * (1 - 2.0 * (codes > 7)) * numbers_of(scales) / 4).float()
    for m in (1, 3, 9, 20):
        x = torch.zeros(m, 48, dtype=BF16)
        x[:, 37] = 1
        assert torch.equal(linear(x, weight, out_dtype=F32), values.expand(m, -1))


@pytest.mark.parametrize("hidden, width", [(80, 48), (192, 96)])
def test_experts(rung: str, hidden: int, width: int) -> None:
    core.start_pool(None, 3, spin=False)
    gate_up = PackedExperts.empty(3, width, hidden, Nvfp4(), parts=2)
    down = PackedExperts.empty(3, hidden, width, Nvfp4())
    gates, ups = ([fill(gate_up.part(expert, part), 10 * expert + part) for expert in range(3)] for part in (0, 1))
    downs = [fill(down.part(expert), 10 * expert + 2) for expert in range(3)]
    for m in (1, 40):
        draw = torch.Generator().manual_seed(m)
        x = (torch.randn(m, hidden, generator=draw) / 8).to(BF16)
        ids = torch.stack([torch.randperm(3, generator=draw)[:2] for _ in range(m)]).int()
        weights = torch.rand(m, 2, generator=draw)
        exact, sizes = torch.zeros(m, hidden, dtype=F64), torch.zeros(m, hidden, dtype=F64)
        for row in range(m):
            for expert, weight in zip(ids[row].tolist(), weights[row].double(), strict=True):
                gate, up = (values[expert] @ x[row].double() for values in (gates, ups))
                middle = (functional.silu(gate) * up).to(BF16).double()
                exact[row] += weight * (downs[expert] @ middle)
                sizes[row] += weight * (downs[expert].abs() @ middle.abs())
        # A middle value that rounds the other way is off by a unit of bf16; the result is rounded to bf16.
        assert ((moe(x, gate_up, down, ids, weights).double() - exact).abs() <= 2.0**-7 * sizes + 1e-6).all()


def test_a_matrix_for_every_head(rung: str) -> None:
    weight = PackedExperts.empty(3, 40, 64, Nvfp4())
    values = [fill(weight.part(head), head) for head in range(3)]
    x = torch.randn(3, 3, 64, generator=torch.Generator().manual_seed(0)).to(BF16)
    found = head_linear(x, weight)
    for head in range(3):
        assert_close(found[:, head], x[:, head], values[head])


def test_bytes_and_refusals() -> None:
    if core.isa() != "reference":
        assert Nvfp4().nbytes(4096, 4096) == 4096 * 4096 * 9 // 16 + 4096 * 4
    weight = Nvfp4().empty(32, 32)
    for scale in (torch.nan, -1.0):
        with pytest.raises(KernelError, match="write_scales: scales: expected numbers from 0 to 448"):
            weight.write_scales(torch.full((1, 2), scale).to(torch.float8_e4m3fn))
    with pytest.raises(KernelError, match="floats are not quantised to NVFP4"):
        weight.write(torch.ones(1, 32))
    with pytest.raises(KernelError, match="group: expected a multiple of 16, found 8"):
        Nvfp4(8).empty(32, 32)
