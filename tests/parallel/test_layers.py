"""Sharded layers against the plain computation in torch, all ranks simulated in one process, TP 1..8."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from thread_ranks import assert_all_equal_to, fill, on_all_ranks, random_checkpoint, sizes, strategies
from torch import Tensor

from tilerank.kernels.weight_formats import Format, Fp8, Int4, Int8
from tilerank.kernels.weight_formats.floats import FloatWeight
from tilerank.parallel.embedding import ParallelLMHead, TiedEmbedding, VocabParallelEmbedding
from tilerank.parallel.experts import ParallelExperts
from tilerank.parallel.linear import (
    ColumnParallelLinear,
    GateUpParallelLinear,
    GatheredLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from tilerank.parallel.norm import JointNorm, RMSNorm
from tilerank.parallel.parameters import Layer
from tilerank.parallel.shard import Cut, Span, Strategy
from tilerank.parallel.sharding import Sharding, WeightFormats
from tilerank.parallel.stacked import QKVParallelLinear


def plain_attention(q: Tensor, k: Tensor, v: Tensor, kv_of_q: list[int | None]) -> Tensor:
    """Full attention; a query head without a KV head gives zeros."""
    out = torch.zeros_like(q)
    for head, kv in enumerate(kv_of_q):
        if kv is not None:
            scores = (q[:, head] @ k[:, kv].T / q.shape[-1] ** 0.5).softmax(-1)
            out[:, head] = scores @ v[:, kv]
    return out


@sizes
@strategies
@pytest.mark.parametrize(("q_heads", "kv_heads", "bias"), [(8, 2, False), (14, 2, True), (9, 9, True), (4, 2, True)])
def test_attention(size: int, strategy: Strategy, q_heads: int, kv_heads: int, bias: bool) -> None:
    hidden, head_dim, tokens = 48, 8, 5
    q_rows, kv_rows = q_heads * head_dim, kv_heads * head_dim
    checkpoint = random_checkpoint(
        size,
        a__q_proj__weight=(q_rows, hidden),
        a__k_proj__weight=(kv_rows, hidden),
        a__v_proj__weight=(kv_rows, hidden),
        a__o_proj__weight=(hidden, q_rows),
        a__q_proj__bias=(q_rows,),
        a__k_proj__bias=(kv_rows,),
        a__v_proj__bias=(kv_rows,),
        a__o_proj__bias=(hidden,),
    )
    x = torch.randn(tokens, hidden)

    class Attention(Layer):
        def __init__(self, sharding: Sharding) -> None:
            self.sharding = sharding
            self.qkv = QKVParallelLinear("a", hidden, q_heads, kv_heads, head_dim, sharding, bias=bias)
            self.o = RowParallelLinear("a.o_proj", q_rows, hidden, sharding, span=self.qkv.q_columns, bias=bias)

        def __call__(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x)
            assert q.shape == (tokens, self.qkv.q_heads, head_dim)
            assert k.shape == v.shape == (tokens, self.qkv.kv_heads, head_dim)
            served: list[int | None] = [None] * self.qkv.q_heads
            for kv, (first, count) in enumerate(self.qkv.kv_map.tolist()):
                served[first : first + count] = [kv] * count
            return self.sharding.sum(self.o(plain_attention(q, k, v, served).flatten(1)))

    def body(sharding: Sharding) -> Tensor:
        attention = Attention(sharding)
        fill(attention, checkpoint)
        return attention(x)

    def project(name: str, x: Tensor) -> Tensor:
        return F.linear(x, checkpoint[f"a.{name}.weight"], checkpoint[f"a.{name}.bias"] if bias else None)

    q, k, v = (torch.unflatten(project(f"{n}_proj", x), -1, (-1, head_dim)) for n in "qkv")
    attended = plain_attention(q, k, v, [head // (q_heads // kv_heads) for head in range(q_heads)])
    assert_all_equal_to(on_all_ranks(size, strategy, body), project("o_proj", attended.flatten(1)), depth=hidden)


@sizes
@strategies
def test_parts_of_the_inputs(size: int, strategy: Strategy) -> None:
    """A projection of two inputs side by side is the sum of two projections."""
    checkpoint = random_checkpoint(size, p__weight=(100, 2 * 48))
    x = torch.randn(3, 2 * 48)

    def body(sharding: Sharding) -> Tensor:
        parts = [GatheredLinear("p", 48, 100, sharding, first=first, inputs=2 * 48) for first in (0, 48)]
        for part in parts:
            fill(part, checkpoint)
        return parts[0](x[:, :48].contiguous()) + parts[1](x[:, 48:].contiguous())

    assert_all_equal_to(on_all_ranks(size, strategy, body), F.linear(x, checkpoint["p.weight"]), depth=2 * 48)


@sizes
@strategies
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("width", [352, 80, 30])
def test_gated_mlp(size: int, strategy: Strategy, bias: bool, width: int) -> None:
    hidden = 40
    shapes: dict[str, tuple[int, ...]] = {
        f"m__{name}_proj__{kind}": shape
        for name, rows, columns in (("gate", width, hidden), ("up", width, hidden), ("down", hidden, width))
        for kind, shape in (("weight", (rows, columns)), ("bias", (rows,)))
    }
    checkpoint = random_checkpoint(size, **shapes)
    x = torch.randn(3, hidden)

    class MLP(Layer):
        def __init__(self, sharding: Sharding) -> None:
            self.gate_up = GateUpParallelLinear("m", hidden, width, sharding, bias=bias)
            self.down = RowParallelLinear("m.down_proj", width, hidden, sharding, span=self.gate_up.span, bias=bias)

    def body(sharding: Sharding) -> Tensor:
        mlp = MLP(sharding)
        fill(mlp, checkpoint)
        return sharding.sum(mlp.down(mlp.gate_up(x)))

    def project(name: str, x: Tensor) -> Tensor:
        return F.linear(x, checkpoint[f"m.{name}_proj.weight"], checkpoint[f"m.{name}_proj.bias"] if bias else None)

    expected = project("down", F.silu(project("gate", x)) * project("up", x))
    assert_all_equal_to(on_all_ranks(size, strategy, body), expected, depth=width)


@sizes
@strategies
@pytest.mark.parametrize("width", [352, 250, 80, 30])
def test_experts(size: int, strategy: Strategy, width: int) -> None:
    """The router is whole on every rank; every rank has some columns of each expert, or none."""
    hidden, count = 40, 5
    shapes = {"gate__weight": (count, hidden)}
    for e in range(count):
        shapes |= {f"experts__{e}__{name}_proj__weight": (width, hidden) for name in ("gate", "up")}
        shapes[f"experts__{e}__down_proj__weight"] = (hidden, width)
    checkpoint = random_checkpoint(width, **shapes)
    x = torch.randn(6, hidden)

    def body(sharding: Sharding) -> Tensor:
        router = ReplicatedLinear("gate", hidden, count, sharding)
        experts = ParallelExperts("experts", hidden, width, count, sharding, top_k=2)
        fill(router, checkpoint)
        fill(experts, checkpoint)
        held = [part.packed.weight for part in (experts.gate_up, experts.down) if not part.is_empty]
        data = [weight.data for weight in held if isinstance(weight, FloatWeight)]
        assert len(data) == len(held) and experts.nbytes() == sum(each.nbytes for each in data)
        weights, ids = router(x).softmax(-1).topk(2)
        return sharding.sum(experts(x, ids.int(), weights))

    def expert(e: int, x: Tensor) -> Tensor:
        gate, up, down = (checkpoint[f"experts.{e}.{name}_proj.weight"] for name in ("gate", "up", "down"))
        return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T

    weights, ids = (x @ checkpoint["gate.weight"].T).softmax(-1).topk(2)
    rows = [
        sum((w * expert(int(e), row) for w, e in zip(weights[i], ids[i], strict=True)), torch.zeros(hidden))
        for i, row in enumerate(x)
    ]
    assert_all_equal_to(on_all_ranks(size, strategy, body), torch.stack(rows), depth=width)


@pytest.mark.parametrize("strategy", ["pad", "split"])
@pytest.mark.parametrize("format", [Int8(), Fp8(32, 128), Int4(32)], ids=repr)
@pytest.mark.parametrize("size", [1, 4, 6])
def test_quantised_layers_of_which_the_last_ranks_hold_nothing(size: int, format: Format, strategy: Strategy) -> None:
    """A width of 80 is 1, 2 or 3 units. The tolerances cover the rounding of the formats."""
    hidden, width, count = 64, 80, 3
    shapes: dict[str, tuple[int, ...]] = {}
    for name in ("m", *(f"experts__{e}" for e in range(count))):
        shapes |= {f"{name}__{part}_proj__weight": (width, hidden) for part in ("gate", "up")}
        shapes[f"{name}__down_proj__weight"] = (hidden, width)
    checkpoint = random_checkpoint(7, **shapes)
    x = torch.randn(4, hidden, generator=torch.Generator().manual_seed(8)).bfloat16()
    ids, weights = torch.tensor([[0, 1], [1, 2], [2, 0], [0, 1]], dtype=torch.int32), torch.full((4, 2), 0.5)

    def body(sharding: Sharding) -> Tensor:
        sharding = replace(sharding, formats=WeightFormats(format, Int8()))
        gate_up = GateUpParallelLinear("m", hidden, width, sharding)
        down = RowParallelLinear("m.down_proj", width, hidden, sharding, span=gate_up.span)
        experts = ParallelExperts("experts", hidden, width, count, sharding, top_k=2)
        for layer in (gate_up, down, experts):
            fill(layer, checkpoint)
        parts = torch.cat([down(gate_up(x)), experts(x, ids, weights)])
        if sharding.rank >= gate_up.cut.units:
            assert not parts.any()
        return sharding.sum(parts)

    def mlp(name: str, x: Tensor) -> Tensor:
        gate, up, down = (checkpoint[f"{name}.{part}_proj.weight"] for part in ("gate", "up", "down"))
        return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T

    rows = [torch.stack([mlp(f"experts.{e}", row) for e in ids[i]]).mean(0) for i, row in enumerate(x.float())]
    expected = torch.cat([mlp("m", x.float()), torch.stack(rows)])
    for output in on_all_ranks(size, strategy, body, dtype=torch.bfloat16):
        error = (output.float() - expected).square().mean().sqrt() / expected.square().mean().sqrt()
        assert error < (0.2 if isinstance(format, Int4) else 0.06)


@sizes
@strategies
@pytest.mark.parametrize("width", [352, 350, 80, 33])
def test_column_then_row_with_ranks_that_hold_nothing(size: int, strategy: Strategy, width: int) -> None:
    checkpoint = random_checkpoint(
        width, up__weight=(width, 24), up__bias=(width,), down__weight=(24, width), down__bias=(24,)
    )
    x = torch.randn(6, 24)

    def body(sharding: Sharding) -> Tensor:
        up = ColumnParallelLinear("up", 24, width, sharding, bias=True)
        down = RowParallelLinear("down", width, 24, sharding, span=up.span, bias=True)
        fill(up, checkpoint)
        fill(down, checkpoint)
        return torch.stack([sharding.sum(down(up(x).relu())), sharding.sum(down(down.own_columns(whole)))])

    whole = F.linear(x, checkpoint["up.weight"], checkpoint["up.bias"]).relu()
    expected = F.linear(whole, checkpoint["down.weight"], checkpoint["down.bias"])
    assert_all_equal_to(on_all_ranks(size, strategy, body), torch.stack([expected, expected]), depth=width)


def test_column_cut_by_hand() -> None:
    cut = Cut(128, 32, (Span(0, 96, 96), Span(96, 128, 32)))
    checkpoint = random_checkpoint(0, up__weight=(128, 16))
    x = torch.randn(2, 16)

    def body(sharding: Sharding) -> Tensor:
        up = ColumnParallelLinear("up", 16, 128, sharding, cut=cut)
        fill(up, checkpoint)
        return up(x)

    first, second = on_all_ranks(2, "auto", body)
    assert (first.shape[1], second.shape[1]) == (96, 32)
    torch.testing.assert_close(torch.cat([first, second], dim=1), x @ checkpoint["up.weight"].T)


@sizes
@strategies
@pytest.mark.parametrize("vocab", [256, 250, 100])
@pytest.mark.parametrize("tied", [False, True])
def test_embedding_and_head(size: int, strategy: Strategy, vocab: int, tied: bool) -> None:
    checkpoint = random_checkpoint(vocab, embed__weight=(vocab, 24), head__weight=(vocab, 24))
    if tied:
        del checkpoint["head.weight"]
    ids = torch.tensor([0, vocab - 1, 17, 31, 32, 33, vocab // 2])

    class Vocabulary(Layer):
        def __init__(self, sharding: Sharding) -> None:
            self.embed = (TiedEmbedding if tied else VocabParallelEmbedding)("embed", vocab, 24, sharding)
            if not tied:
                self.head = ParallelLMHead("head", 24, vocab, sharding)

    def body(sharding: Sharding) -> Tensor:
        layer = Vocabulary(sharding)
        fill(layer, checkpoint)
        assert {rectangle.name for rectangle in layer.rectangles()} == checkpoint.keys()
        embedded = layer.embed(ids)
        assert torch.equal(embedded, checkpoint["embed.weight"][ids])
        assert isinstance(layer.embed, TiedEmbedding) == tied
        return layer.embed.logits(embedded) if isinstance(layer.embed, TiedEmbedding) else layer.head(embedded)

    head = checkpoint["embed.weight" if tied else "head.weight"]
    assert_all_equal_to(on_all_ranks(size, strategy, body), checkpoint["embed.weight"][ids] @ head.T, depth=24)


def test_a_tied_weight_is_held_once() -> None:
    sharding = Sharding(1, 3, torch.bfloat16, None)
    tied = TiedEmbedding("embed", 4096, 256, sharding)
    assert tied.nbytes() == ParallelLMHead("embed", 256, 4096, sharding).nbytes()
    assert tied.nbytes() == 1376 * 256 * 2  # 43 of 128 units


@sizes
def test_head_with_bias_and_logits_in_fp32(size: int) -> None:
    checkpoint = random_checkpoint(1, head__weight=(70, 32), head__bias=(70,))
    x = torch.randn(2, 32).bfloat16()

    def body(sharding: Sharding) -> Tensor:
        head = ParallelLMHead("head", 32, 70, sharding, bias=True)
        fill(head, checkpoint)
        return head(x)

    weight, bias = (checkpoint[f"head.{kind}"].bfloat16().float() for kind in ("weight", "bias"))
    outputs = on_all_ranks(size, "auto", body, dtype=torch.bfloat16)
    assert outputs[0].dtype == torch.float32
    assert_all_equal_to(outputs, x.float() @ weight.T + bias, depth=32)


@pytest.mark.parametrize("zero_centered", [False, True])
def test_norm_is_whole_on_every_rank(zero_centered: bool) -> None:
    checkpoint = random_checkpoint(2, norm__weight=(24,))
    x, residual, parts = torch.randn(3, 24), torch.randn(3, 24), torch.randn(3, 3, 24)

    def body(sharding: Sharding) -> Tensor:
        norm = RMSNorm("norm", 24, 1e-5, sharding, zero_centered=zero_centered)
        fill(norm, checkpoint)
        mine = residual.clone()
        added = norm.add(parts[sharding.rank], mine)
        assert torch.equal(mine, residual + parts.sum(0))
        return torch.cat([norm(x), added])

    weight = checkpoint["norm.weight"] + (1 if zero_centered else 0)
    both = torch.cat([x, parts.sum(0) + residual])
    expected = both * torch.rsqrt(both.pow(2).mean(-1, keepdim=True) + 1e-5) * weight
    assert_all_equal_to(on_all_ranks(3, "auto", body), expected, depth=24)


@sizes
@strategies
@pytest.mark.parametrize(("q_heads", "kv_heads"), [(8, 2), (6, 3)])
def test_a_joint_norm_counts_every_head_once(size: int, strategy: Strategy, q_heads: int, kv_heads: int) -> None:
    """Ranks have padded heads, none, or KV heads that other ranks have as well."""
    dim, heads = 8, (q_heads, kv_heads)
    checkpoint = random_checkpoint(5, a__q_norm__weight=(q_heads * dim,), a__k_norm__weight=(kv_heads * dim,))
    whole = [torch.randn(3, count * dim) for count in heads]
    weights = [checkpoint[f"a.{name}_norm.weight"] for name in "qk"]
    normed = [F.rms_norm(x, x.shape[1:], weight, 1e-5) for x, weight in zip(whole, weights, strict=True)]

    def body(sharding: Sharding) -> Tensor:
        cut = sharding.cut_heads(q_heads, kv_heads, dim, 64)
        norm = JointNorm("a", q_heads, kv_heads, cut, 1e-5, sharding)
        fill(norm, checkpoint)
        spans = [spans[sharding.rank] for spans in (cut.q, cut.kv)]

        def part(x: Tensor, span: Span) -> Tensor:
            rows = x[:, span.start * dim : span.stop * dim]
            return F.pad(rows, (0, (span.size - span.real) * dim)).view(len(x), span.size, dim)

        mine, right = ([part(x, span) for x, span in zip(both, spans, strict=True)] for both in (whole, normed))
        norm(*mine)
        return sharding.sum(torch.stack([(x - y).abs().sum() for x, y in zip(mine, right, strict=True)]))

    assert on_all_ranks(size, strategy, body)[0].max() < 1e-4
