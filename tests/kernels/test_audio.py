"""The kernels of sound on every rung, against torch's transform in fp64 and torch's convolution."""

import pytest
import torch
from matrices import DTYPES, assert_within, half_ulp, inside_nan, randn
from torch import Tensor
from torch.nn.functional import conv1d

from tilerank.kernels import audio, core
from tilerank.kernels.convolution import Snake, convolve_, convolve_channels, tap_columns
from tilerank.kernels.errors import KernelError
from tilerank.kernels.weight_formats.floats import FloatWeight
from tilerank.kernels.weight_formats.int8 import Int8
from tilerank.runtime.models.towers.audio import mel_filters

pytestmark = pytest.mark.usefixtures("rung")


WINDOW = torch.hann_window(400, dtype=torch.float64)


def spectrogram(samples: Tensor, filters: Tensor) -> Tensor:
    """Whisper's, in fp64. Reflects once, for which a clip needs more than 200 samples."""
    power = torch.stft(samples.double(), 400, 160, window=WINDOW, return_complex=True).abs() ** 2
    return (power.T @ filters).clamp(min=1e-10).log10()


@pytest.mark.parametrize("samples", [201, 399, 16000, 16001])
def test_log_mel_equals_a_transform_in_fp64(samples: int) -> None:
    """Also of frames whose power is 1e-8 of that of the loudest, where sums in fp32 are wrong in the third digit."""
    clip = randn(samples) * torch.linspace(1, 1e-4, samples)
    filters = mel_filters()
    exact = spectrogram(clip, filters)
    found = audio.log_mel(clip, filters, slice(0, samples // 160 + 1))
    assert found.shape == exact.shape
    assert float((found.double() - exact).abs().max()) < 1e-6  # log10 in fp32 has 24 bits of at most 10


def test_log_mel_of_some_frames_has_the_bits_of_all() -> None:
    clip, filters = randn(5000), mel_filters()
    whole = audio.log_mel(clip, filters, slice(0, 32))
    for frames in (slice(0, 1), slice(7, 20), slice(31, 32)):
        assert audio.log_mel(clip, filters, frames).equal(whole[frames])


def test_log_mel_reflects_short_clips_as_often_as_necessary() -> None:
    """As numpy.pad: a clip of 3 samples is a b c b a b c ..., and one of 1 sample is constant."""
    filters = mel_filters()
    for clip in (torch.tensor([0.3, -0.2, 0.9]), torch.tensor([0.7])):
        period = torch.cat([clip, clip.flip(0)[1:-1]])
        # 201 samples from the middle of the frame on, and 200 before it, which mirror them.
        frame = period.repeat(400)[:201]
        wanted = spectrogram(torch.cat([frame, frame.flip(0)[1:]]), filters)[:1]
        assert float((audio.log_mel(clip, filters, slice(0, 1)).double() - wanted).abs().max()) < 1e-6


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("a", "b", "channels"), [(100, 128, 1), (50, 64, 7), (25, 32, 24), (1, 16, 3), (13, 5, 33), (6, 1, 2)]
)
def test_unfold_makes_a_convolution_a_product(dtype: torch.dtype, a: int, b: int, channels: int) -> None:
    x, weight = randn(a, b, channels, dtype=dtype), randn(5, channels, 3, 3, dtype=dtype, seed=1)
    places = -(-a // 2) * -(-b // 2)
    rows = audio.unfold(x, slice(0, places))
    assert rows.shape == (places, 9 * channels) and rows.dtype is dtype
    # Planes have b rows and a columns.
    planes = torch.nn.functional.conv2d(x.double().permute(2, 1, 0)[None], weight.double(), stride=2, padding=1)[0]
    exact = planes.permute(2, 1, 0).reshape(places, 5)
    matrix = weight.double().transpose(1, 3).flatten(1)
    assert torch.allclose(rows.double() @ matrix.T, exact, rtol=0, atol=1e-12)
    middle = slice(places // 3, places // 3 + max(places // 2, 1))
    assert audio.unfold(x, middle).equal(rows[middle])
    assert audio.unfold(x[..., :0].contiguous(), middle).shape == (len(rows[middle]), 0)


def test_wrong_arguments_are_refused() -> None:
    filters = mel_filters()
    with pytest.raises(KernelError, match="frames: expected a range of 2, found 1 to 3"):
        audio.log_mel(randn(200), filters, slice(1, 3))
    with pytest.raises(KernelError, match="expected samples, an even window and a hop, found 0"):
        audio.log_mel(randn(0), filters, slice(0, 1))
    with pytest.raises(KernelError, match="filters"):
        audio.log_mel(randn(500), filters.float(), slice(0, 1))
    with pytest.raises(KernelError, match="expected it contiguous"):
        audio.unfold(randn(4, 4, 6)[..., :3], slice(0, 1))
    with pytest.raises(KernelError, match="rows: expected a range of 4, found 2 to 5"):
        audio.unfold(randn(4, 4, 3), slice(2, 5))


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
        convolve_(
            x,
            matrix,
            bias,
            taps=taps,
            dilation=dilation,
            scale=scale,
            residual=rounded,
            out=rounded,
            snake=snake,
            activated=activated,
        )
        assert_within(rounded, exact, bound + half_ulp(dtype) * (exact.abs() + bound))
        frequency, magnitude = (values.double() for values in snake)
        wave = exact + magnitude * (exact * frequency).sin() ** 2
        slope = 1 + magnitude * frequency
        turns = (exact * frequency).abs() * 2.0**-23
        assert_within(activated, wave, bound * slope + magnitude * (4e-7 + turns) + 2.0**-22 * wave.abs())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("channels", [96, 100])
def test_rows_do_not_depend_on_others(rung: str, dtype: torch.dtype, channels: int) -> None:
    """Parts of a sound have the bits of the whole, for any number of threads, and wherever rows are: with AMX, whole
    tiles of 96 channels are read from x itself."""
    if rung == "reference":
        pytest.skip("torch sums in an order of its own")
    weight, m, before = randn(70, channels, 7, dtype=dtype), 700, 6 * 3
    matrix, bias = packed(weight), randn(70, seed=1)
    x = randn(m + before, channels, dtype=dtype, seed=2)
    snake = Snake(torch.ones(70), torch.ones(70))

    def convolve(x: Tensor) -> Tensor:
        out = torch.empty(x.shape[0] - before, 70, dtype=dtype)
        convolve_(x, matrix, bias, taps=7, dilation=3, snake=snake, activated=out)
        return out

    whole = convolve(x)
    assert convolve(inside_nan(x)).equal(whole)
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


def test_wrong_arguments_of_convolutions_are_refused() -> None:
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
