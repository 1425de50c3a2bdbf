"""Every kernel in plain torch: the oracle of the tests, and the path of machines without the compiled core.

Same names and arguments as the faces (`ops.py`, `moe.py`; `linear` takes the plain weight; what `attention.py` has is
in `reference_attention.py`). A row is always computed by calls whose shapes depend on that row alone, never on its
batch, so that here too equal rows give equal bits.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from .errors import KernelError

if TYPE_CHECKING:
    from .moe import PackedExperts


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """activation(x[..., k] @ weight[n, k].T + bias) + residual, all in fp32, rounded once to `out_dtype` (default
    x.dtype).
    """
    sums = product(x.reshape(-1, x.shape[-1]), weight)
    if residual is not None:
        residual = residual.reshape(-1, residual.shape[-1])
    result = epilogue(sums, bias, residual, activation, out_dtype or x.dtype)
    return result.reshape(*x.shape[:-1], result.shape[-1])


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x[m, k] @ weight[n, k].T in fp32."""
    weight32 = weight.float()
    rows = x.float()
    out = torch.empty(rows.shape[0], weight.shape[0])
    for row, result in zip(rows, out, strict=True):
        # One product per row: a library GEMM picks its blocking, hence its order of summation, by the batch size.
        torch.mv(weight32, row.clone(), out=result)
    return out


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x[r, k] float32 as codes int8 and steps [r]: code * step is about x, |code| <= 127.

    Rows smaller than 2^-100 fade to zeros; a row with an infinity or NaN has a step of NaN.
    """
    finite = x.isfinite().all(1)
    largest = torch.where(finite, x.abs().amax(1), 0.0).clamp(min=2.0**-100)
    inverse = torch.full_like(largest, 127.0) / largest  # 127 / tensor would round twice
    codes = torch.round(x.double() * inverse.double()[:, None])  # the exact product, rounded once
    return torch.where(finite[:, None], codes, 0.0).to(torch.int8), torch.where(finite, largest / 127, float("nan"))


def product_int8(x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """quantised x[m, k] @ (codes[n, k] * scales[n]).T in fp32: exact sums, then one scaling."""
    rows, steps = quantise_rows(x.float())
    sums = rows.double() @ codes.double().T  # below 2^53, hence exact in any order
    return (sums + 0.0).float() * (steps[:, None] * scales)  # no negative zero, as integers have none


def quantise_int4(x: Tensor, group: int, zero_points: bool) -> tuple[Tensor, Tensor, Tensor]:
    """x[r, k] float32 in groups of inputs, (code - zero) * scale is about x: codes [r, k up to groups] uint8, scales
    [r, groups] that are float16 times 256, zeros [r, groups] uint8.

    Of nine scales (and zeros) about the one that just holds the extreme values, each the best for its codes, the one
    with the least squared error.
    """
    r, k = x.shape
    x = F.pad(x, (0, -k % group)).view(r, -(-k // group), group)
    least, most = x.amin(-1).clamp(max=0.0), x.amax(-1).clamp(min=0.0)
    gain = torch.zeros(x.shape[:2])
    scales, zeros = torch.zeros(x.shape[:2]), torch.full(x.shape[:2], 8.0)
    for step in range(-3, 6):
        if zero_points:
            inverse = (15 + 0.4 * step) / (most - least)
            zero = (-least * inverse - 0.2 * step).round().clamp(0, 15)
        else:
            inverse = -(8 + 0.3 * step) / torch.where(-least > most, least, most)
            zero = torch.full_like(least, 8.0)
        levels = torch.clamp((x * inverse[..., None]).round(), -zero[..., None], 15 - zero[..., None])
        products, squares = (x * levels).sum(-1), (levels * levels).sum(-1)
        better = (squares > 0) & (products * products > gain * squares)
        gain = torch.where(better, products * products / squares, gain)
        scales, zeros = torch.where(better, products / squares, scales), torch.where(better, zero, zeros)
    scales = (scales.clamp(-65504 / 256, 65504 / 256) * 256).to(torch.float16).float() / 256
    levels = torch.where(scales[..., None] == 0, 0.0, x / scales[..., None]).round()
    codes = torch.clamp(levels + zeros[..., None], 0, 15)
    finite = x.isfinite().all(-1)
    codes = torch.where(finite[..., None], codes, 8.0)
    return codes.flatten(1).to(torch.uint8), torch.where(finite, scales, float("nan")), zeros.to(torch.uint8)


def quantise_fp8(x: Tensor, block_n: int, block_k: int) -> tuple[Tensor, Tensor]:
    """x[r, k] float32 as codes [r, k] float8_e4m3fn and scales [row blocks, column blocks]: code * scale is about x."""
    r, k = x.shape
    padded = F.pad(x, (0, -k % block_k, 0, -r % block_n))
    padded = padded.view(-(-r // block_n), block_n, -(-k // block_k), block_k)
    largest = padded.abs().amax((1, 3))
    finite = largest.isfinite()
    inverse = torch.where(finite & (largest > 1e-35), 448 / largest, 0.0)
    codes = torch.where(finite[:, None, :, None], padded * inverse[:, None, :, None], 0.0).clamp(-448, 448)
    plain = codes.to(torch.float8_e4m3fn).flatten(0, 1).flatten(1)[:r, :k]
    return plain, torch.where(finite, largest / 448, float("nan"))


def epilogue(
    sums: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str | None, out_dtype: torch.dtype
) -> Tensor:
    """What follows a product in `linear`: sums [m, n] float32 -> [m, n], or [m, n / 2] after silu_mul."""
    if bias is not None:
        sums = sums + bias.float()
    if activation == "silu_mul":
        gate, up = sums.view(sums.shape[0], -1, 2, 32).unbind(2)  # blocks of 32 outputs in turn
        sums = (F.silu(gate) * up).flatten(1)
    elif activation is not None:
        approximate = "tanh" if activation == "gelu_tanh" else "none"
        sums = _by_row(sums, lambda row: F.gelu(row, approximate=approximate))
    if residual is not None:
        sums = sums + residual.float()
    return sums.to(out_dtype)


def _by_row(x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """function(x), which goes element by element: torch rounds the last few of a call, which fill no vector, in another
    way.
    """
    out = torch.empty_like(x)
    for row, result in zip(x, out, strict=True):
        result.copy_(function(row))
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, zero_centered: bool = False) -> Tensor:
    """LlamaRMSNorm (plain) and Qwen3_5RMSNorm (zero-centred) of transformers, rounding included."""
    x32 = x.float().contiguous()
    normed = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)
    if zero_centered:
        return (normed * (1.0 + weight.float())).to(x.dtype)
    return weight * normed.to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, zero_centered: bool = False) -> Tensor:
    """residual += x in place, then rms_norm(residual)."""
    residual += x
    return rms_norm(residual, weight, eps, zero_centered=zero_centered)


def rotary_(q: Tensor, k: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Half-split rotation of the first 2 * cos.shape[1] dims of q and k, in place, in fp32 with one rounding."""
    half = cos.shape[1]
    if positions.numel() and not 0 <= int(positions.min()) <= int(positions.max()) < cos.shape[0]:
        bad = next(p for p in positions.tolist() if not 0 <= p < cos.shape[0])
        raise KernelError(f"rotary_: positions: expected values in [0, {cos.shape[0]}), found {bad}")
    c, s = cos[positions].float()[:, None], sin[positions].float()[:, None]
    for heads in (q, k):
        first, second = heads[..., :half].float(), heads[..., half : 2 * half].float()
        heads[..., : 2 * half] = torch.cat([first * c - second * s, second * c + first * s], dim=-1)


