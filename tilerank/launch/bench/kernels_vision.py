"""Entries of `bench kernels` for pictures and sound: those of encoders, and of what makes sound.

Sizes are those of the encoder of Qwen3-VL-8B, for attention also of Qwen3-VL-2B, and of Qwen3-Omni for sound. The bytes
of their work are all operands read and written.
"""

import argparse
from collections.abc import Iterator
from functools import partial

import torch
from torch.nn import functional

from tilerank.kernels import audio, core, pictures, tower_ops
from tilerank.kernels.convolution import convolve_, convolve_channels, tap_columns
from tilerank.kernels.packed_sequences import attention_varlen
from tilerank.kernels.weight_formats.floats import FloatWeight
from tilerank.parallel.cost import Work
from tilerank.runtime.models.towers.audio import mel_filters

from .entry import Entry

HIDDEN, WIDTH, HEADS, HEAD_DIM, SIDE = 1152, 4304, 16, 72, 48
PATCHES = 1024
ATTENTION_PATCHES, HEAD_DIMS = 4096, (64, HEAD_DIM)
"""A picture of 1024 x 1024 pixels, and the heads of both models."""
CONVOLUTIONS = ((768, 512, 7), (768, 512, 1), (96, 30720, 7), (96, 30720, 1))
"""Channels, rows and taps in the first and the last residual units of code2wav, for 16 frames."""
SOUND_ROWS = 64
PICTURES = (((1080, 1920), (68, 120)), ((3024, 4032), (64, 84)))
"""Height and width in pixels, then in patches: a frame of a video, hardly resized, and a photograph that shrinks."""


def entries(args: argparse.Namespace) -> Iterator[Entry]:
    for size, grid in PICTURES:
        yield patches(size, grid)
    yield from of_patches()
    yield from of_spectrograms()
    for channels, rows, taps in CONVOLUTIONS:
        yield convolve(channels, rows, taps)
    yield channel_convolution()
    for head_dim in HEAD_DIMS:
        yield attention(ATTENTION_PATCHES, head_dim)


def patches(size: tuple[int, int], grid: tuple[int, int]) -> Entry:
    height, width = size
    frames = torch.randint(0, 256, (1, height, width, 3), dtype=torch.uint8)
    half = (0.5, 0.5, 0.5)
    work = Work(frames.nbytes + grid[0] * grid[1] * 1536 * 2)
    run = partial(pictures.patches, frames, (1, *grid), mean=half, std=half, resample="bicubic", dtype=torch.bfloat16)
    return Entry("patches", f"{height} x {width} pixels", work, [run])


