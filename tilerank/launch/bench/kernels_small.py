"""Entries of `bench kernels` for the kernels between matrix products. A new one is a function in SMALL or LARGE.

The bytes of their work are all operands read and written, although in a model most of them stay in the caches.
"""

import argparse
from collections.abc import Iterator

import torch
from torch.nn import functional

from tilerank.kernels import core, delta, moe, ops
from tilerank.kernels.reference import delta as delta_reference
from tilerank.parallel.cost import Work

from .entry import Entry, cold_copies

HIDDEN, WIDTH, VOCABULARY, EXPERTS = 4096, 12288, 151936, 128
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
MAX_LARGE_ROWS = 64
"""Kernels over logits run for at most so many rows: no step has many more, and a row is as long as the vocabulary. The
same holds for steps of delta nets, which read a state for each row."""

KEY_HEADS, VALUE_HEADS, DELTA_DIM, CHUNK = 16, 32, 128, 64
"""The delta net of Qwen3.5-9B."""
MIXED = (2 * KEY_HEADS + VALUE_HEADS) * DELTA_DIM
"""Columns of q, k and v."""


def entries(args: argparse.Namespace) -> Iterator[Entry]:
    for rows in args.rows:
        for make_entry in SMALL:
            yield make_entry(rows)
        if rows <= MAX_LARGE_ROWS:
            for make_entry in LARGE:
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


def silu(rows: int) -> Entry:
    x = _bf16(rows, WIDTH)
    return Entry(
        "silu",
        f"{rows} x {WIDTH}",
        "bfloat16",
        Work(2 * x.nbytes),
        lambda _: ops.silu(x),
        lambda _: functional.silu(x),
    )


def sum_parts(rows: int) -> Entry:
    parts = _bf16(16, rows, HIDDEN)
    return Entry(
        "sum_parts",
        f"{rows} x 16 x {HIDDEN}",
        "bfloat16",
        Work(17 * parts[0].nbytes),
        lambda _: ops.sum_parts(parts),
        lambda _: parts.sum(0),
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


def delta_step(rows: int) -> Entry:
    """A decode step of a delta net: every row reads and writes a state, of which there are copies."""
    qkv, a, b, a_log, dt_bias = _delta_inputs(rows)
    shape = (rows, VALUE_HEADS, DELTA_DIM, DELTA_DIM)
    nbytes = torch.Size(shape).numel() * 4
    states = [core.alloc(nbytes, resident=True).view(torch.float32).view(shape) for _ in range(cold_copies(nbytes))]
    slots, lengths = torch.arange(rows, dtype=torch.int32), torch.full((rows,), 2, dtype=torch.int32)

    def run(number: int) -> torch.Tensor:
        state = states[number % len(states)]
        return delta.delta_step(qkv, a, b, a_log, dt_bias, state, slots, lengths, KEY_HEADS)

    return Entry(
        "delta_step",
        f"{rows} x {VALUE_HEADS} x {DELTA_DIM}^2",
        "float32",
        Work(updated=2 * nbytes),
        run,
    )


def delta_rule(rows: int) -> Entry:
    """A prompt of `rows` tokens."""
    qkv, a, b, a_log, dt_bias = _delta_inputs(rows)
    g, beta = delta.delta_gating(a, b, a_log, dt_bias)
    state = torch.zeros(1, VALUE_HEADS, DELTA_DIM, DELTA_DIM)
    batch = _one_sequence(rows)
    of_keys = KEY_HEADS * 2 * CHUNK * DELTA_DIM
    of_values = VALUE_HEADS * (6 * DELTA_DIM**2 + 2 * CHUNK * DELTA_DIM)
    return Entry(
        "delta_rule",
        f"{rows} x {VALUE_HEADS} x {DELTA_DIM}^2",
        "bfloat16",
        Work(3 * qkv.nbytes // 2 + 2 * state.nbytes, fp32=rows * (of_keys + of_values)),
        lambda _: delta.delta_rule(qkv, g, beta, state, *batch, KEY_HEADS),
        lambda _: delta_reference.delta_rule(qkv, g, beta, state, *batch, KEY_HEADS),
    )


def causal_conv(rows: int) -> Entry:
    x, weight, conv = _bf16(rows, MIXED), _bf16(MIXED, 4), _bf16(1, 3, MIXED)
    arguments = (x, weight, conv, *_one_sequence(rows))
    return Entry(
        "causal_conv",
        f"{rows} x {MIXED} x 4",
        "bfloat16",
        Work(2 * x.nbytes + weight.nbytes + 2 * conv.nbytes),
        lambda _: delta.causal_conv(*arguments),
        lambda _: delta_reference.causal_conv(*arguments),
    )


def delta_gating(rows: int) -> Entry:
    _, a, b, a_log, dt_bias = _delta_inputs(rows)
    return Entry(
        "delta_gating",
        f"{rows} x {VALUE_HEADS}",
        "bfloat16",
        Work(6 * a.nbytes),
        lambda _: delta.delta_gating(a, b, a_log, dt_bias),
        lambda _: delta_reference.delta_gating(a, b, a_log, dt_bias),
    )


def gated_norm(rows: int) -> Entry:
    o, z, weight = _bf16(rows, VALUE_HEADS * DELTA_DIM), _bf16(rows, VALUE_HEADS * DELTA_DIM), _bf16(DELTA_DIM)
    return Entry(
        "gated_norm",
        f"{rows} x {VALUE_HEADS} x {DELTA_DIM}",
        "bfloat16",
        Work(3 * o.nbytes),
        lambda _: delta.gated_norm(o, z, weight, 1e-6),
        lambda _: delta_reference.gated_norm(o, z, weight, 1e-6),
    )


def sigmoid_gate(rows: int) -> Entry:
    """The output gate of attention, a part of the query projection."""
    x, projection = _bf16(rows, HEADS, HEAD_DIM), _bf16(rows, HEADS, 2 * HEAD_DIM)
    gate = projection[..., HEAD_DIM:]
    return Entry(
        "sigmoid_gate_",
        f"{rows} x {HEADS} x {HEAD_DIM}",
        "bfloat16",
        Work(3 * x.nbytes),
        lambda _: delta.sigmoid_gate_(x, gate),
    )


def _delta_inputs(rows: int) -> tuple[torch.Tensor, ...]:
    """Return qkv, a, b, a_log and dt_bias."""
    gates = _bf16(rows, VALUE_HEADS), _bf16(rows, VALUE_HEADS), torch.randn(VALUE_HEADS), torch.randn(VALUE_HEADS)
    return _bf16(rows, MIXED), *gates


def _one_sequence(rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return slots, query_starts and seq_lens of a sequence that begins with the step."""
    slots, query_starts, seq_lens = (torch.tensor(values, dtype=torch.int32) for values in ([0], [0, rows], [rows]))
    return slots, query_starts, seq_lens


def _bf16(*shape: int) -> torch.Tensor:
    return torch.randn(shape).to(torch.bfloat16)


DELTA = (delta_rule, causal_conv, delta_gating, gated_norm, sigmoid_gate)
SMALL = (rms_norm, add_rms_norm, rotary, silu_mul, silu, sum_parts, embedding, softmax_top_k, *DELTA)
LARGE = (argmax, sample, delta_step)
