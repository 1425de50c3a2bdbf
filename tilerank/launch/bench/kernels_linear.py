"""Entries of `bench kernels` for linear: every weight format; bf16 and fp32 against torch (oneDNN)."""

import argparse
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch.nn import functional

from tilerank.kernels.linear import linear
from tilerank.parallel.cost import Work

from .entry import Entry, cold_copies, replayed
from .formats import WEIGHT_FORMATS


def entries(args: argparse.Namespace) -> Iterator[Entry]:
    for name in args.formats:
        for n, k in args.shape:
            yield from _linear(name, n, k, args.m)


def _linear(name: str, n: int, k: int, ms: Sequence[int]) -> Iterator[Entry]:
    """Entries of one weight [n, k]. The bytes of their work are the packed weight; x and the output are not counted."""
    weight_format = WEIGHT_FORMATS[name]
    first = torch.empty(n, k, dtype=weight_format.activations).normal_(0, 0.02)
    plain = [first.roll(number, 0) for number in range(cold_copies(weight_format.nbytes(n, k)))]
    packed = []
    for weight in plain:
        packed.append(weight_format.empty(n, k))
        packed[-1].write(weight)
    if name not in ("bfloat16", "float32"):
        plain.clear()  # torch has no product with these formats
    for m in ms:
        x = torch.randn(m, k).to(weight_format.activations)
        work = Work(weight_format.nbytes(n, k), **{weight_format.operands: 2 * m * n * k})
        ours = replayed([partial(linear, x, weight) for weight in packed])
        theirs = [partial(functional.linear, x, weight) for weight in plain]
        yield Entry("linear", f"{m} x {n} x {k}", work, ours, theirs, format=name)
