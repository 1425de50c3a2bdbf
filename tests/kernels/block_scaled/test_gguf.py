"""Products, experts and look-ups with weights in the block formats of GGUF, with bf16 and int8 activations, on every
rung."""

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.kernels.block_scaled.forms import quantised
from tests.loader.gguf_files import TYPES, random_blocks
from tilerank.kernels import core
from tilerank.kernels.linear import linear
from tilerank.kernels.moe import moe
from tilerank.kernels.packed_experts import PackedExperts
from tilerank.kernels.weight_formats import Gguf, GgufA8
from tilerank.kernels.weight_formats.gguf import GGUF_TYPES, GgufWeight
from tilerank.kernels.weight_formats.gguf_blocks import decode
from tilerank.loader.gguf.blocks import dequantise

N, K = 70, 512


def blocks_of(kind: str, n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return the blocks of a weight[n, K], and its values."""
    data = random_blocks(kind, n, K, np.random.default_rng(seed))
    blocks = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(n, K // _block(kind), -1)
    return blocks, dequantise(kind, blocks)


def _block(kind: str) -> int:
    return GGUF_TYPES[kind].block


def write(weight: GgufWeight, blocks: Tensor, first: int = 0, row: int = 0) -> None:
    """Write the columns from `first` on, of which the weight's format says the place in a block."""
    group = weight.format.parts.group
    weight.write_blocks(blocks, torch.arange(first // group, (first + weight.k) // group, dtype=torch.int32), row)


@pytest.mark.parametrize("kind", GGUF_TYPES)
def test_products_and_rows_have_the_values_of_the_file(rung: str, kind: str) -> None:
    blocks, values = blocks_of(kind, N, seed=1)
    weight = Gguf(kind, _block(kind)).empty(N, K)
    write(weight, blocks)
    assert torch.equal(weight.unpack(), values)
    x = torch.randn(40, K, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    exact, sizes = x.double() @ values.double().T, x.double().abs() @ values.double().abs().T
    whole = linear(x, weight, out_dtype=torch.float32)
    assert ((whole - exact).abs() <= 3e-6 * sizes).all()
    for m in (1, 3, 9):
        assert torch.equal(linear(x[:m], weight, out_dtype=torch.float32), whole[:m])
    ids = torch.tensor([5, 0, 69, 70])
    expected = torch.cat([values[[5, 0, 69]].to(torch.bfloat16), torch.zeros(1, K, dtype=torch.bfloat16)])
    assert torch.equal(weight.embedding(ids), expected)
    part = Gguf(kind, _block(kind), 64 % _block(kind)).empty(N, 352)  # begins and ends inside of blocks of 256
    write(part, blocks, 64)
    assert torch.equal(part.unpack(), values[:, 64:416])
    assert torch.equal(part.embedding(ids[:3]), expected[:3, 64:416])
    inputs = x[:, 64:416].contiguous()
    exact = inputs.double() @ values[:, 64:416].double().T
    assert ((linear(inputs, part, out_dtype=torch.float32) - exact).abs() <= 3e-6 * sizes).all()


def int8_product(x: Tensor, kind: str, blocks: Tensor, first: int = 0) -> Tensor:
    """Return the float32 result of int8 activations by the definition of the format, for columns from `first` on."""
    found, parts = decode(kind, blocks), GGUF_TYPES[kind]
    numbers = parts.numbers(found.codes).double()
    total = torch.zeros(len(x), len(numbers))
    for at in range(first, first + x.shape[1], parts.group):
        group, block = at // parts.group, at // parts.block
        codes, by_row = quantised(x[:, at - first : at - first + parts.group])
        factors = [(found.scales, found.subscales, codes @ numbers[:, at : at + parts.group].T)]
        if found.minimums is not None:
            factors.append((found.minimums, found.subminimums, codes.sum(1, keepdim=True)))
        for scales, subscales, sums in factors:
            scale = scales[:, block].double() * (1 if subscales is None else subscales[:, group].double())
            exact = (sums * by_row).float().double() * scale  # at most 20 and 24 bits, then 24 and 18
            # a fused multiply-add
            total = torch.from_numpy((exact.numpy().astype(np.longdouble) + total.numpy()).astype(np.float32))
    return total


@pytest.mark.parametrize("kind", GGUF_TYPES)
def test_products_of_int8_activations_are_exact(rung: str, kind: str) -> None:
    blocks, _ = blocks_of(kind, N, seed=2)
    weight = GgufA8(kind, _block(kind)).empty(N, K)
    write(weight, blocks)
    x = torch.randn(75, K, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    x[1], x[2, 100] = 0, torch.nan
    expected = int8_product(x, kind, blocks)
    assert expected[2].isnan().all()
    wanted = expected.nan_to_num(1e9)
    for m in (75, 1, 3, 9, 33):
        assert torch.equal(torch.nan_to_num(linear(x[:m], weight, out_dtype=torch.float32), 1e9), wanted[:m]), m
    part = GgufA8(kind, _block(kind), 64 % _block(kind)).empty(N, 352)  # begins and ends inside of blocks of 256
    write(part, blocks, 64)
    inputs = x[3:, 64:416].contiguous()
    expected = int8_product(inputs, kind, blocks, 64)
    for m in (72, 2):
        assert torch.equal(linear(inputs[:m], part, out_dtype=torch.float32), expected[:m]), m


@pytest.mark.parametrize("form", [Gguf, GgufA8])
@pytest.mark.parametrize("kind", GGUF_TYPES)
def test_experts_are_the_same_products(rung: str, kind: str, form: type[Gguf]) -> None:
    """Files often have the down projection in another type than gate and up."""
    experts, width = 2, 256
    kinds = list(GGUF_TYPES)
    other = kinds[(kinds.index(kind) + 5) % len(kinds)]
    gate_up = PackedExperts.empty(experts, width, K, form(kind, _block(kind)), parts=2)
    down = PackedExperts.empty(experts, K, width, form(other, _block(other)))
    values: list[list[Tensor]] = [[], [], []]
    for expert in range(experts):
        for part in range(2):
            blocks, found = blocks_of(kind, width, 10 * expert + part)
            write(gate_up.part(expert, part), blocks)  # type: ignore[arg-type]
            values[part].append(found)
        blocks, found = blocks_of(other, K, 10 * expert + 2)
        write(down.part(expert), blocks[:, : width // _block(other)])  # type: ignore[arg-type]
        values[2].append(found[:, :width])
    x = torch.randn(6, K, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    ids = torch.tensor([[0, 1], [1, 0], [1, 0], [0, 1], [1, 0], [0, 1]], dtype=torch.int32)
    weights = torch.full((6, 2), 0.5)
    found = moe(x, gate_up, down, ids, weights)
    expected = torch.zeros(6, K)
    for row in range(6):
        for chosen in ids[row].tolist():
            gate, up = (x[row].float() @ values[part][chosen].T for part in (0, 1))
            middle = (torch.nn.functional.silu(gate) * up).to(torch.bfloat16)
            expected[row] += 0.5 * (middle.float() @ values[2][chosen].T)
    assert (found.float() - expected).abs().max() <= 0.02 * expected.abs().max()


def test_bytes_in_memory_are_those_of_the_file() -> None:
    for kind, (_, values, nbytes) in TYPES.items():
        if kind in GGUF_TYPES and core.isa() != "reference":
            assert Gguf(kind, _block(kind)).nbytes(4096, 4096) <= 1.05 * 4096 * 4096 / values * nbytes, kind
