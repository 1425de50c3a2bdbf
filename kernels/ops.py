"""The row kernels: norms, rotation, activation, embedding, copies of rows, and the choice of a token.

Every argument may be strided as long as its last dimension is contiguous. Activations are float32 or bfloat16. A row's
result depends on that row alone. A wrong argument raises KernelError naming it, what was expected and what was found.
"""

import torch
from torch import Tensor

from . import check, core, reference
from .errors import KernelError

_RMS_NORM = core.kernel("rms_norm")
_ADD_RMS_NORM = core.kernel("add_rms_norm")
_ROTARY = core.kernel("rotary")
_NORM_ROTARY = core.kernel("norm_rotary")
_SILU_MUL = core.kernel("silu_mul")
_EMBEDDING = core.kernel("embedding")
_TAKE_ROWS = core.kernel("take_rows")
_REPEAT_ROW = core.kernel("repeat_row")
_JOIN_COLUMNS = core.kernel("join_columns")
_ARGMAX = core.kernel("argmax")
_SAMPLE = core.kernel("sample")

_ARGMAX_PIECE = 4096  # as in argmax.cpp


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, zero_centered: bool = False) -> Tensor:
    """Root-mean-square norm over the last dim (Zhang and Sennrich, 2019): x / sqrt(mean(x^2) + eps), times a weight.

    x: [..., d]; weight: [d] of the same dtype; returns [..., d], contiguous.
    Plain (Llama, Qwen2, Qwen3): normalised in fp32, rounded to x.dtype, multiplied by weight in x.dtype.
    zero_centered (Qwen3.5): normalised * (1 + weight) in fp32, rounded once.
    """
    check.tensor("rms_norm", "x", x, (*x.shape[:-1], None), check.ACTIVATIONS)
    check.tensor("rms_norm", "weight", weight, (x.shape[-1],), x.dtype)
    if core.isa() == "reference":
        return reference.rms_norm(x, weight, eps, zero_centered=zero_centered)
    out = core.empty(x.shape, x.dtype)
    core.launch(_RMS_NORM, (x, weight, out), (zero_centered,), (eps,))
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, zero_centered: bool = False) -> Tensor:
    """residual += x (in place, rounded to its dtype); returns rms_norm(residual).

    x, residual: [m, d] of one dtype; weight: [d]; returns [m, d], each row contiguous (`core.empty_rows`).
    """
    check.add_rms_norm(x, residual, weight)
    if core.isa() == "reference":
        return reference.add_rms_norm(x, residual, weight, eps, zero_centered=zero_centered)
    out = core.empty_rows(x.shape, x.dtype)
    core.launch(_ADD_RMS_NORM, (x, residual, weight, out), (zero_centered,), (eps,))
    return out


