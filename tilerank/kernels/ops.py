"""The row kernels: norms, rotation, activation, embedding, copies of rows, and the choice of a token.

Every argument may be strided as long as its last dimension is contiguous. Activations are float32 or bfloat16. A row's
result depends on that row alone. A wrong argument raises KernelError naming it, what was expected and what was found.
"""

import torch
from torch import Tensor

from . import check, core
from .errors import KernelError
from .reference import ops as reference

_RMS_NORM = core.kernel("rms_norm")
_ADD_RMS_NORM = core.kernel("add_rms_norm")
_ROPE_ROWS = core.kernel("rope_rows")
_ROTARY = core.kernel("rotary")
_NORM_ROTARY = core.kernel("norm_rotary")
_SILU_MUL = core.kernel("silu_mul")
_SILU = core.kernel("silu")
_EMBEDDING = core.kernel("embedding")
_TAKE_ROWS = core.kernel("take_rows")
_PUT_ROWS = core.kernel("put_rows")
_ADD_ROWS = core.kernel("add_rows")
_ADD = core.kernel("add")
_SUM_PARTS = core.kernel("sum_parts")
_REPEAT_ROW = core.kernel("repeat_row")
_JOIN_COLUMNS = core.kernel("join_columns")
_ARGMAX = core.kernel("argmax")
_SAMPLE = core.kernel("sample")

_ARGMAX_PIECE = 4096  # as in argmax.cpp


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, zero_centered: bool = False) -> Tensor:
    """Return the RMS norm over the last dimension, x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich, 2019).

    x: [..., d]; weight: [d] of the same dtype. Returns [..., d], contiguous.
    Default (Llama, Qwen2, Qwen3): normalised in fp32, rounded to x.dtype, multiplied by weight in x.dtype.
    zero_centered (Qwen3.5): normalised * (1 + weight) in fp32, rounded once.
    """
    check.tensor("rms_norm", "x", x, (*x.shape[:-1], None), check.ACTIVATION_DTYPES)
    check.tensor("rms_norm", "weight", weight, (x.shape[-1],), x.dtype)
    if core.isa() == "reference":
        return reference.rms_norm(x, weight, eps, zero_centered=zero_centered)
    out = core.empty(x.shape, x.dtype)
    core.launch(_RMS_NORM, (x, weight, out), (zero_centered,), (eps,))
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, zero_centered: bool = False) -> Tensor:
    """Add x to residual in place, rounded to its dtype, and return rms_norm(residual).

    x, residual: [m, d] of one dtype; weight: [d]. Returns [m, d] with contiguous rows (`core.empty_rows`).
    """
    check.add_rms_norm(x, residual, weight)
    if core.isa() == "reference":
        return reference.add_rms_norm(x, residual, weight, eps, zero_centered=zero_centered)
    out = core.empty_rows(x.shape, x.dtype)
    core.launch(_ADD_RMS_NORM, (x, residual, weight, out), (zero_centered,), (eps,))
    return out


def rope_rows(table: Tensor, positions: Tensor, axis_of: Tensor) -> Tensor:
    """Gather the cosines and sines of the tokens of a step from the table of all positions.

    table: [p, 2, h], cosines and sines of h frequencies. positions: [axes, t] int64, each in [0, p); text has one axis,
    M-RoPE (Qwen2-VL, arXiv 2409.12191) three. axis_of: [h] int64, the axis whose position frequency i follows.
    Returns [t, 2, h].
    """
    check.tensor("rope_rows", "table", table, (None, 2, None), check.ACTIVATION_DTYPES)
    check.tensor("rope_rows", "positions", positions, (None, None), torch.int64)
    check.tensor("rope_rows", "axis_of", axis_of, (table.shape[2],), torch.int64)
    if core.isa() == "reference":
        return reference.rope_rows(table, positions, axis_of)
    out = core.empty((positions.shape[1], 2, table.shape[2]), table.dtype)
    core.launch(_ROPE_ROWS, (table, positions, axis_of, out))
    return out


def rotary_(q: Tensor, k: Tensor, rows: Tensor, *, neighbours: bool = False) -> None:
    """Rotary position embedding (Su et al., 2021) of q and k, in place.

    q: [t, hq, d]; k: [t, hk, d]; rows: [t, 2, r / 2] from `rope_rows`, in the activation dtype, r <= d. The first r
    dims are rotated in pairs (i, i + r / 2), the half-split form of Llama and Qwen, or if `neighbours` in pairs
    (2 i, 2 i + 1), the form of the paper and of DeepSeek; the rest stays. Products and sum are fp32, rounded once.
    """
    _check_rotary("rotary_", q, k, rows)
    if core.isa() == "reference":
        reference.rotary_(q, k, rows, neighbours=neighbours)
    else:
        core.launch(_ROTARY, (q, k, rows), (neighbours,))


