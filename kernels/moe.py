"""Mixture of experts: which experts a token goes to, and what they make of it.

A wrong argument raises KernelError naming it, what was expected and what was found. A row's result depends on that row
alone.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from . import check, core, reference
from .errors import KernelError
from .linear import PackedWeight

_SOFTMAX_TOP_K = core.kernel("softmax_top_k")
_SIGMOID_TOP_K = core.kernel("sigmoid_top_k")
_MOE = {torch.bfloat16: core.kernel("moe_bf16"), torch.float32: core.kernel("moe_f32")}

_TILE_ROWS = 16
_BLOCK_N = 32


def softmax_top_k(logits: Tensor, top_k: int, *, renormalize: bool) -> tuple[Tensor, Tensor]:
    """The routers of Qwen: the `top_k` most probable experts of every token, the first of equals.

    logits: [m, experts]. Returns ids [m, top_k] int32, most probable first, and their weights [m, top_k] float32: the
    softmax over all experts in fp32, divided by the sum of those chosen if `renormalize`, rounded to logits.dtype.
    """
    check.tensor("softmax_top_k", "logits", logits, (None, None), check.ACTIVATIONS)
    _check_top_k("softmax_top_k", top_k, logits.shape[1])
    if core.isa() == "reference":
        return reference.softmax_top_k(logits, top_k, renormalize=renormalize)
    ids, weights = _choices(logits.shape[0], top_k)
    core.launch(_SOFTMAX_TOP_K, (logits, ids, weights), (renormalize,))
    return ids, weights


def sigmoid_top_k(
    logits: Tensor, bias: Tensor, top_k: int, *, groups: int, top_groups: int, renormalize: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """The router of DeepSeek-V3 (arXiv 2412.19437): experts of the best groups, chosen with a bias, weighed without.

    logits: [m, experts] float32; bias: [experts] float32. With s = sigmoid(logits) and c = s + bias: of the `groups`
    equal groups of experts keep the `top_groups` whose two largest c add up to most; of their experts choose the
    `top_k` with the largest c. Returns ids [m, top_k] int32 in that order and weights [m, top_k] float32: s, divided by
    the sum of those chosen + 1e-20 if `renormalize`, times `scale`. The first of equals wins everywhere.
    """
    check.tensor("sigmoid_top_k", "logits", logits, (None, None), torch.float32)
    check.tensor("sigmoid_top_k", "bias", bias, logits.shape[1:], torch.float32)
    experts = logits.shape[1]
    if groups < 1 or experts % groups or experts // groups < 2:
        raise KernelError(
            f"sigmoid_top_k: groups: expected a number that cuts {experts} experts into equal groups of at least 2, "
            f"found {groups}"
        )
    if not 1 <= top_groups <= groups:
        raise KernelError(f"sigmoid_top_k: top_groups: expected 1 to {groups}, found {top_groups}")
    _check_top_k("sigmoid_top_k", top_k, experts // groups * top_groups)
    if core.isa() == "reference":
        return reference.sigmoid_top_k(
            logits, bias, top_k, groups=groups, top_groups=top_groups, renormalize=renormalize, scale=scale
        )
    ids, weights = _choices(logits.shape[0], top_k)
    core.launch(_SIGMOID_TOP_K, (logits, bias, ids, weights), (groups, top_groups, renormalize), (scale,))
    return ids, weights


def _check_top_k(kernel: str, top_k: int, experts: int) -> None:
    if not 1 <= top_k <= experts:
        raise KernelError(f"{kernel}: top_k: expected 1 to {experts} experts, found {top_k}")


def _choices(m: int, top_k: int) -> tuple[Tensor, Tensor]:
    return core.empty((m, top_k), torch.int32), core.empty((m, top_k), torch.float32)


@dataclass(frozen=True)
class PackedExperts:
    """The weights of one kind of all experts, each [parts * n, k], as the kernels read them.

    `parts`: projections of n outputs each that are used together, gate and up. data holds, for every expert, block by
    block of 32 outputs the blocks of all parts (csrc/pack.h), so that an expert's weights are read in order; or is
    [experts, parts, n, k] where kernels run in plain torch.
    """

    data: Tensor
    experts: int
    parts: int
    n: int
    k: int
    dtype: torch.dtype

    @staticmethod
    def nbytes(experts: int, n: int, k: int, dtype: torch.dtype, *, parts: int = 1) -> int:
        """Bytes that the packed weights take, padding included."""
        if experts < 1 or parts < 1:
            raise KernelError(f"PackedExperts: experts, parts: expected positive numbers, found {experts}, {parts}")
        return experts * parts * PackedWeight.nbytes(n, k, dtype)

    @classmethod
    def empty(cls, experts: int, n: int, k: int, dtype: torch.dtype, *, parts: int = 1) -> "PackedExperts":
        """All zeros, in memory of its own (`core.alloc`)."""
        data = core.alloc(cls.nbytes(experts, n, k, dtype, parts=parts)).view(dtype)
        return cls(data.view(experts, parts, n, k) if core.isa() == "reference" else data, experts, parts, n, k, dtype)

    @property
    def is_plain(self) -> bool:
        return self.data.ndim > 1

    def write(self, rows: Tensor, expert: int, *, part: int = 0, row: int = 0, col: int = 0) -> None:
        """Converts and packs rows[r, c] into [row : row + r, col : col + c] of a part, as `PackedWeight.write` does."""
        self._part(expert, part).write(rows, row, col)

    def unpack(self, expert: int, part: int = 0) -> Tensor:
        """The plain weight[n, k] of a part."""
        return self._part(expert, part).unpack()

    def _part(self, expert: int, part: int) -> PackedWeight:
        """A view whose blocks lie apart, which `linear` cannot read."""
        if not (0 <= expert < self.experts and 0 <= part < self.parts):
            raise KernelError(
                f"PackedExperts: expected one of {self.experts} experts and {self.parts} parts, "
                f"found expert {expert}, part {part}"
            )
        if self.is_plain:
            return PackedWeight(self.data[expert, part], self.n, self.k, self.dtype)
        blocks = self.data.view(self.experts, -(-self.n // _BLOCK_N), self.parts, -1)
        return PackedWeight(blocks[expert, :, part], self.n, self.k, self.dtype)


def moe(x: Tensor, gate_up: PackedExperts, down: PackedExperts, ids: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum of what each token's experts make of it: down(silu(gate(x)) * up(x)).

    x: [m, hidden], bfloat16 or float32 as the weights; gate_up: two parts of [width, hidden]; down: [hidden, width];
    ids: [m, k] int32, experts of each token; weights: [m, k] float32. Returns [m, hidden].
    gate, up, silu and their product are rounded as by `linear` and `ops.silu_mul`; outputs of experts stay in fp32,
    their weighted sum over k, in the order of ids, is rounded once. Only weights of experts that ids names are read.
    """
    width = gate_up.n
    check.tensor("moe", "x", x, (None, gate_up.k), gate_up.dtype)
    check.tensor("moe", "ids", ids, (x.shape[0], None), torch.int32)
    if ids.shape[1] == 0:
        raise KernelError("moe: ids: expected at least one expert a token, found none")
    check.tensor("moe", "weights", weights, ids.shape, torch.float32)
    found = (down.experts, down.parts, down.n, down.k, down.dtype)
    if gate_up.parts != 2 or found != (gate_up.experts, 1, gate_up.k, width, gate_up.dtype):
        raise KernelError(
            f"moe: down: expected 1 part of {gate_up.experts} experts [{gate_up.k}, {width}] {gate_up.dtype} after 2 "
            f"parts of gate_up, found {down.parts} of {down.experts} experts [{down.n}, {down.k}] {down.dtype} after "
            f"{gate_up.parts}"
        )
    if core.isa() == "reference" or gate_up.is_plain or down.is_plain:
        return reference.moe(x, gate_up, down, ids, weights)
    m, hidden = x.shape
    out = core.empty((m, hidden), x.dtype)
    if m == 0:
        return out
    pairs = ids.numel()
    columns = -(-width // _BLOCK_N) * _BLOCK_N
    # In tiles, every expert's rows begin a new one.
    rows = (pairs // _TILE_ROWS + min(pairs, gate_up.experts)) * _TILE_ROWS
    middle = core.empty((rows, columns), x.dtype)
    partial = core.empty((pairs, -(-hidden // _BLOCK_N) * _BLOCK_N), torch.float32)
    arguments = (x, gate_up.data, down.data, ids, weights, middle, partial, out)
    core.launch(_MOE[x.dtype], arguments, (gate_up.experts, width))
    return out
