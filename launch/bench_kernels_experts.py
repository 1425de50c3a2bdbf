"""Entries of `bench kernels` for fused experts in the shape of Qwen3-30B-A3B, and a loop of torch linears."""

import argparse
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from tilerank.kernels.moe import PackedExperts, moe

from .bench_entry import Entry, replayed
from .bench_formats import FORMATS
from .bench_work import Work, operations

EXPERTS, TOP_K, HIDDEN, WIDTH = 128, 8, 2048, 768
CHOICES = 16  # of experts, that take turns


def entries(args: argparse.Namespace) -> Iterator[Entry]:
    for name in args.formats:
        if name != "float32":
            yield from _experts(name, args.tokens)


def _experts(name: str, tokens: list[int]) -> Iterator[Entry]:
    """Bytes are those of the experts that some token goes to."""
    form = FORMATS[name]
    plain_gate_up = torch.empty(EXPERTS, 2 * WIDTH, HIDDEN, dtype=torch.bfloat16).normal_(0, 0.02)
    plain_down = torch.empty(EXPERTS, HIDDEN, WIDTH, dtype=torch.bfloat16).normal_(0, 0.02)
    gate_up = PackedExperts.empty(EXPERTS, WIDTH, HIDDEN, form, parts=2)
    down = PackedExperts.empty(EXPERTS, HIDDEN, WIDTH, form)
    for expert in range(EXPERTS):
        for part in range(2):
            gate_up.write(plain_gate_up[expert, part * WIDTH : (part + 1) * WIDTH], expert, part=part)
        down.write(plain_down[expert], expert)
    expert_bytes = 2 * form.nbytes(WIDTH, HIDDEN) + form.nbytes(HIDDEN, WIDTH)
    for m in tokens:
        x = torch.randn(m, HIDDEN).to(form.activations)
        first = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(m)])
        # The same pattern on other experts: all choices have the same work.
        choices = [((first + turn * (EXPERTS // CHOICES)) % EXPERTS).to(torch.int32) for turn in range(CHOICES)]
        weights = torch.full((m, TOP_K), 1 / TOP_K)
        yield Entry(
            "experts",
            f"{m} x {TOP_K} of {EXPERTS}",
            name,
            Work(
                len(set(first.flatten().tolist())) * expert_bytes,
                **{operations(form): 2 * m * TOP_K * 3 * WIDTH * HIDDEN},
            ),
            replayed([partial(moe, x, gate_up, down, chosen, weights) for chosen in choices]),
            (
                lambda number, x=x, choices=choices, weights=weights: loop_of_linears(  # type: ignore[misc]
                    x, plain_gate_up, plain_down, choices[number % CHOICES], weights
                )
            )
            if name == "bfloat16"
            else None,
        )


def loop_of_linears(x: Tensor, gate_up: Tensor, down: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """What one writes with torch: expert by expert, the rows of the tokens that go there."""
    out = torch.zeros_like(x)
    for expert in sorted(set(ids.flatten().tolist())):
        rows, place = torch.where(ids == expert)
        gate, up = functional.linear(x[rows], gate_up[expert]).chunk(2, dim=-1)
        y = functional.linear(functional.silu(gate) * up, down[expert])
        out.index_add_(0, rows, y * weights[rows, place].to(x.dtype).unsqueeze(1))
    return out
