"""`delta.py` in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import KernelError
from .ops import by_row

CHUNK = 64
EPS = 1e-6  # of the lengths of q and k


def causal_conv(
    x: Tensor, weight: Tensor, conv: Tensor, slots: Tensor, query_starts: Tensor, seq_lens: Tensor
) -> Tensor:
    """Convolve every sequence, behind the window in its slot."""
    out = torch.empty(x.shape, dtype=x.dtype)
    before = weight.shape[1] - 1
    for start, stop, slot, fresh in _sequences("causal_conv", slots, query_starts, seq_lens, conv.shape[0], x.shape[0]):
        if slot < 0:
            out[start] = out[-1 - slot]
            continue
        window = torch.zeros_like(conv[slot]) if fresh else conv[slot]
        inputs = torch.cat([window, x[start:stop]])
        sums = torch.zeros(stop - start, x.shape[1])
        for i, tap in enumerate(weight.float().T):
            sums += tap * inputs[i : i + stop - start].float()
        out[start:stop] = by_row(sums, F.silu)
        conv[slot] = inputs[len(inputs) - before :]
    return out


def delta_gating(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return -exp(a_log) * softplus(a + dt_bias) and sigmoid(b)."""
    rates = by_row(a.float() + dt_bias.float(), F.softplus)
    return -a_log.float().exp() * rates, by_row(b, torch.sigmoid).float()


def delta_rule(
    qkv: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    slots: Tensor,
    query_starts: Tensor,
    seq_lens: Tensor,
    key_heads: int,
) -> Tensor:
    """One row: the recurrence; several: chunks of 64."""
    num_slots, value_heads, dk, dv = state.shape
    out = torch.empty(qkv.shape[0], value_heads * dv, dtype=qkv.dtype)
    for start, stop, slot, fresh in _sequences("delta_rule", slots, query_starts, seq_lens, num_slots, qkv.shape[0]):
        if slot < 0:
            out[start] = out[-1 - slot]
            continue
        if fresh:
            state[slot] = 0
        if start == stop or not value_heads:
            continue
        repeats = value_heads // key_heads
        # Copies, since the order in which torch sums depends on the alignment.
        q, k, v = _heads(qkv[start:stop].to(torch.float32, copy=True), key_heads, dk, dv)
        q, k = (x.repeat_interleave(repeats, dim=0) for x in (q, k))
        rule = _recurrent if stop - start == 1 else _chunked
        o = rule(q, k, v, g[start:stop].T.clone(), beta[start:stop].T.clone(), state[slot])
        out[start:stop] = o.transpose(0, 1).flatten(1)
    return out


def delta_step(
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    slots: Tensor,
    seq_lens: Tensor,
    key_heads: int,
) -> Tensor:
    """delta_gating and delta_rule of sequences of one row."""
    g, beta = delta_gating(a, b, a_log, dt_bias)
    query_starts = torch.arange(qkv.shape[0] + 1, dtype=torch.int32)
    return delta_rule(qkv, g, beta, state, slots, query_starts, seq_lens, key_heads)


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


def _sequences(
    kernel: str, slots: Tensor, query_starts: Tensor, seq_lens: Tensor, num_slots: int, rows: int
) -> list[tuple[int, int, int, bool]]:
    """Return (first row, end, slot, whether it begins in this step) of every sequence, those of padding last.

    Raises KernelError for a value that would make a kernel access memory outside its arguments.
    """
    starts, lengths = query_starts.tolist(), seq_lens.tolist()
    if starts[0] != 0 or starts[-1] != rows:
        raise KernelError(f"{kernel}: query_starts: expected 0 to {rows}, found {starts[0]} to {starts[-1]}")
    own_rows = {}  # those that padding may repeat
    for i, slot in enumerate(slots.tolist()):
        count = starts[i + 1] - starts[i]
        if not 0 <= count <= lengths[i]:
            raise KernelError(f"{kernel}: query_starts: expected 0 to {lengths[i]} rows of sequence {i}, found {count}")
        if slot >= num_slots:
            raise KernelError(f"{kernel}: slots: expected at most {num_slots - 1} for sequence {i}, found {slot}")
        if slot >= 0 and count == 1:
            own_rows[starts[i]] = i
    for i, slot in enumerate(slots.tolist()):
        if slot < 0 and (starts[i + 1] - starts[i] != 1 or -1 - slot not in own_rows):
            raise KernelError(
                f"{kernel}: slots: expected sequence {i} of padding to be one row that repeats one, found slot {slot} "
                f"and {starts[i + 1] - starts[i]} rows"
            )
    found = [
        (starts[i], starts[i + 1], slot, lengths[i] == starts[i + 1] - starts[i])
        for i, slot in enumerate(slots.tolist())
    ]
    return sorted(found, key=lambda sequence: sequence[2] < 0)
