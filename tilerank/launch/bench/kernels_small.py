"""Entries of `bench kernels` for the kernels between matrix products.

The bytes of their work are all operands read and written, although in a model most of them stay in the caches.
"""

import argparse
from collections.abc import Iterable, Iterator
from functools import partial

import torch
from torch.nn import functional

from tilerank.kernels import core, delta, moe, ops
from tilerank.kernels.reference import delta as delta_reference
from tilerank.kernels.state_slots import StateSlots
from tilerank.kernels.temperature import scale_by_position_
from tilerank.parallel.cost import Work

from .entry import Entry, cold_copies

HIDDEN, WIDTH, VOCABULARY, EXPERTS, TOP_K = 4096, 12288, 151936, 128, 8
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
MAX_LARGE_ROWS = 64
"""Kernels over logits run for at most so many rows: no step has many more, and a row is as long as the vocabulary. The
same holds for steps of delta nets, which read a state for each row."""
MAX_DRAFTED_ROWS = 8
"""Steps of delta nets with drafts run for at most so many rows of a sequence."""

KEY_HEADS, VALUE_HEADS, DELTA_DIM, CHUNK = 16, 32, 128, 64
"""The delta net of Qwen3.5-9B."""
MIXED = (2 * KEY_HEADS + VALUE_HEADS) * DELTA_DIM
"""Columns of q, k and v."""


def entries(args: argparse.Namespace) -> Iterator[Entry]:
    for rows in args.rows:
        yield from of_hidden_rows(rows)
        yield embedding(rows)
        yield softmax_top_k(rows)
        yield from of_delta_nets(rows)
        if rows <= MAX_LARGE_ROWS:
            yield from of_logits(rows)
            yield delta_step(rows)
        if 1 < rows <= MAX_DRAFTED_ROWS:
            yield delta_step(1, drafts=rows - 1)


