"""Mixture of experts: which experts a token goes to, and what they make of it.

A wrong argument raises KernelError naming it, what was expected and what was found. A row's result depends on that row
alone.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from . import check, core, reference
from .errors import KernelError
from .linear import BLOCK_N, DEAL_BYTES, Format, Weight

_SOFTMAX_TOP_K = core.kernel("softmax_top_k")
_SIGMOID_TOP_K = core.kernel("sigmoid_top_k")

_TILE_ROWS = 16


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

    `parts`: projections of n outputs each that are used together, gate and up. All are one tall weight of any format:
    expert by expert, block by block of 32 outputs the blocks of all parts, so that an expert's weights are read in
    order; where kernels run in plain torch, part by part. Every part begins a new block.
    """

    weight: Weight
    experts: int
    parts: int
    n: int

    @staticmethod
    def nbytes(experts: int, n: int, k: int, form: Format, *, parts: int = 1) -> int:
        """Bytes that the packed weights take, padding included."""
        return form.nbytes(_tall(experts, parts, n), k)

    @classmethod
    def empty(cls, experts: int, n: int, k: int, form: Format, *, parts: int = 1) -> "PackedExperts":
        """All zeros, in memory of its own (`core.alloc`)."""
        return cls(form.empty(_tall(experts, parts, n), k), experts, parts, n)

    @property
    def k(self) -> int:
        return self.weight.k

    def part(self, expert: int, part: int = 0) -> Weight:
        """The weight[n, k] of one part of an expert: a view, to write and to unpack."""
        if not (0 <= expert < self.experts and 0 <= part < self.parts):
            raise KernelError(
                f"PackedExperts: expected one of {self.experts} experts and {self.parts} parts, "
                f"found expert {expert}, part {part}"
            )
        rows = _up_to_block(self.n)
        if self.weight.is_plain:
            return self.weight.part((expert * self.parts + part) * rows, self.n)
        return self.weight.part(expert * self.parts * rows + part * BLOCK_N, self.n, self.parts)

    def write(self, rows: Tensor, expert: int, *, part: int = 0, row: int = 0, col: int = 0) -> None:
        """Converts and packs rows[r, c] into [row : row + r, col : col + c] of a part, as the weight's `write` does."""
        self.part(expert, part).write(rows, row, col)

    def unpack(self, expert: int, part: int = 0) -> Tensor:
        """The plain weight[n, k] of a part."""
        return self.part(expert, part).unpack()


def _up_to_block(n: int) -> int:
    return -(-n // BLOCK_N) * BLOCK_N


def _tall(experts: int, parts: int, n: int) -> int:
    """Rows of the tall weight."""
    if experts < 1 or parts < 1:
        raise KernelError(f"PackedExperts: experts, parts: expected positive numbers, found {experts}, {parts}")
    return experts * parts * _up_to_block(n)


def moe(x: Tensor, gate_up: PackedExperts, down: PackedExperts, ids: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum of what each token's experts make of it: down(silu(gate(x)) * up(x)).

    x: [m, hidden], of the dtype that the weights' format wants; gate_up: two parts of [width, hidden]; down: [hidden,
    width] of the same format; ids: [m, k] int32, experts of each token; weights: [m, k] float32. Returns [m, hidden].
    With plain weights gate, up, silu and their product are rounded as by `linear` and `ops.silu_mul`; with quantised
    ones they stay in fp32 until the down projection rounds or quantises its inputs. Outputs of experts stay in fp32,
    their weighted sum over k, in the order of ids, is rounded once. Only weights of experts that ids names are read.
    """
    width = gate_up.n
    check.tensor("moe", "x", x, (None, gate_up.k), gate_up.weight.format.activations)
    check.tensor("moe", "ids", ids, (x.shape[0], None), torch.int32)
    if ids.shape[1] == 0:
        raise KernelError("moe: ids: expected at least one expert a token, found none")
    check.tensor("moe", "weights", weights, ids.shape, torch.float32)
    found = (down.experts, down.parts, down.n, down.k, down.weight.moe_kernel)
    if gate_up.parts != 2 or found != (gate_up.experts, 1, gate_up.k, width, gate_up.weight.moe_kernel):
        raise KernelError(
            f"moe: down: expected 1 part of {gate_up.experts} experts [{gate_up.k}, {width}] {gate_up.weight.format} "
            f"after 2 parts of gate_up, found {down.parts} of {down.experts} experts [{down.n}, {down.k}] "
            f"{down.weight.format} after {gate_up.parts}"
        )
    if core.isa() == "reference" or gate_up.weight.is_plain or down.weight.is_plain:
        return reference.moe(x, gate_up, down, ids, weights)
    m, hidden = x.shape
    out = core.empty((m, hidden), x.dtype)
    if m == 0:
        return out
    pairs = ids.numel()
    # In tiles, every expert's rows begin a new one. Kernels that round to bfloat16 use half of it.
    rows = (pairs // _TILE_ROWS + min(pairs, gate_up.experts)) * _TILE_ROWS
    middle = core.empty((rows, _up_to_block(width)), torch.float32)
    partial = core.empty((pairs, _up_to_block(hidden)), torch.float32)
    operands = (*gate_up.weight.operands(), *down.weight.operands())
    dealt = core.empty((2 * DEAL_BYTES,), torch.uint8)  # of each projection
    arguments = (x, ids, weights, middle, partial, out, dealt, *operands)
    core.launch(gate_up.weight.moe_kernel, arguments, (gate_up.experts, width))
    return out
