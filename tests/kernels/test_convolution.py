"""The kernels of causal convolutions on every rung, against torch's convolution in fp64."""

import pytest
import torch
from matrices import DTYPES, assert_within, half_ulp, inside_nan, randn
from torch import Tensor
from torch.nn.functional import conv1d

from tilerank.kernels import core
from tilerank.kernels.convolution import Snake, convolve_, convolve_channels, tap_columns
from tilerank.kernels.errors import KernelError
from tilerank.kernels.weight_formats.floats import FloatWeight
from tilerank.kernels.weight_formats.int8 import Int8

F32, BF16 = torch.float32, torch.bfloat16
SHAPES = [(1, 1, 1), (3, 17, 7), (130, 33, 2), (33, 130, 7), (17, 3, 1), (96, 96, 7), (1540, 5, 2)]
"""Inputs, outputs and taps."""


def packed(weight: Tensor) -> FloatWeight:
    """The weights [n, c, taps] as convolve_ reads them."""
    n, channels, taps = weight.shape
    columns = tap_columns(channels, taps)
    matrix = FloatWeight.empty(n, taps * columns, weight.dtype)
    for tap in range(taps):
        matrix.write(weight[:, :, tap], 0, tap * columns)
    return matrix


def sums(x: Tensor, weight: Tensor, dilation: int) -> tuple[Tensor, Tensor]:
    """The convolution in fp64, and a bound of its rounding errors in fp32."""
    x, weight = x.double(), weight.double()
    exact, magnitude = (conv1d(a.T[None], b, dilation=dilation)[0].T for a, b in ((x, weight), (x.abs(), weight.abs())))
    return exact, (weight[0].numel() + 4) * 2.0**-24 * magnitude


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("channels", "outputs", "taps"), SHAPES)
def test_convolve_equals_torch(rung: str, dtype: torch.dtype, channels: int, outputs: int, taps: int) -> None:
    weight = randn(outputs, channels, taps, dtype=dtype)
    matrix, bias = packed(weight), randn(outputs, seed=1).to(dtype)
    scale, residual = randn(outputs, seed=2), randn(130, outputs, seed=3).to(dtype)
    snake = Snake(randn(outputs, seed=4).exp(), randn(outputs, seed=5).exp())
    for m, dilation in ((1, 1), (3, 3), (17, 9), (33, 1), (130, 9)):
        x = inside_nan(randn(m + (taps - 1) * dilation, channels, dtype=dtype, seed=m))
        exact, bound = sums(x, weight, dilation)
        out = inside_nan(torch.empty(m, outputs))
        convolve_(x, matrix, taps=taps, dilation=dilation, out=out)
        assert_within(out, exact, bound)
        exact = (exact + bias.double()) * scale.double()
        bound = (bound + 3 * 2.0**-24 * bias.double().abs()) * scale.double().abs() + 2.0**-22 * exact.abs()
        convolve_(x, matrix, bias, taps=taps, dilation=dilation, scale=scale, out=out)
        assert_within(out, exact, bound)
        exact, bound = exact + residual[:m].double(), bound + 2.0**-24 * (exact.abs() + residual[:m].double().abs())
        rounded, activated = residual[:m].clone(), inside_nan(torch.empty(m, outputs))
        arguments = {"taps": taps, "dilation": dilation, "scale": scale}
        convolve_(x, matrix, bias, **arguments, residual=rounded, out=rounded, snake=snake, activated=activated)
        assert_within(rounded, exact, bound + half_ulp(dtype) * (exact.abs() + bound))
        frequency, magnitude = (values.double() for values in snake)
        wave = exact + magnitude * (exact * frequency).sin() ** 2
        slope = 1 + magnitude * frequency
        turns = (exact * frequency).abs() * 2.0**-23
        assert_within(activated, wave, bound * slope + magnitude * (4e-7 + turns) + 2.0**-22 * wave.abs())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_do_not_depend_on_others(rung: str, dtype: torch.dtype) -> None:
    """Parts of a sound have the bits of the whole, for any number of threads."""
    if rung == "reference":
        pytest.skip("torch sums in an order of its own")
    weight, m, before = randn(70, 100, 7, dtype=dtype), 700, 6 * 3
    matrix, bias = packed(weight), randn(70, seed=1)
    x = randn(m + before, 100, dtype=dtype, seed=2)
    snake = Snake(torch.ones(70), torch.ones(70))

    def convolve(x: Tensor) -> Tensor:
        out = torch.empty(x.shape[0] - before, 70, dtype=dtype)
        convolve_(x, matrix, bias, taps=7, dilation=3, snake=snake, activated=out)
        return out

    whole = convolve(x)
    for first, end in ((0, 1), (1, 14), (14, 300), (300, m)):
        assert convolve(x[first : end + before]).equal(whole[first:end])
    core.start_pool(None, 1, spin=False)
    assert convolve(x).equal(whole)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("m", "channels", "taps"), [(1, 1, 1), (3, 17, 7), (33, 130, 3), (130, 64, 7)])
