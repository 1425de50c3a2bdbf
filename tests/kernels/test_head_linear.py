"""The products of single heads, in every weight format that checkpoints of latent attention have."""

import math

import pytest
import torch
from torch import Tensor

from tilerank.kernels import core
from tilerank.kernels.errors import KernelError
from tilerank.kernels.graph import Graph
from tilerank.kernels.latent import head_linear
from tilerank.kernels.packed_experts import PackedExperts
from tilerank.kernels.weight import Format
from tilerank.kernels.weight_formats.floats import Float
from tilerank.kernels.weight_formats.fp8 import Fp8
from tilerank.kernels.weight_formats.int4_a8 import Int4A8
from tilerank.kernels.weight_formats.int8 import Int8, Int8Weight
from tilerank.kernels.weight_formats.token_int8 import TokenInt8

pytestmark = pytest.mark.usefixtures("rung")

FORMATS = [Float(torch.float32), Float(torch.bfloat16), Int8(), TokenInt8(), Fp8(), Int4A8(32, True)]


def packed(heads: int, n: int, k: int, form: Format) -> PackedExperts:
    random = torch.Generator().manual_seed(heads + n + k)
    weight = PackedExperts.empty(heads, n, k, form)
    for head in range(heads):
        weight.write(torch.randn(n, k, generator=random) / math.sqrt(k), head)
    return weight


def inputs(t: int, heads: int, k: int, dtype: torch.dtype) -> Tensor:
    """Return a slice of wider heads."""
    return torch.randn(t, heads, k + 16, generator=torch.Generator().manual_seed(t)).to(dtype)[..., 8:-8]


def exact(x: Tensor, weight: PackedExperts) -> tuple[Tensor, Tensor]:
    """Return the products in float64, and the tolerance of a rung by element."""
    out, bound = torch.zeros(2, *x.shape[:2], weight.n, dtype=torch.float64)
    half_ulp = torch.finfo(x.dtype).eps / 2
    for head in range(weight.experts):
        values, rows = weight.unpack(head).double(), x[:, head].double()
        out[:, head] = rows @ values.T
        error = torch.finfo(torch.float32).eps * math.sqrt(weight.k) * (rows.abs() @ values.abs().T)
        if weight.weight.format.operands == "int8":  # rounding to codes, half a step of every x
            error += (rows.abs().amax(1) / 127 * 0.501)[:, None] * values.abs().sum(1)
        bound[:, head] = error + half_ulp * (out[:, head].abs() + error)
    return out, bound * 1.01


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: repr(form).replace("torch.", ""))
@pytest.mark.parametrize("t", [1, 3, 17, 40])
@pytest.mark.parametrize(("heads", "n", "k"), [(1, 32, 32), (5, 128, 32), (3, 24, 136), (2, 130, 64), (4, 32, 128)])
def test_every_head_has_a_weight_of_its_own(form: Format, t: int, heads: int, n: int, k: int) -> None:
    weight = packed(heads, n, k, form)
    x = inputs(t, heads, k, form.activations)
    found = head_linear(x, weight)
    assert found.dtype == x.dtype
    expected, bound = exact(x, weight)
    assert bool(((found.double() - expected).abs() <= bound).all())
    for threads in (1, 7):
        core.start_pool(None, threads, spin=False)
        assert torch.equal(head_linear(x, weight), found)
    assert torch.equal(head_linear(x[-1:], weight)[0], found[-1])


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: repr(form).replace("torch.", ""))
def test_many_rows_of_the_sizes_of_a_model(form: Format) -> None:
    for n, k in ((512, 128), (128, 512)):
        weight = packed(2, n, k, form)
        x = inputs(300, 2, k, form.activations)
        found = head_linear(x, weight)
        expected, bound = exact(x, weight)
        assert bool(((found.double() - expected).abs() <= bound).all())
        assert torch.equal(head_linear(x[7:9], weight), found[7:9])


@pytest.mark.parametrize("t", [1, 40])
def test_scales_of_inputs(t: int) -> None:
    """The rows of an int8 kv_b_proj have scales; its transpose has them along the inputs."""
    random = torch.Generator().manual_seed(1)
    heads, n, k = 3, 64, 40
    codes = torch.randint(-127, 128, (heads, k, n), generator=random, dtype=torch.int8)
    scales = torch.rand(heads, k, generator=random) * 0.01 + 0.001
    weight = PackedExperts.empty(heads, n, k, TokenInt8())
    for head in range(heads):
        part = weight.part(head)
        assert isinstance(part, Int8Weight)
        part.write_codes(codes[head].T.contiguous(), torch.ones(n))
    x = inputs(t, heads, k, torch.bfloat16)
    found = head_linear(x, weight, scales)
    scaled = (x.float() * scales).bfloat16()
    assert torch.equal(head_linear(scaled, weight), found)
    stored = codes.double() * scales[..., None].double()
    expected = torch.einsum("thk,hkn->thn", x.double(), stored)
    # Every x is rounded to bf16 and then to a code.
    step = scaled.double().abs().amax(-1, keepdim=True) / 127 * 0.501 + scaled.double().abs() * 2**-8
    bound = torch.einsum("thk,hkn->thn", step.expand(t, heads, k), codes.double().abs()) + expected.abs() * 2**-7
    assert bool(((found.double() - expected).abs() <= bound).all())


def test_a_step_is_recorded(rung: str) -> None:
    if rung == "reference":
        pytest.skip("it has no launches to record")
    weight, x = packed(3, 64, 32, Float(torch.bfloat16)), inputs(4, 3, 32, torch.bfloat16)
    graph = Graph(lambda: head_linear(x, weight))
    assert torch.equal(graph.run(), head_linear(x, weight))


def test_wrong_arguments_are_named() -> None:
    weight = packed(3, 64, 32, Float(torch.bfloat16))
    x = torch.zeros(4, 3, 32, dtype=torch.bfloat16)
    two = PackedExperts.empty(3, 64, 32, Float(torch.bfloat16), parts=2)
    assert head_linear(x[:0], weight).shape == (0, 3, 64)
    for arguments, sentence in (
        ((x[:, :2], weight), "x: expected shape [any, 3, 32], found [4, 2, 32]"),
        ((x.float(), weight), "x: expected dtype bfloat16, found float32"),
        ((x, two), "weight: expected 1 part, found 2"),
        ((x, weight, torch.zeros(3, 31)), "x_scales: expected shape [3, 32], found [3, 31]"),
    ):
        with pytest.raises(KernelError) as error:
            head_linear(*arguments)
        assert str(error.value) == f"head_linear: {sentence}"
