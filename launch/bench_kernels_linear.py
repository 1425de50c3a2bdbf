"""Entries of `bench kernels` for linear: every weight format, and torch's (oneDNN's) bf16 and fp32."""

import argparse
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch.nn import functional

from tilerank.kernels.linear import linear

from .bench_entry import Entry, copies, replayed
from .bench_formats import FORMATS
from .bench_work import Work, operations


def entries(args: argparse.Namespace) -> Iterator[Entry]:
    for name in args.formats:
        for n, k in args.shape:
            yield from _linear(name, n, k, args.m)


def _linear(name: str, n: int, k: int, ms: Sequence[int]) -> Iterator[Entry]:
    """Bytes are those of the packed weight alone: what is left when M is small."""
    form = FORMATS[name]
    count = copies(form.nbytes(n, k))
    first = torch.empty(n, k, dtype=form.activations).normal_(0, 0.02)
    plain = [first.roll(number, 0) for number in range(count)]
    packed = []
    for weight in plain:
        packed.append(form.empty(n, k))
        packed[-1].write(weight)
    comparable = name in ("bfloat16", "float32")
    if not comparable:
        plain.clear()
    for m in ms:
        x = torch.randn(m, k).to(form.activations)
        yield Entry(
            "linear",
            f"{m} x {n} x {k}",
            name,
            Work(form.nbytes(n, k), **{operations(form): 2 * m * n * k}),
            replayed([partial(linear, x, weight) for weight in packed]),
            (lambda number, x=x: functional.linear(x, plain[number % count])) if comparable else None,  # type: ignore[misc]
        )
