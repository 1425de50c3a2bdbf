"""Entries of `bench kernels` for the kernels between matrix products. A new one is a function in SMALL or LOGITS.

The bytes of their work are all operands read and written, although in a model most of them stay in the caches.
"""

import argparse
from collections.abc import Iterator

import torch
from torch.nn import functional

from tilerank.kernels import moe, ops
from tilerank.parallel.cost import Work

from .entry import Entry

HIDDEN, WIDTH, VOCABULARY, EXPERTS = 4096, 12288, 151936, 128
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
MAX_LOGITS_ROWS = 64
"""Kernels over logits run for at most so many rows: no step has many more, and a row is as long as the vocabulary."""


def entries(args: argparse.Namespace) -> Iterator[Entry]:
    for rows in args.rows:
        for make_entry in SMALL:
            yield make_entry(rows)
        if rows <= MAX_LOGITS_ROWS:
            for make_entry in LOGITS:
                yield make_entry(rows)


def rms_norm(rows: int) -> Entry:
    x, weight = _bf16(rows, HIDDEN), torch.ones(HIDDEN, dtype=torch.bfloat16)
    return Entry(
        "rms_norm",
        f"{rows} x {HIDDEN}",
        "bfloat16",
        Work(2 * x.nbytes),
        lambda _: ops.rms_norm(x, weight, 1e-6),
        lambda _: functional.rms_norm(x, (HIDDEN,), weight, 1e-6),
    )


def add_rms_norm(rows: int) -> Entry:
    x, residual, weight = _bf16(rows, HIDDEN), _bf16(rows, HIDDEN), torch.ones(HIDDEN, dtype=torch.bfloat16)
    return Entry(
        "add_rms_norm",
        f"{rows} x {HIDDEN}",
        "bfloat16",
        Work(4 * x.nbytes),
        lambda _: ops.add_rms_norm(x, residual, weight, 1e-6),
    )


def rotary(rows: int) -> Entry:
    q, k = _bf16(rows, HEADS, HEAD_DIM), _bf16(rows, KV_HEADS, HEAD_DIM)
    angles = torch.rand(rows, HEAD_DIM // 2) * 6
    rope = torch.stack([angles.cos(), angles.sin()], 1).to(torch.bfloat16)
    return Entry(
        "rotary_",
        f"{rows} x {HEADS}+{KV_HEADS} x {HEAD_DIM}",
        "bfloat16",
        Work(2 * (q.nbytes + k.nbytes)),
        lambda _: ops.rotary_(q, k, rope),
    )


def silu_mul(rows: int) -> Entry:
    gate_up = _bf16(rows, 2 * WIDTH)
    return Entry(
        "silu_mul",
        f"{rows} x {WIDTH}",
        "bfloat16",
        Work(3 * gate_up.nbytes // 2),
        lambda _: ops.silu_mul(gate_up),
        lambda _: functional.silu(gate_up[:, :WIDTH]) * gate_up[:, WIDTH:],
    )


def embedding(rows: int) -> Entry:
    table = torch.arange(VOCABULARY).to(torch.bfloat16).unsqueeze(1).expand(-1, HIDDEN).contiguous()
    ids = torch.randint(VOCABULARY, (rows,))
    return Entry(
        "embedding",
        f"{rows} x {HIDDEN}",
        "bfloat16",
        Work(2 * rows * HIDDEN * table.itemsize),
        lambda number: ops.embedding((ids + 977 * number) % VOCABULARY, table),
        lambda number: functional.embedding((ids + 977 * number) % VOCABULARY, table),
    )


def softmax_top_k(rows: int) -> Entry:
    logits = _bf16(rows, EXPERTS)

    def torch_softmax_top_k(_: int) -> object:
        weights, ids = logits.softmax(-1, dtype=torch.float32).topk(8)
        return ids, weights / weights.sum(-1, keepdim=True)

    return Entry(
        "softmax_top_k",
        f"{rows} x 8 of {EXPERTS}",
        "bfloat16",
        Work(logits.nbytes + rows * 8 * 8),
        lambda _: moe.softmax_top_k(logits, 8, renormalize=True),
        torch_softmax_top_k,
    )


def argmax(rows: int) -> Entry:
    logits = torch.randn(rows, VOCABULARY)
    return Entry(
        "argmax",
        f"{rows} x {VOCABULARY}",
        "float32",
        Work(logits.nbytes),
        lambda _: ops.argmax(logits),
        lambda _: logits.argmax(-1),
    )


def sample(rows: int) -> Entry:
    """Sampling with the default settings of Qwen3: temperature 0.6, top_k 20, top_p 0.95."""
    logits, uniform = 3 * torch.randn(rows, VOCABULARY), torch.rand(rows)
    temperature, top_p = torch.full((rows,), 0.6), torch.full((rows,), 0.95)
    top_k = torch.full((rows,), 20, dtype=torch.int32)
    return Entry(
        "sample",
        f"{rows} x {VOCABULARY}",
        "float32",
        Work(logits.nbytes),
        lambda _: ops.sample(logits, temperature, top_k, top_p, uniform),
    )


def _bf16(*shape: int) -> torch.Tensor:
    return torch.randn(shape).to(torch.bfloat16)


SMALL = (rms_norm, add_rms_norm, rotary, silu_mul, embedding, softmax_top_k)
LOGITS = (argmax, sample)
