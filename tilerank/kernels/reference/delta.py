"""`delta.py` in plain torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import KernelError
from ..state_slots import StateSlots
from .ops import by_row

CHUNK = 64
EPS = 1e-6  # of the lengths of q and k


def causal_conv(
    x: Tensor, weight: Tensor, conv: Tensor, slots: Tensor, kept: Tensor, query_starts: Tensor, seq_lens: Tensor
) -> Tensor:
    """Convolve every sequence, behind the window in its slot and the drafts that were kept."""
    out = torch.empty(x.shape, dtype=x.dtype)
    before = weight.shape[1] - 1
    sizes = (conv.shape[0], conv.shape[1] - before, x.shape[0])
    for one in _sequences("causal_conv", slots, kept, query_starts, seq_lens, *sizes):
        if one.slot < 0:
            out[one.start] = out[-1 - one.slot]
            continue
        window = conv[one.slot, one.kept : one.kept + before]
        inputs = torch.cat([torch.zeros_like(window) if one.fresh else window, x[one.start : one.end]])
        sums = torch.zeros(one.end - one.start, x.shape[1])
        for i, tap in enumerate(weight.float().T):
            sums += tap * inputs[i : i + one.end - one.start].float()
        out[one.start : one.end] = by_row(sums, F.silu)
        left = inputs[one.stop - one.start :]
        conv[one.slot, : len(left)] = left
    return out


def delta_gating(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return -exp(a_log) * softplus(a + dt_bias) and sigmoid(b)."""
    rates = by_row(a.float() + dt_bias.float(), F.softplus)
    return -a_log.float().exp() * rates, by_row(b, torch.sigmoid).float()


def delta_rule(
    qkv: Tensor,
    g: Tensor,
    beta: Tensor,
    states: StateSlots,
    slots: Tensor,
    kept: Tensor,
    query_starts: Tensor,
    seq_lens: Tensor,
    key_heads: int,
) -> Tensor:
    """One row: the recurrence; several: chunks of 64."""
    num_slots, value_heads, _, dv = states.state.shape
    out = torch.empty(qkv.shape[0], value_heads * dv, dtype=qkv.dtype)
    sizes = (num_slots, states.drafts.shape[1], qkv.shape[0])
    for one in _sequences("delta_rule", slots, kept, query_starts, seq_lens, *sizes):
        if one.slot < 0:
            out[one.start] = out[-1 - one.slot]
        elif value_heads:
            drafts, gates = states.drafts[one.slot], states.draft_gates[one.slot]
            state = states.state[one.slot].clone()
            if one.fresh:
                state.zero_()
            for j in range(one.kept):
                decays, rates = gates[j : j + 1].chunk(2, dim=1)
                _take_in(state, drafts[j : j + 1], decays, rates, key_heads)
            if one.start < one.stop:
                rows = slice(one.start, one.stop)
                out[rows] = _take_in(state, qkv[rows], g[rows], beta[rows], key_heads)
            states.state[one.slot] = state
            for j, row in enumerate(range(one.stop, one.end)):
                out[row] = _take_in(state, qkv[row : row + 1], g[row : row + 1], beta[row : row + 1], key_heads)[0]
                drafts[j], gates[j] = qkv[row], torch.cat([g[row], beta[row]])
    return out


def delta_step(
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    states: StateSlots,
    slots: Tensor,
    kept: Tensor,
    seq_lens: Tensor,
    key_heads: int,
) -> Tensor:
    """delta_gating and delta_rule of sequences of one row."""
    g, beta = delta_gating(a, b, a_log, dt_bias)
    query_starts = torch.arange(qkv.shape[0] + 1, dtype=torch.int32)
    return delta_rule(qkv, g, beta, states, slots, kept, query_starts, seq_lens, key_heads)


def gated_norm(o: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Qwen3_5RMSNormGated of transformers, with the same roundings."""
    heads, gates = (_by_head(x, weight.shape[0]).float() for x in (o, z))
    normed = heads * torch.rsqrt(heads.pow(2).mean(-1, keepdim=True) + eps)
    return (weight * normed.to(o.dtype) * by_row(gates, F.silu)).to(o.dtype).flatten(1)


def sigmoid_gate_(x: Tensor, gate: Tensor) -> None:
    """x *= sigmoid(gate)"""
    x *= by_row(gate, torch.sigmoid)


def _by_head(x: Tensor, dim: int) -> Tensor:
    """x[t, heads * dim] -> [t, heads, dim]"""
    return x.reshape(x.shape[0], x.shape[1] // dim, dim)


def _heads(qkv: Tensor, key_heads: int, dk: int, dv: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return q and k [key_heads, t, dk], of length 1 / sqrt(dk) and 1, and v [value_heads, t, dv], in fp32."""
    q, k, v = torch.split(qkv, [key_heads * dk, key_heads * dk, qkv.shape[1] - 2 * key_heads * dk], dim=1)
    q, k = (_by_head(x, dk).transpose(0, 1) for x in (q, k))
    q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + EPS) for x in (q, k))
    return q * dk**-0.5, k, _by_head(v, dv).transpose(0, 1)


