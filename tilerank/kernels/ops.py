"""The row kernels: norms, rotation, activation, embedding, copies of rows, and the choice of a token.

Every argument may be strided as long as its last dimension is contiguous. Activations are float32 or bfloat16. A row's
result depends on that row alone. A wrong argument raises KernelError naming it, what was expected and what was found.
"""

import torch
from torch import Tensor

from .contract import Contract
from .errors import KernelError
from .reference import ops as reference

_RMS_NORM = Contract(
    "rms_norm: x[..., d]:f32|bf16 weight[d]:x eps:float zero_centered:bool -> out[..., d]:x", reference.rms_norm
)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, zero_centered: bool = False) -> Tensor:
    """Return the RMS norm over the last dimension, x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich, 2019).

    x: [..., d]; weight: [d] of the same dtype. Returns [..., d], contiguous.
    Default (Llama, Qwen2, Qwen3): normalised in fp32, rounded to x.dtype, multiplied by weight in x.dtype.
    zero_centered (Qwen3.5): normalised * (1 + weight) in fp32, rounded once.
    """
    return _RMS_NORM(x, weight, eps, zero_centered)


ADD_RMS_NORM = Contract(
    "add_rms_norm: x[m, d]:f32|bf16 residual[m, d]:x weight[d]:x eps:float post_weight[d]?:x scale[1]?:x "
    "zero_centered:bool -> apart out[m, d]:x",
    reference.add_rms_norm,
)


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
    """Add x to residual in place, rounded to its dtype, and return rms_norm(residual).

    With `post_weight` (Gemma), rms_norm(x) by that weight is added, rounded before. With `scale` (Gemma 4), the sum is
    multiplied by it, rounded again. x, residual: [m, d] of one dtype; weight, post_weight: [d]; scale: [1]. Returns
    [m, d] with contiguous rows (`core.empty_rows`).
    """
    return ADD_RMS_NORM(x, residual, weight, eps, post_weight, scale, zero_centered)


_ROPE_ROWS = Contract(
    "rope_rows: table[p, 2, h]:f32|bf16 positions[axes, t]:i64 axis_of[h]:i64 -> out[t, 2, h]:table",
    reference.rope_rows,
)


def rope_rows(table: Tensor, positions: Tensor, axis_of: Tensor) -> Tensor:
    """Gather the cosines and sines of the tokens of a step from the table of all positions.

    table: [p, 2, h], cosines and sines of h frequencies. positions: [axes, t] int64, each in [0, p); text has one axis,
    M-RoPE (Qwen2-VL, arXiv 2409.12191) three. axis_of: [h] int64, the axis whose position frequency i follows.
    Returns [t, 2, h].
    """
    return _ROPE_ROWS(table, positions, axis_of)


_ROTARY = Contract("rotary_: q[t, hq, d]:f32|bf16 k[t, hk, d]:q rows[t, 2, h]:q neighbours:bool", reference.rotary_)


def rotary_(q: Tensor, k: Tensor, rows: Tensor, *, neighbours: bool = False) -> None:
    """Rotary position embedding (Su et al., 2021) of q and k, in place.

    q: [t, hq, d]; k: [t, hk, d]; rows: [t, 2, r / 2] from `rope_rows`, in the activation dtype, r <= d. The first r
    dims are rotated in pairs (i, i + r / 2), the half-split form of Llama and Qwen, or if `neighbours` in pairs
    (2 i, 2 i + 1), the form of the paper and of DeepSeek; the rest stays. Products and sum are fp32, rounded once.
    """
    _ROTARY.check(q, k, rows, neighbours)
    _check_frequencies("rotary_", q, rows)
    _ROTARY.run(q, k, rows, neighbours)