def norm_rotary_(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    rows: Tensor,
    *,
    zero_centered: bool = False,
) -> None:
    """`rms_norm` of every head of q and k, then `rotary_`, in place and with the roundings of both.

    q_weight, k_weight: [d], of the dtype of q and k; the other arguments are those of `rms_norm` and `rotary_`.
    """
    _check_rotary("norm_rotary_", q, k, rows)
    check.tensor("norm_rotary_", "q_weight", q_weight, (q.shape[2],), q.dtype)
    check.tensor("norm_rotary_", "k_weight", k_weight, (q.shape[2],), q.dtype)
    if core.isa() == "reference":
        reference.norm_rotary_(q, k, q_weight, k_weight, eps, rows, zero_centered=zero_centered)
    else:
        core.launch(_NORM_ROTARY, (q, k, rows, q_weight, k_weight), (zero_centered,), (eps,))


def _check_rotary(name: str, q: Tensor, k: Tensor, rows: Tensor) -> None:
    check.tensor(name, "rows", rows, (None, 2, None), check.ACTIVATION_DTYPES)
    check.tensor(name, "q", q, (rows.shape[0], None, None), rows.dtype)
    check.tensor(name, "k", k, (rows.shape[0], None, q.shape[2]), rows.dtype)
    if 2 * rows.shape[2] > q.shape[2]:
        raise KernelError(f"{name}: rows: expected at most {q.shape[2] // 2} frequencies, found {rows.shape[2]}")


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up of a gated MLP (Shazeer, 2020).

    gate_up: [m, 2 * i], gate in the first i columns, up in the others. Returns [m, i]. silu is computed in fp32 and
    rounded to the activation dtype; the product is rounded again, as in transformers.
    """
    check.tensor("silu_mul", "gate_up", gate_up, (None, None), check.ACTIVATION_DTYPES)
    if gate_up.shape[1] % 2:
        raise KernelError(f"silu_mul: gate_up: expected an even number of columns, found {gate_up.shape[1]}")
    if core.isa() == "reference":
        return reference.silu_mul(gate_up)
    out = core.empty((gate_up.shape[0], gate_up.shape[1] // 2), gate_up.dtype)
    core.launch(_SILU_MUL, (gate_up, out))
    return out


def silu(x: Tensor) -> Tensor:
    """Return x * sigmoid(x), computed in fp32 and rounded once (Hendrycks and Gimpel, arXiv 1606.08415).

    x: [..., d]. Returns [..., d], contiguous.
    """
    check.tensor("silu", "x", x, (*x.shape[:-1], None), check.ACTIVATION_DTYPES)
    if core.isa() == "reference":
        return reference.silu(x)
    out = core.empty(x.shape, x.dtype)
    core.launch(_SILU, (x, out))
    return out


def embedding(ids: Tensor, weight: Tensor, first_row: int = 0) -> Tensor:
    """Return rows of an embedding table, or of the shard of one that starts at row `first_row`.

    ids: [t] int64; weight: [v, d]. Returns [t, d]. Ids outside [first_row, first_row + v) give zeros.
    """
    check.tensor("embedding", "ids", ids, (None,), torch.int64)
    check.tensor("embedding", "weight", weight, (None, None), check.ACTIVATION_DTYPES)
    if core.isa() == "reference":
        return reference.embedding(ids, weight, first_row)
    out = core.empty((ids.shape[0], weight.shape[1]), weight.dtype)
    core.launch(_EMBEDDING, (ids, weight, out), (first_row,))
    return out


def take_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Return x[rows]. x: [t, d]; rows: [m] int64, each in [0, t). Returns [m, d]."""
    check.tensor("take_rows", "rows", rows, (None,), torch.int64)
    check.tensor("take_rows", "x", x, (None, None), check.ACTIVATION_DTYPES)
    if core.isa() == "reference":
        return reference.take_rows(x, rows)
    out = core.empty((rows.shape[0], x.shape[1]), x.dtype)
    core.launch(_TAKE_ROWS, (rows, x, out))
    return out


def put_rows_(x: Tensor, rows: Tensor, values: Tensor) -> None:
    """Set x[rows] = values, in place. x: [t, d]; rows: [m] int64, each in [0, t), none twice; values: [m, d]."""
    _check_rows("put_rows_", x, rows, values)
    if core.isa() == "reference":
        reference.put_rows_(x, rows, values)
    else:
        core.launch(_PUT_ROWS, (rows, values, x))


