"""The kernels of sound on every rung, against torch's transform in fp64 and torch's convolution."""

import pytest
import torch
from matrices import DTYPES, randn
from torch import Tensor

from tilerank.kernels import audio
from tilerank.kernels.errors import KernelError
from tilerank.runtime.models.mel import mel_filters

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
