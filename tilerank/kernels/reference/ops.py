"""`ops.py` in plain torch, and what other references share: quantisation of rows, and functions row by row."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import KernelError


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise rows x[r, k] float32 symmetrically: x ~ code * scale, |code| <= 127.

    Returns codes [r, k] int8 and scales [r]. Rows below 2^-100 become zeros; a row with an infinity or NaN
    has the scale NaN.
    """
    finite = x.isfinite().all(1)
    largest = torch.where(finite, x.abs().amax(1), 0.0).clamp(min=2.0**-100)
    inverse = torch.full_like(largest, 127.0) / largest  # 127 / tensor would round twice
    codes = torch.round(x.double() * inverse.double()[:, None])  # float64 holds the exact product
    return torch.where(finite[:, None], codes, 0.0).to(torch.int8), torch.where(finite, largest / 127, float("nan"))


def by_row(x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """Return function(x), an element-wise function, computed row by row.

    torch rounds the last elements of a call, which do not fill a vector, differently from the others.
    """
    out = torch.empty_like(x)
    for row, result in zip(x, out, strict=True):
        result.copy_(function(row))
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, zero_centered: bool = False) -> Tensor:
    """LlamaRMSNorm (default) and Qwen3_5RMSNorm (zero-centred) of transformers, with the same roundings."""
    x32 = x.float().contiguous()
    normed = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)
    if zero_centered:
        return (normed * (1.0 + weight.float())).to(x.dtype)
    return weight * normed.to(x.dtype)


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    *,
    post_weight: Tensor | None = None,
    scale: Tensor | None = None,
    zero_centered: bool = False,
) -> Tensor:
    """Add x, or its norm, to residual in place, scale it, and return rms_norm(residual)."""
    residual += x if post_weight is None else rms_norm(x, post_weight, eps, zero_centered=zero_centered)
    if scale is not None:
        residual *= scale
    return rms_norm(residual, weight, eps, zero_centered=zero_centered)


def rope_rows(table: Tensor, positions: Tensor, axis_of: Tensor) -> Tensor:
    """out[token, :, i] = table[positions[axis_of[i], token], :, i]"""
    for name, indices, limit in (("axis_of", axis_of, positions.shape[0]), ("positions", positions, table.shape[0])):
        if indices.numel() and not 0 <= int(indices.min()) <= int(indices.max()) < limit:
            bad = next(index for index in indices.flatten().tolist() if not 0 <= index < limit)
            raise KernelError(f"rope_rows: {name}: expected values in [0, {limit}), found {bad}")
    frequencies = torch.arange(table.shape[2])
    return table[positions[axis_of].T, :, frequencies].transpose(1, 2).contiguous()


def rotary_(q: Tensor, k: Tensor, rows: Tensor, *, neighbours: bool = False) -> None:
    """Rotate the first 2 * rows.shape[2] dims of q and k, in place, in fp32 with one rounding."""
    half = rows.shape[2]
    c, s = (part.float()[:, None] for part in rows.unbind(1))
    for heads in (q, k):
        rotated = heads[..., : 2 * half]
        parts = (rotated[..., ::2], rotated[..., 1::2]) if neighbours else rotated.chunk(2, dim=-1)
        first, second = (part.float() for part in parts)
        turned = torch.stack([first * c - second * s, second * c + first * s], dim=-1 if neighbours else -2)
        rotated.copy_(turned.flatten(-2))


def norm_rotary_(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    rows: Tensor,
    *,
    distance: int | None = None,
    zero_centered: bool = False,
) -> None:
    """rms_norm of every head, then rotary_ of the dimensions that form pairs, in place."""
    for heads, weight in ((q, q_weight), (k, k_weight)):
        heads.copy_(rms_norm(heads, weight, eps, zero_centered=zero_centered))
    half = rows.shape[2]
    firsts = torch.arange(half)
    paired = torch.cat([firsts, firsts + (half if distance is None else distance)])
    q_pairs, k_pairs = q[..., paired], k[..., paired]
    rotary_(q_pairs, k_pairs, rows)
    q[..., paired], k[..., paired] = q_pairs, k_pairs


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return silu(gate), rounded to the activation dtype, times up (LlamaMLP of transformers)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def gelu_tanh(x: Tensor) -> Tensor:
    """The tanh approximation of x * Phi(x)."""
    return F.gelu(x, approximate="tanh")