def rotary_(q: Tensor, k: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotary position embedding (Su et al., 2021) of q and k, in place.

    q: [t, hq, d]; k: [t, hk, d]; positions: [t] int64, each in [0, p); cos, sin: [p, r / 2] in the activation dtype, r
    <= d. The first r dims are rotated in pairs (i, i + r / 2), the half-split form of Llama and Qwen; the rest stays.
    Products and sum are fp32, rounded once.
    """
    _check_rotary("rotary_", q, k, positions, cos, sin)
    if core.isa() == "reference":
        reference.rotary_(q, k, positions, cos, sin)
    else:
        core.launch(_ROTARY, (q, k, positions, cos, sin))


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
    """`rms_norm` of every head of q and k, then `rotary_`, in place and with the roundings of both.

    q_weight, k_weight: [d], of the dtype of q and k; the rest is as in those.
    """
    _check_rotary("norm_rotary_", q, k, positions, cos, sin)
    check.tensor("norm_rotary_", "q_weight", q_weight, (q.shape[2],), q.dtype)
    check.tensor("norm_rotary_", "k_weight", k_weight, (q.shape[2],), q.dtype)
    if core.isa() == "reference":
        reference.norm_rotary_(q, k, q_weight, k_weight, eps, positions, cos, sin, zero_centered=zero_centered)
    else:
        core.launch(_NORM_ROTARY, (q, k, positions, cos, sin, q_weight, k_weight), (zero_centered,), (eps,))


def _check_rotary(name: str, q: Tensor, k: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> None:
    check.tensor(name, "positions", positions, (None,), torch.int64)
    check.tensor(name, "q", q, (positions.shape[0], None, None), check.ACTIVATIONS)
    check.tensor(name, "k", k, (positions.shape[0], None, q.shape[2]), q.dtype)
    check.tensor(name, "cos", cos, (None, None), q.dtype)
    check.tensor(name, "sin", sin, cos.shape, q.dtype)
    if 2 * cos.shape[1] > q.shape[2]:
        raise KernelError(f"{name}: cos: expected at most {q.shape[2] // 2} columns, found {cos.shape[1]}")


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of the gated MLP (Shazeer, 2020).

    gate_up: [m, 2 * i], gate in the first i columns, up in the rest; returns [m, i]. silu is computed in fp32 and
    rounded to the activation dtype, so is the product: the two roundings of transformers.
    """
    check.tensor("silu_mul", "gate_up", gate_up, (None, None), check.ACTIVATIONS)
    if gate_up.shape[1] % 2:
        raise KernelError(f"silu_mul: gate_up: expected an even number of columns, found {gate_up.shape[1]}")
    if core.isa() == "reference":
        return reference.silu_mul(gate_up)
    out = core.empty((gate_up.shape[0], gate_up.shape[1] // 2), gate_up.dtype)
    core.launch(_SILU_MUL, (gate_up, out))
    return out


def embedding(ids: Tensor, weight: Tensor, first_row: int = 0) -> Tensor:
    """Rows of an embedding table, or of the shard of it that starts at row `first_row`.

    ids: [t] int64; weight: [v, d]; returns [t, d]. Ids outside [first_row, first_row + v) give zeros.
    """
    check.tensor("embedding", "ids", ids, (None,), torch.int64)
    check.tensor("embedding", "weight", weight, (None, None), check.ACTIVATIONS)
    if core.isa() == "reference":
        return reference.embedding(ids, weight, first_row)
    out = core.empty((ids.shape[0], weight.shape[1]), weight.dtype)
    core.launch(_EMBEDDING, (ids, weight, out), (first_row,))
    return out


def take_rows(x: Tensor, rows: Tensor) -> Tensor:
    """x[rows]. x: [t, d]; rows: [m] int64, each in [0, t); returns [m, d]."""
    check.tensor("take_rows", "rows", rows, (None,), torch.int64)
    check.tensor("take_rows", "x", x, (None, None), check.ACTIVATIONS)
    if core.isa() == "reference":
        return reference.take_rows(x, rows)
    out = core.empty((rows.shape[0], x.shape[1]), x.dtype)
    core.launch(_TAKE_ROWS, (rows, x, out))
    return out


def repeat_row(row: Tensor | None, m: int, n: int, dtype: torch.dtype) -> Tensor:
    """[m, n] of which every row is `row` [n], contiguous and of the same dtype; zeros without one."""
    if dtype not in check.ACTIVATIONS:
        raise KernelError(f"repeat_row: dtype: expected float32 or bfloat16, found {dtype}")
    if row is not None:
        check.tensor("repeat_row", "row", row, (n,), dtype)
    if core.isa() == "reference":
        return reference.repeat_row(row, m, n, dtype)
    out = core.empty((m, n), dtype)
    if out.numel():
        core.launch(_REPEAT_ROW, (row, out))
    return out


def join_columns(parts: Tensor, starts: Tensor, n: int) -> Tensor:
    """The columns of several matrices side by side, without the padding that made them equally wide.

    parts: [r, m, w], r >= 1; starts: [r + 1] int64, from 0 to n: columns starts[i] to starts[i + 1] of the result are
    the first ones of part i. Returns [m, n].
    """
    check.tensor("join_columns", "parts", parts, (None, None, None), check.ACTIVATIONS)
    check.tensor("join_columns", "starts", starts, (parts.shape[0] + 1,), torch.int64)
    if not parts.shape[0]:
        raise KernelError("join_columns: parts: expected at least one, found none")
    if core.isa() == "reference":
        return reference.join_columns(parts, starts, n)
    out = core.empty((parts.shape[1], n), parts.dtype)
    core.launch(_JOIN_COLUMNS, (parts, starts, out))
    return out


def argmax(logits: Tensor) -> Tensor:
    """The index of every row's largest logit, the first of equals. logits: [m, v] float32, v >= 1; returns [m] int64.

    -inf is allowed (a row of nothing else gives 0); NaN raises KernelError naming the row.
    """
    check.tensor("argmax", "logits", logits, (None, None), torch.float32)
    _check_vocabulary("argmax", logits)
    if core.isa() == "reference":
        return reference.argmax(logits)
    rows, columns = logits.shape
    out = core.empty((rows,), torch.int64)
    core.launch(_ARGMAX, (logits, out, core.empty((rows, -(-columns // _ARGMAX_PIECE)), torch.int32)))
    return out


def sample(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, uniform: Tensor) -> Tensor:
    """Draws one token a row, deterministically from the given uniform number.

    logits: [m, v] float32, -inf = never; temperature: [m] float32 >= 0; top_k: [m] int32, 0 = off; top_p: [m] float32
    in [0, 1], 1 = off; uniform: [m] float32 in [0, 1); returns [m] int64.
    Temperature 0 is argmax. Otherwise, as the warpers of transformers do it: p = softmax(logits / temperature); top-k
    keeps every token at least as probable as the k-th (ties with it stay); top-p then keeps, in descending order of
    the renormalised p, the tokens before which less than top_p is accumulated (the first always). Equal logits are
    ordered by id. The result is the first kept token whose cumulative probability exceeds uniform. Probabilities and
    sums are float64. A row with NaN, +inf or nothing but -inf raises KernelError naming the row.
    """
    check.tensor("sample", "logits", logits, (None, None), torch.float32)
    _check_vocabulary("sample", logits)
    rows = (logits.shape[0],)
    check.tensor("sample", "temperature", temperature, rows, torch.float32)
    check.tensor("sample", "top_k", top_k, rows, torch.int32)
    check.tensor("sample", "top_p", top_p, rows, torch.float32)
    check.tensor("sample", "uniform", uniform, rows, torch.float32)
    if core.isa() == "reference":
        return reference.sample(logits, temperature, top_k, top_p, uniform)
    out = core.empty(logits.shape[:1], torch.int64)
    core.launch(_SAMPLE, (logits, temperature, top_k, top_p, uniform, out))
    return out


def _check_vocabulary(kernel: str, logits: Tensor) -> None:
    if logits.shape[1] == 0:
        raise KernelError(f"{kernel}: logits: expected at least one column, found shape {list(logits.shape)}")