_NORM_ROTARY = Contract(
    "norm_rotary_: q[t, hq, d]:f32|bf16 k[t, hk, d]:q q_weight[d]:q k_weight[d]:q eps:float rows[t, 2, h]:q "
    "distance:int zero_centered:bool",
    reference.norm_rotary_,
)


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
    """`rms_norm` of every head of q and k, then `rotary_`, in place and with the roundings of both.

    q_weight, k_weight: [d], of the dtype of q and k; the other arguments are those of `rms_norm` and `rotary_`.
    distance: the pairs are (i, i + distance) for i < r / 2, with distance from r / 2, the default, to d - r / 2 (Gemma
    4 rotates the first dims of each half of a head).
    """
    half = rows.shape[-1]
    distance = half if distance is None else distance
    _NORM_ROTARY.check(q, k, q_weight, k_weight, eps, rows, distance, zero_centered)
    _check_frequencies("norm_rotary_", q, rows)
    if not half <= distance <= q.shape[2] - half:
        raise KernelError(f"norm_rotary_: distance: expected {half} to {q.shape[2] - half}, found {distance}")
    _NORM_ROTARY.run(q, k, q_weight, k_weight, eps, rows, distance, zero_centered)


def _check_frequencies(name: str, q: Tensor, rows: Tensor) -> None:
    if 2 * rows.shape[2] > q.shape[2]:
        raise KernelError(f"{name}: rows: expected at most {q.shape[2] // 2} frequencies, found {rows.shape[2]}")


_SILU_MUL = Contract("silu_mul: gate_up[m, n]:f32|bf16 -> out[m, n // 2]:gate_up", reference.silu_mul)


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up of a gated MLP (Shazeer, 2020).

    gate_up: [m, 2 * i], gate in the first i columns, up in the others. Returns [m, i]. silu is computed in fp32 and
    rounded to the activation dtype; the product is rounded again, as in transformers.
    """
    return _gated(_SILU_MUL, gate_up)


_GELU_TANH_MUL = Contract("gelu_tanh_mul: gate_up[m, n]:f32|bf16 -> out[m, n // 2]:gate_up", reference.gelu_tanh_mul)


def gelu_tanh_mul(gate_up: Tensor) -> Tensor:
    """Return gelu(gate) * up of a gated MLP, with the tanh approximation of gelu.

    The argument, the result and the roundings are those of `silu_mul`.
    """
    return _gated(_GELU_TANH_MUL, gate_up)


def _gated(contract: Contract, gate_up: Tensor) -> Tensor:
    contract.check(gate_up)
    if gate_up.shape[1] % 2:
        raise KernelError(f"{contract.name}: gate_up: expected an even number of columns, found {gate_up.shape[1]}")
    return contract(gate_up)


_SILU = Contract("silu: x[..., d]:f32|bf16 -> out[..., d]:x", reference.silu)


def silu(x: Tensor) -> Tensor:
    """Return x * sigmoid(x), computed in fp32 and rounded once (Hendrycks and Gimpel, arXiv 1606.08415).

    x: [..., d]. Returns [..., d], contiguous.
    """
    return _SILU(x)


_EMBEDDING = Contract(
    "embedding: ids[t]:i64 weight[v, d]:f32|bf16 first_row:int -> out[t, d]:weight", reference.embedding
)


def embedding(ids: Tensor, weight: Tensor, first_row: int = 0) -> Tensor:
    """Return rows of an embedding table, or of the shard of one that starts at row `first_row`.

    ids: [t] int64; weight: [v, d]. Returns [t, d]. Ids outside [first_row, first_row + v) give zeros.
    """
    return _EMBEDDING(ids, weight, first_row)


_TAKE_ROWS = Contract("take_rows: x[t, d]:f32|bf16 rows[m]:i64 -> out[m, d]:x", reference.take_rows)


def take_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Return x[rows]. x: [t, d]; rows: [m] int64, each in [0, t). Returns [m, d]."""
    return _TAKE_ROWS(x, rows)


_PUT_ROWS = Contract("put_rows_: x[t, d]:f32|bf16 rows[m]:i64 values[m, d]:x", reference.put_rows_)


def put_rows_(x: Tensor, rows: Tensor, values: Tensor) -> None:
    """Set x[rows] = values, in place. x: [t, d]; rows: [m] int64, each in [0, t), none twice; values: [m, d]."""
    _PUT_ROWS.run(x, rows, values)


_ADD_ROWS = Contract("add_rows_: x[t, d]:f32|bf16 rows[m]:i64 values[m, d]:x", reference.add_rows_)