def _take_in(state: Tensor, qkv: Tensor, g: Tensor, beta: Tensor, key_heads: int) -> Tensor:
    """Update the state [value_heads, dk, dv] of a sequence with rows of it, and return their outputs in fp32."""
    value_heads, dk, dv = state.shape
    # Copies, since the order in which torch sums depends on the alignment.
    q, k, v = _heads(qkv.to(torch.float32, copy=True), key_heads, dk, dv)
    q, k = (x.repeat_interleave(value_heads // key_heads, dim=0) for x in (q, k))
    rule = _recurrent if len(qkv) == 1 else _chunked
    return rule(q, k, v, g.T.clone(), beta.T.clone(), state).transpose(0, 1).flatten(1)


def _recurrent(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """The rule for one row. q, k: [heads, 1, dk]; v: [heads, 1, dv]; g, beta: [heads, 1]; state: [heads, dk, dv]."""
    state *= g.exp()[..., None]
    delta = (v - k @ state) * beta[..., None]
    state += k.transpose(1, 2) @ delta
    return q @ state


def _chunked(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """The rule for several rows, in chunks. Shapes as in `_recurrent`, with t rows.

    Within a chunk, with c the running sum of g and D[i, j] = exp(c_i - c_j) for j <= i: the updates u of all rows solve
    (I + strictly lower part of (beta k k^T * D)) u = beta (v - exp(c) k S).
    """
    outputs = []
    for q, k, v, g, beta in zip(*(torch.split(x, CHUNK, dim=1) for x in (q, k, v, g, beta)), strict=True):  # noqa: B020
        c = g.double().cumsum(1)  # in float64, so that differences of large values keep their digits
        decay = (c[:, :, None] - c[:, None, :]).tril().exp().tril().float()
        since_start, until_end = (x.exp().float()[..., None] for x in (c, c[:, -1:] - c))
        rate = beta[..., None]
        lower = (rate * (k @ k.transpose(1, 2)) * decay).tril(-1)
        target = rate * (v - since_start * (k @ state))
        u = torch.linalg.solve_triangular(lower, target, upper=False, unitriangular=True)
        outputs.append(since_start * (q @ state) + (q @ k.transpose(1, 2) * decay) @ u)
        state *= since_start[:, -1:]
        state += (until_end * k).transpose(1, 2) @ u
    return torch.cat(outputs, dim=1)


@dataclass(frozen=True)
class _Sequence:
    """A sequence: its rows start to stop, and its drafts, rows stop to end. slot, kept: as in kernels/delta.py.

    fresh: whether it begins in this step.
    """

    start: int
    stop: int
    end: int
    slot: int
    kept: int
    fresh: bool


def _sequences(
    kernel: str,
    slots: Tensor,
    kept: Tensor,
    query_starts: Tensor,
    seq_lens: Tensor,
    num_slots: int,
    most: int,
    rows: int,
) -> list[_Sequence]:
    """Return every sequence with its drafts, at most `most`, those of padding last.

    Raises KernelError for a value that would make a kernel access memory outside its arguments.
    """
    starts, lengths, numbers = query_starts.tolist(), seq_lens.tolist(), slots.tolist()
    counts = [stop - start for start, stop in pairwise(starts)]
    if starts[0] != 0 or starts[-1] != rows:
        raise KernelError(f"{kernel}: query_starts: expected 0 to {rows}, found {starts[0]} to {starts[-1]}")
    own_rows = {start for start, slot, count in zip(starts, numbers, counts, strict=False) if slot >= 0 and count == 1}
    found = list[_Sequence]()
    for i, (slot, count) in enumerate(zip(numbers, counts, strict=True)):
        if not 0 <= count <= lengths[i]:
            raise KernelError(f"{kernel}: query_starts: expected 0 to {lengths[i]} rows of sequence {i}, found {count}")
        if slot >= num_slots:
            raise KernelError(f"{kernel}: slots: expected at most {num_slots - 1} for sequence {i}, found {slot}")
        if slot < 0 and (count != 1 or -1 - slot not in own_rows):
            raise KernelError(
                f"{kernel}: slots: expected sequence {i} of padding to be one row that repeats one, found slot {slot} "
                f"and {count} rows"
            )
        if slot >= 0 and i and slot == numbers[i - 1]:
            if count != 1:
                raise KernelError(f"{kernel}: query_starts: expected a draft of one row as sequence {i}, found {count}")
            found[-1] = replace(found[-1], end=starts[i + 1])
        else:
            found.append(_Sequence(starts[i], starts[i + 1], starts[i + 1], slot, int(kept[i]), lengths[i] == count))
    for one in found:
        limit = most if one.stop - one.start == 1 else 0
        for name, number in (("kept", one.kept), ("slots", one.end - one.stop)) if one.slot >= 0 else ():
            if not 0 <= number <= limit:
                raise KernelError(
                    f"{kernel}: {name}: expected 0 to {limit} drafts of the sequence in slot {one.slot}, found {number}"
                )
    return sorted(found, key=lambda one: one.slot < 0)