def gelu_tanh_mul(gate_up: Tensor) -> Tensor:
    """Return gelu_tanh(gate), rounded to the activation dtype, times up (Gemma3MLP of transformers)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return gelu_tanh(gate) * up


GATES: dict[str | None, Callable[[Tensor], Tensor]] = {"silu_mul": F.silu, "gelu_tanh_mul": gelu_tanh}
"""The activation of the gate, by the name of a gated activation of `linear`."""


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x)"""
    return F.silu(x.double()).to(x.dtype).contiguous()


def embedding(ids: Tensor, weight: Tensor, first_row: int = 0) -> Tensor:
    """Return weight[ids - first_row], zeros for ids outside the shard."""
    rows = ids - first_row
    held = (rows >= 0) & (rows < weight.shape[0])
    out = torch.zeros(ids.shape[0], weight.shape[1], dtype=weight.dtype)
    out[held] = weight[rows[held]]
    return out


def take_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Return x[rows]. Raises KernelError for negative rows."""
    _check_rows("take_rows", rows, x.shape[0])
    return x[rows]


def put_rows_(x: Tensor, rows: Tensor, values: Tensor) -> None:
    """Set x[rows] = values. Raises KernelError for negative rows."""
    _check_rows("put_rows_", rows, x.shape[0])
    x[rows] = values


def add_rows_(x: Tensor, rows: Tensor, values: Tensor) -> None:
    """Set x[rows] += values. Raises KernelError for negative rows."""
    _check_rows("add_rows_", rows, x.shape[0])
    x[rows] += values


def scale_(x: Tensor, factor: float) -> None:
    """x *= factor"""
    x *= factor


def mul_(x: Tensor, y: Tensor) -> None:
    """x *= y"""
    x *= y


def add(x: Tensor, y: Tensor) -> Tensor:
    """Return x + y."""
    return (x + y).contiguous()


def _check_rows(name: str, rows: Tensor, limit: int) -> None:
    if rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < limit:
        bad = next(row for row in rows.tolist() if not 0 <= row < limit)
        raise KernelError(f"{name}: rows: expected values in [0, {limit}), found {bad}")


def sum_parts(parts: Tensor) -> Tensor:
    """The sum over the first dimension, in order."""
    total = torch.zeros(parts.shape[1:])
    for part in parts:
        total += part.float()
    return total.to(parts.dtype)


def repeat_row(row: Tensor | None, m: int, n: int, dtype: torch.dtype) -> Tensor:
    """Return a matrix [m, n] whose rows are `row`, or zeros."""
    return torch.zeros(m, n, dtype=dtype) if row is None else row.repeat(m, 1)


def join_columns(parts: Tensor, starts: Tensor, n: int) -> Tensor:
    """Concatenate the first starts[i + 1] - starts[i] columns of each part i."""
    edges = starts.tolist()
    widths = [stop - start for start, stop in pairwise(edges)]
    for part, width in enumerate(widths):
        if not 0 <= width <= parts.shape[2] or edges[0] != 0 or edges[-1] != n:
            raise KernelError(
                f"join_columns: starts: expected ascending columns from 0 to {n} at most {parts.shape[2]} apart, "
                f"found {edges[part]} to {edges[part + 1]} of part {part}"
            )
    return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], dim=1)


def argmax(logits: Tensor) -> Tensor:
    """Return the index of the first largest logit of every row."""
    for row, values in enumerate(logits):
        if values.isnan().any():
            raise KernelError(f"argmax: logits: expected numbers, found NaN in row {row}")
    # torch.argmax may return any of several equal elements, so give the first of them the largest value v - i.
    order = torch.arange(logits.shape[1], 0, -1)
    return torch.where(logits == logits.amax(dim=1, keepdim=True), order, 0).argmax(dim=1)


def edit_logits_(
    logits: Tensor,
    starts: Tensor,
    ids: Tensor,
    numbers: Tensor,
    mask_of: Tensor,
    masks: Tensor,
    banned_starts: Tensor,
    banned: Tensor,
) -> None:
    """Change the logits of some tokens, and exclude others."""
    lanes = torch.arange(8, dtype=torch.uint8)
    for row, values in enumerate(logits):
        own = slice(int(starts[row]), int(starts[row + 1]))
        tokens = ids[own].long()
        bias, penalty, amount = numbers[own].unbind(1)
        biased = values[tokens] + bias
        values[tokens] = torch.where(biased > 0, biased / penalty, biased * penalty) - amount
        if mask_of[row] >= 0:
            allowed = (masks[int(mask_of[row])][:, None] >> lanes & 1).flatten()[: logits.shape[1]]
            values[allowed == 0] = -torch.inf
        tokens = banned[int(banned_starts[row]) : int(banned_starts[row + 1])].long()
        kept = values[tokens]
        values[tokens] = -torch.inf
        if (values == -torch.inf).all():
            values[tokens] = kept


def soft_cap_(logits: Tensor, cap: float) -> None:
    """logits = cap * tanh(logits / cap)"""
    logits.copy_(cap * torch.tanh(logits / cap))


def sample(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor) -> Tensor:
    """Sample one token per row."""
    numbers = zip(temperature, top_k, top_p, min_p, uniform, strict=True)
    chosen = [_sample_row(row, logits[row], *(each.item() for each in own)) for row, own in enumerate(numbers)]
    return torch.tensor(chosen, dtype=torch.int64)


def _sample_row(
    row: int, logits: Tensor, temperature: float, top_k: float, top_p: float, min_p: float, uniform: float
) -> int:
    if not 0 <= temperature < float("inf"):
        raise KernelError(f"sample: temperature: expected a finite number >= 0, found {temperature:g} in row {row}")
    if top_k < 0:
        raise KernelError(f"sample: top_k: expected >= 0, found {top_k} in row {row}")
    if not 0 <= top_p <= 1:
        raise KernelError(f"sample: top_p: expected a number in [0, 1], found {top_p:g} in row {row}")
    if not 0 <= min_p <= 1:
        raise KernelError(f"sample: min_p: expected a number in [0, 1], found {min_p:g} in row {row}")
    if not 0 <= uniform < 1:
        raise KernelError(f"sample: uniform: expected a number in [0, 1), found {uniform:g} in row {row}")
    largest = float(logits.amax())  # NaN if any logit is NaN
    if not abs(largest) < float("inf"):
        return -1
    ordered, index = logits.sort(descending=True, stable=True)  # equal logits: the smaller id first
    if temperature == 0:
        return int(index[0])
    kept = logits.shape[0]
    if min_p > 0:
        kept = int((ordered >= ordered[0] + torch.tensor(temperature * math.log(min_p), dtype=torch.float32)).sum())
    if 0 < top_k < kept:
        kept = int((ordered[:kept] >= ordered[int(top_k) - 1]).sum())  # ties with the k-th stay, as in TopKLogitsWarper
    weights = torch.exp((ordered[:kept].double() - largest) / temperature)
    cumulative = weights.cumsum(0)
    before = torch.cat([weights.new_zeros(1), cumulative[:-1]])
    if top_p < 1:
        # Probability mass before the token < top_p: what TopPLogitsWarper keeps, and always the first.
        kept = max(1, int((before < top_p * cumulative[-1]).sum()))
    possible = int((weights[:kept] > 0).sum())
    target = uniform * float(cumulative[kept - 1])
    return int(index[min(int((cumulative[:kept] <= target).sum()), possible - 1)])


def log_probs(logits: Tensor, rows: Tensor, ids: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the log-probabilities of a token of some rows, and of their likeliest tokens."""
    values = logits[rows].double()
    probable = (values.amax(-1).abs() < torch.inf)[:, None]  # False for NaN
    scores = torch.where(probable, values.log_softmax(-1), torch.nan).float()
    ordered, order = values.sort(dim=-1, descending=True, stable=True)
    chosen = ids[:, None]
    ranks = (ordered >= values.gather(1, chosen)).sum(-1)
    top_ids = order[:, :count].contiguous()
    return scores.gather(1, chosen)[:, 0], ranks, top_ids, scores.gather(1, top_ids)