def test_convolve_channels_equals_torch(rung: str, dtype: torch.dtype, m: int, channels: int, taps: int) -> None:
    x, weight = randn(m + taps - 1, channels, dtype=dtype), randn(taps, channels, dtype=dtype, seed=1)
    bias = randn(channels, dtype=dtype, seed=2)
    exact, magnitude = (
        conv1d(a.double().T[None], b.double().T[:, None], c.double(), groups=channels)[0].T
        for a, b, c in ((x, weight, bias), (x.abs(), weight.abs(), bias.abs()))
    )
    found = convolve_channels(inside_nan(x), weight, bias)
    assert found.dtype is dtype
    assert_within(found, exact, (taps + 1) * 2.0**-24 * magnitude + half_ulp(dtype) * exact.abs() * (1 + 2.0**-8))


def test_wrong_arguments_are_refused() -> None:
    x, matrix, out = randn(10, 8), packed(randn(4, 8, 3)), torch.empty(8, 4)
    convolve_(x, matrix, taps=3, out=out)
    ones = torch.ones(4)
    with pytest.raises(KernelError, match=r"x: expected torch.float32 rows for 2 taps of a weight with 96 columns"):
        convolve_(x, matrix, taps=2, out=out)
    with pytest.raises(KernelError, match=r"x: expected torch.float32 rows"):
        convolve_(x.bfloat16(), matrix, taps=3, out=out)
    with pytest.raises(KernelError, match="x: expected"):
        convolve_(randn(10, 8).bfloat16(), Int8().empty(4, 8), out=out)
    with pytest.raises(KernelError, match="at least 10 rows and a tensor for the result, found 9"):
        convolve_(x[:9], matrix, taps=3, dilation=5, out=out)
    with pytest.raises(KernelError, match="a tensor for the result"):
        convolve_(x, matrix, taps=3)
    with pytest.raises(KernelError, match=r"out: expected shape \[8, 4\], found \[10, 4\]"):
        convolve_(x, matrix, taps=3, out=torch.empty(10, 4))
    with pytest.raises(KernelError, match="expected a snake and what receives it"):
        convolve_(x, matrix, taps=3, out=out, activated=out)
    with pytest.raises(KernelError, match=r"magnitude: expected shape \[4\]"):
        convolve_(x, matrix, taps=3, snake=Snake(ones, ones[:3]), activated=out)
    with pytest.raises(KernelError, match="residual"):
        convolve_(x, matrix, taps=3, residual=x, out=out)
    with pytest.raises(KernelError, match="at least 2 rows, found 1"):
        convolve_channels(randn(1, 8), randn(3, 8), randn(8))
    with pytest.raises(KernelError, match="bias: expected dtype float32"):
        convolve_channels(x, randn(3, 8), randn(8).bfloat16())
