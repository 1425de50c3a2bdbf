"""Patches of pictures and videos on every rung, against torch, Pillow and the image processors of transformers."""

import itertools
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from matrices import DTYPES
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

from tilerank.kernels import core, pictures
from tilerank.kernels.errors import KernelError
from tilerank.kernels.reference import pictures as reference

pytestmark = pytest.mark.usefixtures("rung")

MEAN, STD = (0.48, 0.5, 0.41), (0.27, 0.5, 0.26)

on_rung = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def random_frames(n: int, height: int, width: int, seed: int = 0) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (n, height, width, 3), dtype=torch.uint8, generator=random)


def drawn_frames(height: int, width: int) -> Tensor:
    """Black and white shapes with sharp edges, at which bicubic sums leave the range of bytes."""
    y, x = torch.arange(height)[:, None], torch.arange(width)[None]
    channels = (((y // 5) + (x // 7)) % 2, (y * width > x * height) * 1, ((y - 9) ** 2 + (x - 9) ** 2 < 60) * 1)
    return 255 * torch.stack(channels, -1).to(torch.uint8)[None]


def smooth_frames(height: int, width: int) -> Tensor:
    """Waves that are nowhere near the limits of a byte."""
    y, x = torch.linspace(0, 9, height)[:, None], torch.linspace(0, 7, width)[None]
    channels = [120 + 40 * (y * a).sin() + 40 * (x * b + y).cos() for a, b in ((1, 1), (0.3, 2), (2, 0.6))]
    return torch.stack(channels, -1).to(torch.uint8)[None]


def patches(frames: Tensor, grid: tuple[int, int, int], **changed: Any) -> Tensor:
    return pictures.patches(
        frames, grid, **{"mean": MEAN, "std": STD, "resample": "bicubic", "dtype": torch.float32, **changed}
    )


def levels(values: Tensor, grid: tuple[int, int, int], patch: int, merge: int) -> Tensor:
    """Turn patches, normalised with 0 and 1 / 255, back into bytes [2 t, rows * patch, columns * patch, 3]."""
    t, rows, columns = grid
    split = values.view(t, rows // merge, columns // merge, merge, merge, 3, 2, patch, patch)
    return split.permute(0, 6, 1, 3, 7, 2, 4, 8, 5).reshape(2 * t, rows * patch, columns * patch, 3).round().int()


@pytest.mark.parametrize("resample", ["bicubic", "bilinear"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@on_rung
@given(
    n=st.integers(1, 3),
    height=st.integers(1, 200),
    width=st.integers(1, 200),
    rows=st.integers(1, 6),
    columns=st.integers(1, 6),
    sizes=st.sampled_from([(16, 2, 2), (14, 2, 2), (16, 1, 1), (20, 3, 3)]),
)
@example(n=1, height=700, width=37, rows=1, columns=20, sizes=(16, 2, 2))
@example(n=1, height=37, width=700, rows=20, columns=1, sizes=(16, 2, 2))
@example(n=2, height=64, width=100, rows=2, columns=3, sizes=(16, 2, 2))
@example(n=2, height=100, width=64, rows=3, columns=2, sizes=(16, 2, 2))
def test_patches_are_those_of_torch(
    dtype: torch.dtype,
    resample: str,
    n: int,
    height: int,
    width: int,
    rows: int,
    columns: int,
    sizes: tuple[int, int, int],
) -> None:
    patch, merge, temporal = sizes
    frames, grid = random_frames(n, height, width), (-(-n // temporal), rows * merge, columns * merge)
    shape: Any = {"resample": resample, "dtype": dtype, "patch": patch, "merge": merge, "temporal": temporal}
    found = patches(frames, grid, **shape)
    assert found.dtype is dtype
    assert torch.equal(found, reference.patches(frames, grid, mean=MEAN, std=STD, **shape))


@pytest.mark.parametrize("resample", ["bicubic", "bilinear"])
@pytest.mark.parametrize(("height", "width"), [(50, 75), (32, 64), (200, 311), (16, 16), (333, 40), (1, 3)])
def test_resizing_differs_from_pillow_by_a_level_at_most(resample: str, height: int, width: int) -> None:
    frames, grid = drawn_frames(height, width), (1, 2, 4)
    found = patches(frames, grid, mean=(0.0,) * 3, std=(1 / 255,) * 3, resample=resample)
    picture = Image.fromarray(frames[0].numpy())
    # Horizontally first. In one call Pillow 13 may begin vertically, and sums beyond a byte are then cut elsewhere.
    for size in ((64, height), (64, 32)):
        picture = picture.resize(size, getattr(Image.Resampling, resample.upper()))
    expected = torch.tensor(list(picture.tobytes())).view(1, 32, 64, 3)
    assert int((levels(found, grid, 16, 2) - expected).abs().max()) <= 1


@pytest.mark.parametrize("resample", ["bicubic", "bilinear"])
@on_rung
@given(height=st.integers(1, 90), width=st.integers(1, 90), rows=st.integers(1, 56), columns=st.integers(1, 84))
@example(height=56, width=84, rows=56, columns=84)
@example(height=20, width=30, rows=20, columns=30)
def test_zeros_fill_what_a_frame_leaves_of_its_grid(
    resample: str, height: int, width: int, rows: int, columns: int
) -> None:
    """Compare with a frame that torch has resized and padded before: tiles of 2 x 2 patches, as mllama has them."""
    frames, grid = random_frames(1, height, width), (1, 4, 6)
    shape: Any = {"resample": resample, "patch": 14, "merge": 2, "temporal": 1}
    channels = frames.permute(0, 3, 1, 2)
    if (rows, columns) != (height, width):
        channels = F.interpolate(channels, (rows, columns), mode=resample, antialias=True)
    padded = F.pad(channels, (0, 84 - columns, 0, 56 - rows)).permute(0, 2, 3, 1).contiguous()
    assert torch.equal(patches(frames, grid, size=(rows, columns), **shape), patches(padded, grid, **shape))


SIZES = [(100, 90), (48, 80), (80, 48), (33, 400), (256, 512), (1080, 1920), (1000, 17)]
"""48 and 80 are halfway between multiples of 32, where Python rounds to even."""
VIDEOS = [3, 4]  # frames


@pytest.fixture(scope="session")
def torchvision_patches(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """What tools/reference_patches.py makes of random pictures of SIZES, and of videos of 3 and 4 frames."""
    folder = tmp_path_factory.mktemp("patches")
    frames = {f"picture.{height}x{width}": random_frames(1, height, width) for height, width in SIZES}
    frames |= {f"video.{n}": random_frames(n, 75, 130) for n in VIDEOS}
    save_file(frames, folder / "frames.safetensors")
    script = Path(__file__).parents[1] / "support" / "tools" / "reference_patches.py"
    command = [sys.executable, str(script), str(folder / "frames.safetensors"), str(folder / "out.safetensors")]
    subprocess.run(command, check=True, timeout=300)
    return load_file(folder / "out.safetensors")


@pytest.mark.parametrize(("height", "width"), SIZES)
def test_pictures_are_those_of_the_processor_of_transformers(
    torchvision_patches: dict[str, Tensor], height: int, width: int
) -> None:
    name = f"{height}x{width}"
    found = patches(random_frames(1, height, width), tuple(torchvision_patches[f"{name}.grid"].tolist()))
    assert torch.equal(found, torchvision_patches[f"{name}.patches"])


@pytest.mark.parametrize("frames", VIDEOS)
def test_videos_are_those_of_the_processor_of_transformers(torchvision_patches: dict[str, Tensor], frames: int) -> None:
    found = patches(random_frames(frames, 75, 130), tuple(torchvision_patches[f"{frames}.grid"].tolist()))
    assert torch.equal(found, torchvision_patches[f"{frames}.patches"])


@pytest.mark.parametrize(("height", "width"), SIZES)
def test_pictures_are_nearly_those_of_the_pillow_processor_of_transformers(height: int, width: int) -> None:
    import_module("tools.tvshim")  # before transformers
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    frames = smooth_frames(height, width)
    size = {"shortest_edge": 4096, "longest_edge": 1 << 22}
    processor = Qwen2VLImageProcessorPil(patch_size=16, image_mean=list(MEAN), image_std=list(STD), size=size)
    expected = processor(frames[0].numpy(), return_tensors="pt")
    grid = tuple(expected["image_grid_thw"][0].tolist())
    found = patches(frames, grid)
    # Both round after each direction. Where a picture shrinks vertically and grows horizontally, Pillow 13 begins
    # vertically, so that one level comes from the first direction and one from the second.
    most = 2 if height > 16 * grid[1] and width < 16 * grid[2] else 1
    assert found.shape == expected["pixel_values"].shape
    assert float((found - expected["pixel_values"]).abs().max()) < (most + 0.01) / (255 * min(STD))


def test_order_of_patches_and_values() -> None:
    """Three frames of 4 x 8 pixels, not resized, as patches of 2 x 2, against loops written by hand."""
    frames = torch.arange(3 * 4 * 8 * 3).remainder(251).to(torch.uint8).view(3, 4, 8, 3)
    found = patches(frames, (2, 2, 4), mean=(0.0,) * 3, std=(1 / 255,) * 3, patch=2)
    expected = [
        [
            float(frames[min(2 * t + frame, 2), 2 * row + y, 2 * (2 * block + column) + x, channel])
            for channel, frame, y, x in itertools.product(range(3), range(2), range(2), range(2))
        ]
        for t, block, row, column in itertools.product(range(2), range(2), range(2), range(2))
    ]
    assert torch.equal(found.round(), torch.tensor(expected))
    assert torch.allclose(found, found.round(), atol=1e-4)


def test_values_are_normalised_in_fp32() -> None:
    frames = torch.arange(256).to(torch.uint8).view(1, 16, 16, 1).expand(-1, -1, -1, 3).contiguous()
    found = patches(frames, (1, 1, 1), merge=1)
    value = torch.arange(256, dtype=torch.float32)
    for channel in range(3):
        scaled = [255 * torch.tensor(part[channel]) for part in (MEAN, STD)]
        expected = (value - scaled[0]) / scaled[1]
        for frame in range(2):
            assert torch.equal(found.view(3, 2, 256)[channel, frame], expected)
    assert torch.equal(patches(frames, (1, 1, 1), merge=1, dtype=torch.bfloat16), found.bfloat16())


@pytest.mark.parametrize(("height", "width"), [(90, 70), (96, 64), (300, 31), (20, 64)])
def test_bands_are_rows_of_the_whole(height: int, width: int) -> None:
    frames, grid = random_frames(3, height, width), (2, 6, 4)
    whole = patches(frames, grid).view(2, 6 * 4, -1)
    for first, end in itertools.combinations((0, 2, 4, 6), 2):
        band = patches(frames, grid, band=slice(first, end))
        assert torch.equal(band.view(2, (end - first) * 4, -1), whole[:, first * 4 : end * 4])


@pytest.mark.parametrize("grid", [(2, 4, 6), (2, 6, 2)])
def test_frames_may_be_strided(grid: tuple[int, int, int]) -> None:
    wide = torch.randint(0, 256, (6, 90, 120, 4), dtype=torch.uint8)
    for part in (wide[::2, :64, 3:99, :3], wide[1:4, ::2, ::3, 1:], wide[:4, 5:, :, :3]):
        assert torch.equal(patches(part, grid), patches(part.contiguous(), grid))


def test_threads_do_not_change_bits() -> None:
    frames, grid = random_frames(3, 90, 70), (2, 6, 4)
    expected = patches(frames, grid)
    for threads in (1, 2, 5, 20):
        core.start_pool(None, threads, spin=False)
        assert torch.equal(patches(frames, grid), expected)


FRAMES = random_frames(3, 8, 8)


@pytest.mark.parametrize(
    ("frames", "grid", "changed", "sentence"),
    [
        (FRAMES.float(), (2, 2, 2), {}, "frames: expected dtype uint8, found float32"),
        (FRAMES[0], (2, 2, 2), {}, r"frames: expected shape \[any, any, any, 3\], found \[8, 8, 3\]"),
        (FRAMES[:0], (0, 2, 2), {}, r"frames: expected at least one pixel, found shape \[0, 8, 8, 3\]"),
        (FRAMES[:, :0], (2, 2, 2), {}, r"frames: expected at least one pixel, found shape \[3, 0, 8, 3\]"),
        (FRAMES, (3, 2, 2), {}, r"grid: expected 2 times a multiple of 2 rows and columns, found \(3, 2, 2\)"),
        (FRAMES, (2, 3, 2), {}, r"grid: expected 2 times a multiple of 2 rows and columns, found \(2, 3, 2\)"),
        (FRAMES, (2, 2, 0), {}, r"grid: expected 2 times a multiple of 2 rows and columns, found \(2, 2, 0\)"),
        (FRAMES, (2, 2, 2), {"resample": "lanczos"}, "resample: expected one of bilinear, bicubic, found 'lanczos'"),
        (FRAMES, (2, 4, 2), {"band": slice(1, 4)}, "band: expected blocks of 2 within 4 rows, found 1 to 4"),
        (FRAMES, (2, 4, 2), {"band": slice(2, 6)}, "band: expected blocks of 2 within 4 rows, found 2 to 6"),
        (FRAMES, (2, 4, 2), {"band": slice(2, 2)}, "band: expected blocks of 2 within 4 rows, found 2 to 2"),
        (FRAMES, (2, 2, 2), {"dtype": torch.float16}, r"dtype: expected float32 or bfloat16, found float16"),
    ],
)
def test_a_wrong_argument_is_named(
    frames: Tensor, grid: tuple[int, int, int], changed: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(KernelError, match=f"patches: {sentence}"):
        patches(frames, grid, **changed)