def of_hidden_rows(rows: int) -> Iterator[Entry]:
    """Norms, rotation, activations and sums over ranks."""
    x, residual, weight = _bf16(rows, HIDDEN), _bf16(rows, HIDDEN), torch.ones(HIDDEN, dtype=torch.bfloat16)
    shape, norm = f"{rows} x {HIDDEN}", partial(functional.rms_norm, x, (HIDDEN,), weight, 1e-6)
    yield Entry("rms_norm", shape, Work(2 * x.nbytes), [partial(ops.rms_norm, x, weight, 1e-6)], [norm])
    yield Entry("add_rms_norm", shape, Work(4 * x.nbytes), [partial(ops.add_rms_norm, x, residual, weight, 1e-6)])

    q, k = _bf16(rows, HEADS, HEAD_DIM), _bf16(rows, KV_HEADS, HEAD_DIM)
    angles = torch.rand(rows, HEAD_DIM // 2) * 6
    rope = torch.stack([angles.cos(), angles.sin()], 1).to(torch.bfloat16)
    shape = f"{rows} x {HEADS}+{KV_HEADS} x {HEAD_DIM}"
    work, by = Work(2 * (q.nbytes + k.nbytes)), torch.ones(HEAD_DIM, dtype=torch.bfloat16)
    yield Entry("rotary_", shape, work, [partial(ops.rotary_, q, k, rope)])
    yield Entry("norm_rotary_", shape, work, [partial(ops.norm_rotary_, q, k, by, by, 1e-6, rope)])
    first = torch.zeros(rows, dtype=torch.int64)  # the factor is 1 there, so that repeated runs leave queries finite
    scale = partial(scale_by_position_, q, first, 0.1, 16384)
    yield Entry("scale_by_position_", f"{rows} x {HEADS} x {HEAD_DIM}", Work(2 * q.nbytes), [scale])

    gate_up = _bf16(rows, 2 * WIDTH)
    product = partial(lambda gate, up: functional.silu(gate) * up, gate_up[:, :WIDTH], gate_up[:, WIDTH:])
    wide = f"{rows} x {WIDTH}"
    yield Entry("silu_mul", wide, Work(3 * gate_up.nbytes // 2), [partial(ops.silu_mul, gate_up)], [product])
    y = _bf16(rows, WIDTH)
    yield Entry("silu", wide, Work(2 * y.nbytes), [partial(ops.silu, y)], [partial(functional.silu, y)])

    parts = _bf16(16, rows, HIDDEN)
    work = Work(17 * parts[0].nbytes)
    yield Entry("sum_parts", f"{rows} x 16 x {HIDDEN}", work, [partial(ops.sum_parts, parts)], [partial(parts.sum, 0)])


def embedding(rows: int) -> Entry:
    """Calls cycle through rows of the table, not through tables."""
    table = torch.arange(VOCABULARY).to(torch.bfloat16).unsqueeze(1).expand(-1, HIDDEN).contiguous()
    nbytes = rows * HIDDEN * table.itemsize
    ids, copies = torch.randint(VOCABULARY, (rows,)), range(cold_copies(nbytes))
    tokens = [(ids + 977 * number) % VOCABULARY for number in copies]
    ours = [partial(ops.embedding, some, table) for some in tokens]
    theirs = [partial(functional.embedding, some, table) for some in tokens]
    return Entry("embedding", f"{rows} x {HIDDEN}", Work(2 * nbytes), ours, theirs)


def softmax_top_k(rows: int) -> Entry:
    logits = _bf16(rows, EXPERTS)

    def torch_softmax_top_k() -> object:
        weights, ids = logits.softmax(-1, dtype=torch.float32).topk(TOP_K)
        return ids, weights / weights.sum(-1, keepdim=True)

    work, ours = Work(logits.nbytes + rows * TOP_K * 8), partial(moe.softmax_top_k, logits, TOP_K, renormalize=True)
    return Entry("softmax_top_k", f"{rows} x {TOP_K} of {EXPERTS}", work, [ours], [torch_softmax_top_k])


def of_logits(rows: int) -> Iterator[Entry]:
    """Sampling has the default settings of Qwen3: temperature 0.6, top_k 20, top_p 0.95; and those without top_k. Texts
    have 4,096 different tokens with penalties, and a mask of a grammar."""
    logits, uniform = 3 * torch.randn(rows, VOCABULARY), torch.rand(rows)
    temperature, top_p, min_p = torch.full((rows,), 0.6), torch.full((rows,), 0.95), torch.zeros(rows)
    shape, work, best = f"{rows} x {VOCABULARY}", Work(logits.nbytes), partial(logits.argmax, -1)
    yield Entry("argmax", shape, work, [partial(ops.argmax, logits)], [best], format="float32")
    for k in (20, 0):
        top_k = torch.full((rows,), k, dtype=torch.int32)
        sample = partial(ops.sample, logits, temperature, top_k, top_p, min_p, uniform)
        yield Entry("sample", f"{shape}, top {k}" if k else shape, work, [sample], format="float32")

    ids = _int32(range(0, VOCABULARY, 37))[:4096]
    starts, numbers = torch.arange(rows + 1, dtype=torch.int32) * len(ids), torch.tensor([0.0, 1.0, 0.0])
    masks = torch.full((1, -(-VOCABULARY // 8)), 0x55, dtype=torch.uint8)
    none, every = _int32([0] * (rows + 1)), _int32([0] * rows)
    edit = partial(
        ops.edit_logits_,
        logits,
        starts,
        ids.repeat(rows),
        numbers.repeat(len(ids) * rows, 1),
        every,
        masks,
        none,
        none[:0],
    )
    yield Entry("edit_logits_", shape, Work(updated=2 * logits.nbytes), [edit], format="float32")
    score = partial(ops.log_probs, logits, torch.arange(rows), torch.zeros(rows, dtype=torch.int64), 5)
    yield Entry("log_probs", shape, work, [score], format="float32")


def _int32(values: Iterable[int]) -> torch.Tensor:
    return torch.tensor([*values], dtype=torch.int32)


def delta_step(sequences: int, drafts: int = 0) -> Entry:
    """A decode step of a delta net: every sequence reads and writes a state, of which there are copies, whatever the
    number of its drafts."""
    qkv, a, b, a_log, dt_bias = _delta_inputs(sequences * (1 + drafts))
    shape = (sequences, VALUE_HEADS, DELTA_DIM, DELTA_DIM)
    nbytes = torch.Size(shape).numel() * 4
    states = [core.alloc(nbytes, resident=True).view(torch.float32).view(shape) for _ in range(cold_copies(nbytes))]
    slots = torch.arange(sequences, dtype=torch.int32).repeat_interleave(1 + drafts)
    batch = (slots, torch.zeros_like(slots), torch.full_like(slots, 2))
    calls = [
        partial(delta.delta_step, qkv, a, b, a_log, dt_bias, _slots(state, drafts), *batch, KEY_HEADS)
        for state in states
    ]
    rows = f"{sequences} + {drafts}" if drafts else str(sequences)
    work = Work(updated=2 * nbytes)
    return Entry("delta_step", f"{rows} x {VALUE_HEADS} x {DELTA_DIM}^2", work, calls, format="float32")


def of_delta_nets(rows: int) -> Iterator[Entry]:
    """The kernels for a prompt of `rows` tokens against their references, and the output gate of attention."""

    def entry(kernel: str, shape: str, work: Work, *operands: object) -> Entry:
        ours, reference = (partial(getattr(module, kernel), *operands) for module in (delta, delta_reference))
        return Entry(kernel, f"{rows} x {shape}", work, [ours], [reference])

    qkv, a, b, a_log, dt_bias = _delta_inputs(rows)
    g, beta = delta.delta_gating(a, b, a_log, dt_bias)
    states = _slots(torch.zeros(1, VALUE_HEADS, DELTA_DIM, DELTA_DIM), drafts=0)
    of_keys = KEY_HEADS * 2 * CHUNK * DELTA_DIM
    of_values = VALUE_HEADS * (6 * DELTA_DIM**2 + 2 * CHUNK * DELTA_DIM)
    work = Work(3 * qkv.nbytes // 2 + 2 * states.state.nbytes, fp32=rows * (of_keys + of_values))
    batch = _one_sequence(rows)
    yield entry("delta_rule", f"{VALUE_HEADS} x {DELTA_DIM}^2", work, qkv, g, beta, states, *batch, KEY_HEADS)

    x, weight = _bf16(rows, MIXED), _bf16(MIXED, 4)
    work = Work(2 * x.nbytes + weight.nbytes + 2 * states.conv.nbytes)
    yield entry("causal_conv", f"{MIXED} x 4", work, x, weight, states.conv, *batch)
    yield entry("delta_gating", f"{VALUE_HEADS}", Work(6 * a.nbytes), a, b, a_log, dt_bias)

    o, z, scale = _bf16(rows, VALUE_HEADS * DELTA_DIM), _bf16(rows, VALUE_HEADS * DELTA_DIM), _bf16(DELTA_DIM)
    yield entry("gated_norm", f"{VALUE_HEADS} x {DELTA_DIM}", Work(3 * o.nbytes), o, z, scale, 1e-6)

    # The gate is a part of the query projection.
    q, gate = _bf16(rows, HEADS, HEAD_DIM), _bf16(rows, HEADS, 2 * HEAD_DIM)[..., HEAD_DIM:]
    shape = f"{rows} x {HEADS} x {HEAD_DIM}"
    yield Entry("sigmoid_gate_", shape, Work(3 * q.nbytes), [partial(delta.sigmoid_gate_, q, gate)])


def _delta_inputs(rows: int) -> tuple[torch.Tensor, ...]:
    """Return qkv, a, b, a_log and dt_bias."""
    gates = _bf16(rows, VALUE_HEADS), _bf16(rows, VALUE_HEADS), torch.randn(VALUE_HEADS), torch.randn(VALUE_HEADS)
    return _bf16(rows, MIXED), *gates


def _slots(state: torch.Tensor, drafts: int) -> StateSlots:
    """Return slots with these matrices, with room for so many drafts."""
    slots, heads = state.shape[:2]
    gates = torch.zeros(slots, drafts, 2 * heads)
    return StateSlots(_bf16(slots, 3 + drafts, MIXED), state, _bf16(slots, drafts, MIXED), gates)


def _one_sequence(rows: int) -> tuple[torch.Tensor, ...]:
    """Return slots, kept, query_starts and seq_lens of a sequence that begins with the step."""
    return tuple(_int32(values) for values in ([0], [0], [0, rows], [rows]))


def _bf16(*shape: int) -> torch.Tensor:
    return torch.randn(shape).to(torch.bfloat16)
