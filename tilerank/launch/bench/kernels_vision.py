"""Entries of `bench kernels` for vision encoders: patches of pictures, and the kernels of an encoder's layers.

Sizes are those of the encoder of Qwen3-VL-8B, for attention also of Qwen3-VL-2B. The bytes of their work are all
operands read and written.
"""

import argparse
from collections.abc import Iterator

import torch
from torch.nn import functional

from tilerank.kernels import audio, pictures, vision
from tilerank.kernels.packed_sequences import attention_varlen
from tilerank.parallel.cost import Work
from tilerank.runtime.models.mel import mel_filters

from .entry import Entry

HIDDEN, WIDTH, HEADS, HEAD_DIM, SIDE = 1152, 4304, 16, 72, 48
PATCHES = 1024
ATTENTION_PATCHES, HEAD_DIMS = 4096, (64, HEAD_DIM)
"""A picture of 1024 x 1024 pixels, and the heads of both models."""
PICTURES = (((1080, 1920), (68, 120)), ((3024, 4032), (64, 84)))
"""Height and width in pixels, then in patches: a frame of a video, hardly resized, and a photograph that shrinks."""


def entries(args: argparse.Namespace) -> Iterator[Entry]:
    for size, grid in PICTURES:
        yield patches(size, grid)
    yield layer_norm()
    yield gelu()
    yield rotary_float()
    yield interpolate_rows()
    yield log_mel()
    yield unfold()
    for head_dim in HEAD_DIMS:
        yield attention(ATTENTION_PATCHES, head_dim)


def patches(size: tuple[int, int], grid: tuple[int, int]) -> Entry:
    height, width = size
    frames = torch.randint(0, 256, (1, height, width, 3), dtype=torch.uint8)
    half = (0.5, 0.5, 0.5)

    def run(_: int) -> object:
        return pictures.patches(frames, (1, *grid), mean=half, std=half, resample="bicubic", dtype=torch.bfloat16)

    return Entry(
        "patches",
        f"{height} x {width} pixels",
        "bfloat16",
        Work(frames.nbytes + grid[0] * grid[1] * 1536 * 2),
        run,
    )


def layer_norm() -> Entry:
    x, weight, bias = _bf16(PATCHES, HIDDEN), _bf16(HIDDEN), _bf16(HIDDEN)
    return Entry(
        "layer_norm",
        f"{PATCHES} x {HIDDEN}",
        "bfloat16",
        Work(2 * x.nbytes),
        lambda _: vision.layer_norm(x, weight, bias, 1e-6),
        lambda _: functional.layer_norm(x, (HIDDEN,), weight, bias, 1e-6),
    )


def gelu() -> Entry:
    x = _bf16(PATCHES, WIDTH)
    return Entry(
        "gelu",
        f"{PATCHES} x {WIDTH}",
        "bfloat16",
        Work(2 * x.nbytes),
        lambda _: vision.gelu(x, True),
        lambda _: functional.gelu(x, approximate="tanh"),
    )


def rotary_float() -> Entry:
    q, k = _bf16(PATCHES, HEADS, HEAD_DIM), _bf16(PATCHES, HEADS, HEAD_DIM)
    turns = torch.rand(PATCHES, HEAD_DIM // 2) * 6
    angles = torch.stack([turns.cos(), turns.sin()], 1)
    return Entry(
        "rotary_float_",
        f"{PATCHES} x {HEADS}+{HEADS} x {HEAD_DIM}",
        "bfloat16",
        Work(2 * (q.nbytes + k.nbytes) + angles.nbytes),
        lambda _: vision.rotary_float_(q, k, angles),
    )


def interpolate_rows() -> Entry:
    table, weights = _bf16(SIDE * SIDE, HIDDEN), torch.rand(PATCHES, 4)
    rows = torch.randint(SIDE * SIDE, (PATCHES, 4))
    return Entry(
        "interpolate_rows",
        f"{PATCHES} x {HIDDEN}",
        "bfloat16",
        Work(5 * PATCHES * HIDDEN * table.itemsize),
        lambda _: vision.interpolate_rows(table, rows, weights),
    )


def log_mel() -> Entry:
    """The spectrogram of 10 seconds, in fp64: two products for the transform and one for the bands."""
    samples, filters = torch.randn(160000), mel_filters()
    frames, mels = 1000, filters.shape[1]
    return Entry(
        "log_mel",
        f"{frames} frames",
        "float32",
        Work(samples.nbytes + frames * mels * 4),
        lambda _: audio.log_mel(samples, filters, slice(0, frames)),
    )


def unfold() -> Entry:
    """What the second convolution of Qwen3-Omni's audio tower multiplies for a second of sound."""
    x, rows = _bf16(50, 64, 480), 25 * 32
    return Entry(
        "unfold",
        f"{rows} x {9 * x.shape[2]}",
        "bfloat16",
        Work(x.nbytes + rows * 9 * x.shape[2] * 2),
        lambda _: audio.unfold(x, slice(0, rows)),
    )


def attention(patches: int, head_dim: int) -> Entry:
    """Attention of all patches of a picture to each other. Called as by the model: packing keys and values is part."""
    q, k, v = (_bf16(patches, HEADS, head_dim) for _ in range(3))
    edges = torch.tensor([0, patches], dtype=torch.int32)
    q_heads, k_heads, v_heads = (x.transpose(0, 1)[None] for x in (q, k, v))
    return Entry(
        "attention_varlen",
        f"{patches} x {HEADS} x {head_dim}",
        "bfloat16",
        Work(4 * q.nbytes, bf16=4 * HEADS * head_dim * patches**2),
        lambda _: attention_varlen(q, k, v, edges, head_dim**-0.5),
        lambda _: functional.scaled_dot_product_attention(q_heads, k_heads, v_heads)[0].transpose(0, 1),
    )


def _bf16(*shape: int) -> torch.Tensor:
    return torch.randn(shape).to(torch.bfloat16)