def add_rows_(x: Tensor, rows: Tensor, values: Tensor) -> None:
    """Add values to x[rows] in place, rounded to the dtype. The arguments are those of `put_rows_`."""
    _check_rows("add_rows_", x, rows, values)
    if core.isa() == "reference":
        reference.add_rows_(x, rows, values)
    else:
        core.launch(_ADD_ROWS, (rows, values, x))


def _check_rows(name: str, x: Tensor, rows: Tensor, values: Tensor) -> None:
    check.tensor(name, "x", x, (None, None), check.ACTIVATION_DTYPES)
    check.tensor(name, "rows", rows, (None,), torch.int64)
    check.tensor(name, "values", values, (rows.shape[0], x.shape[1]), x.dtype)


def add(x: Tensor, y: Tensor) -> Tensor:
    """Return x + y, rounded to their dtype. x, y: [..., d] of one shape and dtype. Returns [..., d], contiguous."""
    check.tensor("add", "x", x, (*x.shape[:-1], None), check.ACTIVATION_DTYPES)
    check.tensor("add", "y", y, x.shape, x.dtype)
    if core.isa() == "reference":
        return reference.add(x, y)
    out = core.empty(x.shape, x.dtype)
    core.launch(_ADD, (x, y, out))
    return out


def sum_parts(parts: Tensor) -> Tensor:
    """Return the sum of several matrices, added in order in fp32 and rounded once. parts: [n, m, d]. Returns [m, d]."""
    check.tensor("sum_parts", "parts", parts, (None, None, None), check.ACTIVATION_DTYPES)
    if core.isa() == "reference":
        return reference.sum_parts(parts)
    out = core.empty(parts.shape[1:], parts.dtype)
    core.launch(_SUM_PARTS, (parts, out))
    return out


def repeat_row(row: Tensor | None, m: int, n: int, dtype: torch.dtype) -> Tensor:
    """Return a matrix [m, n] whose rows all equal `row` [n], contiguous, of the same dtype; zeros if `row` is None."""
    check.dtype("repeat_row", "dtype", dtype)
    if row is not None:
        check.tensor("repeat_row", "row", row, (n,), dtype)
    if core.isa() == "reference":
        return reference.repeat_row(row, m, n, dtype)
    out = core.empty((m, n), dtype)
    if out.numel():
        core.launch(_REPEAT_ROW, (row, out))
    return out


def join_columns(parts: Tensor, starts: Tensor, n: int) -> Tensor:
    """Concatenate the columns of several matrices, dropping the padding that makes them equally wide.

    parts: [r, m, w], r >= 1; starts: [r + 1] int64, ascending from 0 to n. Columns starts[i] to starts[i + 1] of the
    result are the first columns of part i. Returns [m, n].
    """
    check.tensor("join_columns", "parts", parts, (None, None, None), check.ACTIVATION_DTYPES)
    check.tensor("join_columns", "starts", starts, (parts.shape[0] + 1,), torch.int64)
    if not parts.shape[0]:
        raise KernelError("join_columns: parts: expected at least one, found none")
    if core.isa() == "reference":
        return reference.join_columns(parts, starts, n)
    out = core.empty((parts.shape[1], n), parts.dtype)
    core.launch(_JOIN_COLUMNS, (parts, starts, out))
    return out


def argmax(logits: Tensor) -> Tensor:
    """Return the index of every row's largest logit, the first of equals.

    logits: [m, v] float32, v >= 1. Returns [m] int64. -inf is allowed; a row of only -inf gives 0.
    Raises KernelError naming the row if it contains NaN.
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
    """Sample one token per row, deterministically for a given uniform random number.

    logits: [m, v] float32, -inf excludes a token; temperature: [m] float32 >= 0; top_k: [m] int32, 0 = off; top_p: [m]
    float32 in [0, 1], 1 = off; uniform: [m] float32 in [0, 1). Returns [m] int64.
    Temperature 0 is argmax. Otherwise p = softmax(logits / temperature), filtered as in transformers: top-k keeps every
    token at least as probable as the k-th, ties included; top-p then keeps, in descending order of the renormalised p,
    the tokens before which less than top_p is accumulated, and always the first. Equal logits are ordered by id. The
    result is the first kept token whose cumulative probability exceeds uniform. Probabilities and sums are float64.
    A row whose logits contain NaN or +inf or are all -inf gives -1, so that the other rows of a recorded step go on.
    Raises KernelError naming the row of any other number out of its range.
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