def norm_rotary_(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    zero_centered: bool = False,
) -> None:
    """rms_norm of every head, then rotary_, in place."""
    for heads, weight in ((q, q_weight), (k, k_weight)):
        heads.copy_(rms_norm(heads, weight, eps, zero_centered=zero_centered))
    rotary_(q, k, positions, cos, sin)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) rounded to the activation dtype, times up (LlamaMLP of transformers)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def embedding(ids: Tensor, weight: Tensor, first_row: int = 0) -> Tensor:
    """weight[ids - first_row], zeros for ids outside the shard."""
    rows = ids - first_row
    held = (rows >= 0) & (rows < weight.shape[0])
    out = torch.zeros(ids.shape[0], weight.shape[1], dtype=weight.dtype)
    out[held] = weight[rows[held]]
    return out


def take_rows(x: Tensor, rows: Tensor) -> Tensor:
    """x[rows]; no negative numbers."""
    if rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < x.shape[0]:
        bad = next(row for row in rows.tolist() if not 0 <= row < x.shape[0])
        raise KernelError(f"take_rows: rows: expected values in [0, {x.shape[0]}), found {bad}")
    return x[rows]


def repeat_row(row: Tensor | None, m: int, n: int, dtype: torch.dtype) -> Tensor:
    """[m, n] of `row` or zeros."""
    return torch.zeros(m, n, dtype=dtype) if row is None else row.repeat(m, 1)


def join_columns(parts: Tensor, starts: Tensor, n: int) -> Tensor:
    """The first starts[i + 1] - starts[i] columns of each part, side by side."""
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
    """Index of the first largest logit of every row."""
    for row, values in enumerate(logits):
        if values.isnan().any():
            raise KernelError(f"argmax: logits: expected numbers, found NaN in row {row}")
    # torch.argmax does not promise which of several equals it returns; the index of the first True is the largest of v
    # - i.
    order = torch.arange(logits.shape[1], 0, -1)
    return torch.where(logits == logits.amax(dim=1, keepdim=True), order, 0).argmax(dim=1)