def of_patches() -> Iterator[Entry]:
    """The kernels between the products of a tower."""
    x, weight, bias = _bf16(PATCHES, HIDDEN), _bf16(HIDDEN), _bf16(HIDDEN)
    shape, norm = f"{PATCHES} x {HIDDEN}", partial(functional.layer_norm, x, (HIDDEN,), weight, bias, 1e-6)
    yield Entry("layer_norm", shape, Work(2 * x.nbytes), [partial(tower_ops.layer_norm, x, weight, bias, 1e-6)], [norm])

    y = _bf16(PATCHES, WIDTH)
    gelu = partial(functional.gelu, y, approximate="tanh")
    yield Entry("gelu", f"{PATCHES} x {WIDTH}", Work(2 * y.nbytes), [partial(tower_ops.gelu, y, True)], [gelu])
    low, high = torch.tensor([-1.0]).bfloat16(), torch.tensor([1.0]).bfloat16()
    clamp, own = partial(torch.clamp, y, low, high), partial(tower_ops.clamp, y, low, high)
    yield Entry("clamp", f"{PATCHES} x {WIDTH}", Work(2 * y.nbytes), [own], [clamp])

    q, k = _bf16(PATCHES, HEADS, HEAD_DIM), _bf16(PATCHES, HEADS, HEAD_DIM)
    turns = torch.rand(PATCHES, HEAD_DIM // 2) * 6
    angles = torch.stack([turns.cos(), turns.sin()], 1)
    work, rotated = Work(2 * (q.nbytes + k.nbytes) + angles.nbytes), f"{PATCHES} x {HEADS}+{HEADS} x {HEAD_DIM}"
    yield Entry("rotary_float_", rotated, work, [partial(tower_ops.rotary_float_, q, k, angles)])

    table, weights = _bf16(SIDE * SIDE, HIDDEN), torch.rand(PATCHES, 4)
    rows, work = torch.randint(SIDE * SIDE, (PATCHES, 4)), Work(5 * PATCHES * HIDDEN * table.itemsize)
    yield Entry("interpolate_rows", shape, work, [partial(tower_ops.interpolate_rows, table, rows, weights)])


def of_spectrograms() -> Iterator[Entry]:
    """The spectrogram of 10 seconds, in fp64: two products for the transform and one for the bands; then what the
    second convolution of Qwen3-Omni's audio tower multiplies for a second of sound."""
    samples, filters, frames = torch.randn(160000), mel_filters(), 1000
    work = Work(samples.nbytes + frames * filters.shape[1] * 4)
    log_mel = partial(audio.log_mel, samples, filters, slice(0, frames))
    yield Entry("log_mel", f"{frames} frames", work, [log_mel], format="float32")
    x, rows = _bf16(50, 64, 480), 25 * 32
    work = Work(x.nbytes + rows * 9 * x.shape[2] * 2)
    yield Entry("unfold", f"{rows} x {9 * x.shape[2]}", work, [partial(audio.unfold, x, slice(0, rows))])


def convolve(channels: int, rows: int, taps: int) -> Entry:
    dilation = 3 if taps > 1 else 1
    x, bias = _bf16(rows + (taps - 1) * dilation, channels), _bf16(channels)
    planes, theirs = x.T[None].contiguous(), _bf16(channels, channels, taps)
    columns = tap_columns(channels, taps)
    weight = FloatWeight.empty(channels, taps * columns, torch.bfloat16)
    for tap in range(taps):
        weight.write(theirs[:, :, tap], 0, tap * columns)
    out = core.empty((rows, channels), torch.bfloat16)

    def run() -> torch.Tensor:
        convolve_(x, weight, bias, taps=taps, dilation=dilation, out=out)
        return out

    work = Work(x.nbytes + out.nbytes + theirs.nbytes, bf16=2 * rows * taps * channels**2)
    in_torch = partial(functional.conv1d, planes, theirs, bias, dilation=dilation)
    return Entry("convolve_", f"{rows} x {channels}, {taps} taps", work, [run], [lambda: in_torch()[0].T])


def channel_convolution() -> Entry:
    """A convolution of each channel alone, of the last stage before the decoder of code2wav, for 16 frames."""
    x, weight, bias = _bf16(SOUND_ROWS + 6, 1024), _bf16(7, 1024), _bf16(1024)
    planes, theirs = x.T[None].contiguous(), weight.T[:, None].contiguous()
    run = partial(convolve_channels, x, weight, bias)
    in_torch = partial(functional.conv1d, planes, theirs, bias, groups=1024)
    shape = f"{SOUND_ROWS} x 1024, 7 taps"
    return Entry("convolve_channels", shape, Work(2 * x.nbytes), [run], [lambda: in_torch()[0].T])


def attention(patches: int, head_dim: int) -> Entry:
    """Attention of all patches of a picture to each other. Called as by the model: packing keys and values is part."""
    q, k, v = (_bf16(patches, HEADS, head_dim) for _ in range(3))
    edges = torch.tensor([0, patches], dtype=torch.int32)
    q_heads, k_heads, v_heads = (x.transpose(0, 1)[None] for x in (q, k, v))
    in_torch = partial(functional.scaled_dot_product_attention, q_heads, k_heads, v_heads)
    run = partial(attention_varlen, q, k, v, edges, head_dim**-0.5)
    work = Work(4 * q.nbytes, bf16=4 * HEADS * head_dim * patches**2)
    shape = f"{patches} x {HEADS} x {head_dim}"
    return Entry("attention_varlen", shape, work, [run], [lambda: in_torch()[0].transpose(0, 1)])


def _bf16(*shape: int) -> torch.Tensor:
    return torch.randn(shape).to(torch.bfloat16)
