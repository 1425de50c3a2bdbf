"""Entries of `bench kernels` for fused experts in the shape of Qwen3-30B-A3B, against a loop of torch linears."""

import argparse
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from tilerank.kernels.moe import moe
from tilerank.kernels.packed_experts import PackedExperts
from tilerank.parallel.cost import Work

from .entry import Entry, replayed
from .formats import WEIGHT_FORMATS

EXPERTS, TOP_K, HIDDEN, WIDTH = 128, 8, 2048, 768
ROUTINGS = 16  # assignments of tokens to experts that calls cycle through


def entries(args: argparse.Namespace) -> Iterator[Entry]:
    for name in args.formats:
        if name != "float32":
            yield from _experts(name, args.tokens)


def _experts(name: str, tokens: list[int]) -> Iterator[Entry]:
    """Entries of one weight format. The bytes of their work are the weights of the experts that have tokens."""
    weight_format = WEIGHT_FORMATS[name]
    plain_gate_up = torch.empty(EXPERTS, 2 * WIDTH, HIDDEN, dtype=torch.bfloat16).normal_(0, 0.02)
    plain_down = torch.empty(EXPERTS, HIDDEN, WIDTH, dtype=torch.bfloat16).normal_(0, 0.02)
    gate_up = PackedExperts.empty(EXPERTS, WIDTH, HIDDEN, weight_format, parts=2)
    down = PackedExperts.empty(EXPERTS, HIDDEN, WIDTH, weight_format)
    for expert in range(EXPERTS):
        for part in range(2):
            gate_up.write(plain_gate_up[expert, part * WIDTH : (part + 1) * WIDTH], expert, part=part)
        down.write(plain_down[expert], expert)
    expert_bytes = 2 * weight_format.nbytes(WIDTH, HIDDEN) + weight_format.nbytes(HIDDEN, WIDTH)
    for m in tokens:
        x = torch.randn(m, HIDDEN).to(weight_format.activations)
        first = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(m)])
        # The first assignment, shifted by some experts: all have the same work and read different weights.
        routings = [((first + i * (EXPERTS // ROUTINGS)) % EXPERTS).to(torch.int32) for i in range(ROUTINGS)]
        weights = torch.full((m, TOP_K), 1 / TOP_K)
        chosen = len(set(first.flatten().tolist()))
        work = Work(chosen * expert_bytes, **{weight_format.operands: 2 * m * TOP_K * 3 * WIDTH * HIDDEN})
        ours = replayed([partial(moe, x, gate_up, down, ids, weights) for ids in routings])
        theirs = [partial(loop_of_linears, x, plain_gate_up, plain_down, ids, weights) for ids in routings]
        in_torch = theirs if name == "bfloat16" else ()
        yield Entry("experts", f"{m} x {TOP_K} of {EXPERTS}", work, ours, in_torch, format=name)


def loop_of_linears(x: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Experts as a loop of torch linears over the rows of each expert. x: [m, hidden]; ids, weights: [m, top_k]."""
    out = torch.zeros_like(x)
    for expert in sorted(set(ids.flatten().tolist())):
        rows, choice = torch.where(ids == expert)
        gate, up = functional.linear(x[rows], gate_up[expert]).chunk(2, dim=-1)
        y = functional.linear(functional.silu(gate) * up, down[expert])
        out.index_add_(0, rows, y * weights[rows, choice].to(x.dtype).unsqueeze(1))
    return out