def sample(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, uniform: Tensor) -> Tensor:
    """One token a row; see ops.sample for the exact rule."""
    chosen = torch.empty(logits.shape[0], dtype=torch.int64)
    for row, values in enumerate(logits):
        chosen[row] = _sample_row(
            row, values, float(temperature[row]), int(top_k[row]), float(top_p[row]), float(uniform[row])
        )
    return chosen


def _sample_row(row: int, logits: Tensor, temperature: float, top_k: int, top_p: float, uniform: float) -> int:
    if not 0 <= temperature < float("inf"):
        raise KernelError(f"sample: temperature: expected a finite number >= 0, found {temperature:g} in row {row}")
    if top_k < 0:
        raise KernelError(f"sample: top_k: expected >= 0, found {top_k} in row {row}")
    if not 0 <= top_p <= 1:
        raise KernelError(f"sample: top_p: expected a number in [0, 1], found {top_p:g} in row {row}")
    if not 0 <= uniform < 1:
        raise KernelError(f"sample: uniform: expected a number in [0, 1), found {uniform:g} in row {row}")
    largest = float(logits.amax())  # NaN if any logit is NaN
    if not abs(largest) < float("inf"):
        raise KernelError(
            "sample: logits: expected a finite maximum and otherwise finite numbers or -inf, "
            f"found {largest:g} in row {row}"
        )
    ordered, index = logits.sort(descending=True, stable=True)  # equal logits: the smaller id first
    if temperature == 0:
        return int(index[0])
    kept = logits.shape[0]
    if 0 < top_k < kept:
        kept = int((ordered >= ordered[top_k - 1]).sum())  # ties with the k-th stay, as in TopKLogitsWarper
    weights = torch.exp((ordered[:kept].double() - largest) / temperature)
    cumulative = weights.cumsum(0)
    before = torch.cat([weights.new_zeros(1), cumulative[:-1]])
    if top_p < 1:
        # Probability mass before the token < top_p: what TopPLogitsWarper keeps, and always the first.
        kept = max(1, int((before < top_p * cumulative[-1]).sum()))
    possible = int((weights[:kept] > 0).sum())
    target = uniform * float(cumulative[kept - 1])
    return int(index[min(int((cumulative[:kept] <= target).sum()), possible - 1)])


def softmax_top_k(logits: Tensor, top_k: int, *, renormalize: bool) -> tuple[Tensor, Tensor]:
    """Qwen3MoeTopKRouter of transformers."""
    probabilities = torch.softmax(logits.float(), dim=-1)
    ids = _top_k(probabilities, top_k)
    weights = probabilities.gather(1, ids)
    if renormalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return ids.int(), weights.to(logits.dtype).float()


def sigmoid_top_k(
    logits: Tensor, bias: Tensor, top_k: int, *, groups: int, top_groups: int, renormalize: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """DeepseekV3TopkRouter of transformers."""
    scores = _by_row(logits, torch.sigmoid)
    for_choice = (scores + bias).view(logits.shape[0], groups, logits.shape[1] // groups)
    best = _top_k(for_choice.topk(2, dim=-1).values.sum(dim=-1), top_groups)
    kept = torch.zeros(best.shape[0], groups, dtype=torch.bool).scatter(1, best, True)
    ids = _top_k(for_choice.masked_fill(~kept[..., None], -torch.inf).flatten(1), top_k)
    weights = scores.gather(1, ids)
    if renormalize:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return ids.int(), weights * scale


def _top_k(values: Tensor, k: int) -> Tensor:
    """Indices of the k largest of every row in descending order, the first of equals first."""
    return values.sort(dim=-1, descending=True, stable=True).indices[:, :k]


def moe(x: Tensor, gate_up: PackedExperts, down: PackedExperts, ids: Tensor, weights: Tensor) -> Tensor:
    """The experts of transformers one by one, with the outputs of the experts in fp32."""
    from .linear import Float  # which imports this

    rounded = isinstance(gate_up.weight.format, Float)
    bad = ids[(ids < 0) | (ids >= gate_up.experts)]
    if bad.numel():
        raise KernelError(f"moe: ids: expected values in [0, {gate_up.experts}), found {int(bad[0])}")
    outputs = torch.empty(*ids.shape, x.shape[1])
    for expert in sorted(set(ids.flatten().tolist())):
        tokens, choices = torch.where(ids == expert)
        projected = torch.cat([gate_up.part(expert, part).product(x[tokens]) for part in (0, 1)], dim=-1)
        middle = silu_mul(projected.to(x.dtype) if rounded else projected)
        outputs[tokens, choices] = down.part(expert).product(middle)
    total = torch.zeros(x.shape)
    for choice in range(ids.shape[1]):
        total += weights[:, choice, None] * outputs[:, choice]
    return total.to(x.dtype)