def add_rows_(x: Tensor, rows: Tensor, values: Tensor) -> None:
    """Add values to x[rows] in place, rounded to the dtype. The arguments are those of `put_rows_`."""
    _ADD_ROWS.run(x, rows, values)


_SCALE = Contract("scale_: x[m, d]:f32|bf16 factor:float", reference.scale_)


def scale_(x: Tensor, factor: float) -> None:
    """Multiply x[m, d] by a number, in place, in fp32 and rounded to its dtype."""
    _SCALE.run(x, factor)


_MUL = Contract("mul_: x[m, d]:f32|bf16 y[m, d]:x", reference.mul_)


def mul_(x: Tensor, y: Tensor) -> None:
    """Multiply x[m, d] by y[m, d] in place, element by element, in fp32 and rounded to their dtype."""
    _MUL.run(x, y)


_ADD = Contract("add: x[..., d]:f32|bf16 y[..., d]:x -> out[..., d]:x", reference.add)


def add(x: Tensor, y: Tensor) -> Tensor:
    """Return x + y, rounded to their dtype. x, y: [..., d] of one shape and dtype. Returns [..., d], contiguous."""
    return _ADD(x, y)


_SUM_PARTS = Contract("sum_parts: parts[n, m, d]:f32|bf16 -> out[m, d]:parts", reference.sum_parts)


def sum_parts(parts: Tensor) -> Tensor:
    """Return the sum of several matrices, added in order in fp32 and rounded once. parts: [n, m, d]. Returns [m, d]."""
    return _SUM_PARTS(parts)


_REPEAT_ROW = Contract(
    "repeat_row: row[n]?:dtype m:size n:size dtype:f32|bf16 -> out[m, n]:dtype", reference.repeat_row
)


def repeat_row(row: Tensor | None, m: int, n: int, dtype: torch.dtype) -> Tensor:
    """Return a matrix [m, n] whose rows all equal `row` [n], contiguous, of the same dtype; zeros if `row` is None."""
    return _REPEAT_ROW(row, m, n, dtype)


_JOIN_COLUMNS = Contract(
    "join_columns: parts[r, m, w]:f32|bf16 starts[r + 1]:i64 n:size -> out[m, n]:parts", reference.join_columns
)


def join_columns(parts: Tensor, starts: Tensor, n: int) -> Tensor:
    """Concatenate the columns of several matrices, dropping the padding that makes them equally wide.

    parts: [r, m, w], r >= 1; starts: [r + 1] int64, ascending from 0 to n. Columns starts[i] to starts[i + 1] of the
    result are the first columns of part i. Returns [m, n].
    """
    _JOIN_COLUMNS.check(parts)
    if not parts.shape[0]:
        raise KernelError("join_columns: parts: expected at least one, found none")
    return _JOIN_COLUMNS(parts, starts, n)


_ARGMAX = Contract("argmax: logits[m, v]:f32 -> out[m]:i64 largest[m, (v + 4095) // 4096]:i32", reference.argmax)


def argmax(logits: Tensor) -> Tensor:
    """Return the index of every row's largest logit, the first of equals.

    logits: [m, v] float32, v >= 1. Returns [m] int64. -inf is allowed; a row of only -inf gives 0.
    Raises KernelError naming the row if it contains NaN.
    """
    _ARGMAX.check(logits)
    _check_vocabulary("argmax", logits)
    return _ARGMAX(logits)


_EDIT_LOGITS = Contract(
    "edit_logits_: logits[m, v]:f32 starts[m + 1]:i32 ids[e]:i32 numbers[e, 3]:f32 mask_of[m]:i32 "
    "masks[k, (v + 7) // 8]:u8 banned_starts[m + 1]:i32 banned[b]:i32",
    reference.edit_logits_,
)


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
    """Change the logits [m, v] of some tokens, and exclude others by setting their logits to -inf, in place.

    starts: [m + 1] int32, ascending from 0 to e; row i changes the tokens starts[i] to starts[i + 1] of ids, [e] int32,
    each at most once. numbers: [e, 3] float32, what each of them gets: a bias that is added; a repetition penalty
    (arXiv 1909.05858), by which positive logits are divided and others multiplied; an amount that is subtracted.
    masks: [k, ceil(v / 8)] uint8, a bit for each token, the lowest first, 0 for those to exclude. mask_of: [m] int32,
    the mask of each row, or -1. banned_starts, banned: tokens [b] int32 of each row, as starts and ids are; all of a
    row are excluded as well, unless no other token would remain.
    """
    _EDIT_LOGITS.run(logits, starts, ids, numbers, mask_of, masks, banned_starts, banned)


_SOFT_CAP = Contract("soft_cap_: logits[m, v]:f32 cap:float", reference.soft_cap_)


def soft_cap_(logits: Tensor, cap: float) -> None:
    """Replace logits[m, v] by cap * tanh(logits / cap), in place. cap: above 0."""
    if not cap > 0:
        raise KernelError(f"soft_cap_: cap: expected a number above 0, found {cap}")
    _SOFT_CAP.run(logits, cap)


_SAMPLE = Contract(
    "sample: logits[m, v]:f32 temperature[m]:f32 top_k[m]:i32 top_p[m]:f32 min_p[m]:f32 uniform[m]:f32 -> out[m]:i64 "
    "groups[m, (v + 511) // 512 * 16]:i32 totals[m, (v + 8191) // 8192]:f64 classes[m, v]:u8 "
    "sums[m, (v + 8191) // 8192, 256]:f64",
    reference.sample,
)


def sample(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor) -> Tensor:
    """Sample one token per row, deterministically for a given uniform random number.

    logits: [m, v] float32, -inf excludes a token; temperature: [m] float32 >= 0; top_k: [m] int32, 0 = off; top_p: [m]
    float32 in [0, 1], 1 = off; min_p: [m] float32 in [0, 1], 0 = off; uniform: [m] float32 in [0, 1). Returns [m]
    int64.
    Temperature 0 is argmax. Otherwise p = softmax(logits / temperature), filtered as in transformers and, in this
    order, in vLLM: min-p keeps every token of p >= min_p * max(p); top-k keeps every token at least as probable as the
    k-th, ties included; top-p then keeps, in descending order of the renormalised p, the tokens before which less than
    top_p is accumulated, and always the first. Equal logits are ordered by id. The result is the first kept token whose
    cumulative probability exceeds uniform. Probabilities and sums are float64; min-p compares float32 logits.
    A row whose logits contain NaN or +inf or are all -inf gives -1, so that the other rows of a recorded step go on.
    Raises KernelError naming the row of any other number out of its range.
    """
    _SAMPLE.check(logits)
    _check_vocabulary("sample", logits)
    return _SAMPLE(logits, temperature, top_k, top_p, min_p, uniform)


_LOG_PROBS = Contract(
    "log_probs: logits[m, v]:f32 rows[a]:i64 ids[a]:i64 count:size -> chosen[a]:f32 ranks[a]:i64 top_ids[a, count]:i64 "
    "top[a, count]:f32 groups[a, (v + 511) // 512 * 16]:i32 sums[a, (v + 8191) // 8192]:f64 "
    "at_least[a, (v + 8191) // 8192]:i64",
    reference.log_probs,
)


def log_probs(logits: Tensor, rows: Tensor, ids: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the log-probabilities (natural) of a token of some rows of logits [m, v], and of their likeliest tokens.

    rows: [a] int64, each in [0, m); ids: [a] int64, a token of each of them. Returns four tensors: the log-probability
    of each token, [a] float32; how many tokens are at least as likely, [a] int64; the `count` likeliest tokens (1 to
    v), [a, count] int64, equal ones by id; their log-probabilities, [a, count] float32. They are computed in float64
    and rounded once. A row whose logits contain NaN or +inf or are all -inf gives NaN, and no ids that mean anything.
    """
    if not 1 <= count <= logits.shape[-1]:
        raise KernelError(f"log_probs: count: expected 1 to {logits.shape[-1]}, found {count}")
    return _LOG_PROBS.run(logits, rows, ids, count)[:4]  # type: ignore[return-value]


def _check_vocabulary(kernel: str, logits: Tensor) -> None:
    if logits.shape[1] == 0:
        raise KernelError(f"{kernel}: logits: expected at least one column, found shape {list(logits.shape)}")
