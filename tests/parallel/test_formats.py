"""Weight formats in the sharded layers: the format of each layer, how it is cut, and its bytes."""

from dataclasses import replace
from fractions import Fraction

import pytest
import torch

from tilerank.kernels.weight_formats import ChannelFp8, Float, Format, Fp8, Gguf, Int4, Int8, Mxfp4, TokenInt8
from tilerank.parallel.embedding import ParallelLMHead, TiedEmbedding
from tilerank.parallel.errors import ShardError
from tilerank.parallel.experts import ParallelExperts
from tilerank.parallel.linear import GateUpParallelLinear, ReplicatedLinear, RowParallelLinear
from tilerank.parallel.norm import RMSNorm
from tilerank.parallel.shard import Span, cut_heads
from tilerank.parallel.sharding import Sharding, WeightFormats
from tilerank.parallel.stacked import QKVParallelLinear, StackedLinear

BF16 = Float(torch.bfloat16)


def sharding(formats: WeightFormats | None, rank: int = 0, size: int = 1) -> Sharding:
    return Sharding(rank, size, torch.bfloat16, None, formats=formats)


def stored(projections: Format, keeps: str = "none") -> WeightFormats:
    """Return the formats of a checkpoint that stores all modules in one format, except `keeps` and the head."""
    return WeightFormats(
        projections, projections, lambda name: None if keeps in name or name == "lm_head" else projections
    )


def stacks(layer: StackedLinear) -> list[tuple[int, Format]]:
    """Return the rows and the format of each weight."""
    return [(stack.weight.n, stack.weight.format) for stack in layer.stacks]


def test_which_layers_are_quantised_while_loading() -> None:
    s = sharding(WeightFormats(Int4(32, zero_points=True), Int8(), values=TokenInt8()))
    assert stacks(QKVParallelLinear("a", 64, 4, 2, 16, s)) == [(96, Int4(32, zero_points=True)), (32, TokenInt8())]
    assert RowParallelLinear("a.o_proj", 64, 64, s, span=s.cut(64).spans[0]).weight.format == Int4(32, zero_points=True)
    assert GateUpParallelLinear("m", 64, 96, s).weight.format == Int4(32, zero_points=True)
    assert ParallelLMHead("lm_head", 64, 96, s).weight.format == Int8()
    tied = TiedEmbedding("embed_tokens", 96, 64, s)
    assert [layer.format for layer in tied.walk() if hasattr(layer, "format")] == [Int8()]
    assert ReplicatedLinear("router", 64, 8, s).weight.format == BF16
    assert RMSNorm("n", 64, 1e-6, s).weight.dtype is torch.bfloat16


def test_which_layers_are_quantised_in_the_checkpoint() -> None:
    s = sharding(stored(Int8(), keeps="layers.1."))
    assert stacks(QKVParallelLinear("layers.0.a", 64, 4, 2, 16, s)) == [(128, Int8())]
    assert stacks(QKVParallelLinear("layers.1.a", 64, 4, 2, 16, s)) == [(128, BF16)]
    assert ParallelLMHead("lm_head", 64, 96, s).weight.format == BF16
    mixed = QKVParallelLinear("a", 64, 4, 2, 16, sharding(stored(Int8(), keeps="q_proj")))
    assert stacks(mixed) == [(64, BF16), (64, Int8())]


def test_scales_of_a_checkpoint_become_finer_where_a_cut_needs_it() -> None:
    """Heads of 64 columns, groups of 128: a rank that begins or ends in the middle of a group has groups of 64."""
    for rank, group in ((0, 64), (1, 64)):
        s = sharding(stored(Int4(128, zero_points=False)), rank, 2)
        qkv = QKVParallelLinear("a", 384, 6, 6, 64, s)
        assert (qkv.q_columns.start, stacks(qkv)) == (192 * rank, [(576, Int4(128, zero_points=False))])
        out = RowParallelLinear("a.o_proj", 384, 384, s, span=qkv.q_columns)
        assert out.weight.format == Int4(group, zero_points=False)
    for rank, block in ((0, Fp8(128, 128)), (1, Fp8(64, 128))):
        s = sharding(stored(Fp8(128, 128)), rank, 2)
        assert [held for _, held in stacks(QKVParallelLinear("a", 384, 6, 6, 64, s))] == [block]
        # A weight that is quantised while loading always fits.
    s = sharding(WeightFormats(Int4(128, zero_points=False), Int8()), 1, 2)
    span = QKVParallelLinear("a", 384, 6, 6, 64, s).q_columns
    assert RowParallelLinear("a.o_proj", 384, 384, s, span=span).weight.format == Int4(128, zero_points=False)


@pytest.mark.parametrize("form", [Int4(0), ChannelFp8()], ids=str)
def test_scales_of_whole_rows_fit_any_cut(form: Format) -> None:
    s = sharding(stored(form), 1, 2)
    span = QKVParallelLinear("a", 160, 2, 2, 80, s).q_columns
    assert span.start == 80
    assert RowParallelLinear("a.o_proj", 160, 160, s, span=span).weight.format == form


def test_heads_too_fine_for_the_kernels_are_refused() -> None:
    s = sharding(stored(Int4(128, zero_points=False)), 1, 2)
    span = QKVParallelLinear("a", 160, 2, 2, 80, s).q_columns
    with pytest.raises(ShardError, match=r"^a.o_proj: cannot be cut over 2 ranks: .* row 0, column 80, .* of 32"):
        RowParallelLinear("a.o_proj", 160, 160, s, span=span)


@pytest.mark.parametrize(
    ("formats", "unit"),
    [
        (None, 32),
        (WeightFormats(Int8(), Int8()), 64),
        (WeightFormats(Int4(32, zero_points=True), Int8()), 32),
        (WeightFormats(Int4(128, zero_points=True), Int8()), 128),
        (WeightFormats(Fp8(32, 128), Int8()), 128),
        (stored(Int4(128, zero_points=True)), 128),
        (stored(Fp8(128, 128)), 128),
    ],
)
def test_widths_are_cut_in_whole_blocks_where_these_divide(formats: WeightFormats | None, unit: int) -> None:
    cut = sharding(formats, 0, 3).cut_width(768, 2048)
    assert cut.unit == unit
    assert [span.size for span in cut.spans] == [256, 256, 256]


@pytest.mark.parametrize(
    ("formats", "width", "ranks", "sizes"),
    [
        (stored(Fp8(128, 128)), 2048, 3, [704, 704, 640]),  # DeepSeek-V3: 768, 640, 640 in whole blocks
        (stored(Fp8(128, 128)), 2048, 6, [352, 352, 352, 352, 320, 320]),
        (stored(Int8()), 2048, 6, [352, 352, 352, 352, 320, 320]),  # 384, 384, 320, ... in units of 64
        (WeightFormats(Int8(), Int8()), 2048, 6, [352, 352, 352, 352, 320, 320]),
        (stored(Int4(128, zero_points=True)), 2048, 6, [352, 352, 352, 352, 320, 320]),
        # Blocks that are quantised while loading stay whole: those of all numbers of ranks are the same.
        (WeightFormats(Fp8(32, 128), Int8()), 2048, 3, [768, 640, 640]),
        (WeightFormats(Int4(64), Int8()), 2048, 6, [384, 384, 320, 320, 320, 320]),
    ],
)
def test_widths_are_cut_in_parts_of_blocks_where_the_slowest_rank_reads_less(
    formats: WeightFormats, width: int, ranks: int, sizes: list[int]
) -> None:
    assert [span.size for span in sharding(formats, 0, ranks).cut_width(width, 7168).spans] == sizes


def test_more_scales_may_cost_more_than_an_even_cut_saves() -> None:
    """Groups have 3 bytes of scales and zeros for each output. An even cut of 95 groups saves 64 columns of three
    projections, 64 * 3 * (0.5 + 3 / 128) = 100 bytes an output, and has 95 groups of 64 instead of 48 of 128 in one of
    them, 3 * 47 = 141 bytes.
    """
    cut = sharding(stored(Int4(128, zero_points=True)), 0, 2).cut_width(95 * 128, 7168)
    assert (cut.unit, [span.size for span in cut.spans]) == (128, [48 * 128, 47 * 128])


def test_a_rank_that_ends_in_a_block_has_smaller_blocks() -> None:
    """Rank 0 holds 704 of 2,048 columns, which are 11 blocks of 64, and would be padded to 6 of 128."""
    for rank, block in enumerate((64, 64, 128)):
        s = sharding(stored(Fp8(128, 128)), rank, 3)
        gate_up = GateUpParallelLinear("m", 7168, 2048, s)
        down = RowParallelLinear("m.down_proj", 2048, 7168, s, span=gate_up.span)
        assert down.weight.format == Fp8(128, block)
    last = RowParallelLinear("m.down_proj", 704, 7168, sharding(stored(Fp8(128, 128))), span=Span(0, 704, 704))
    assert last.weight.format == Fp8(128, 128)  # where nothing follows, the last block is padded


@pytest.mark.parametrize("form, bits", [(Gguf("Q4_K", 256), 4.5), (Gguf("Q6_K", 256), 6.5625), (Gguf("Q4_0", 32), 4.5)])
@pytest.mark.parametrize("ranks", [1, 2, 3, 6])
def test_a_rank_that_begins_in_a_block_of_a_file_has_its_bytes(form: Gguf, bits: float, ranks: int) -> None:
    """The parts of 3,072 columns, of 1,024 or of 512 each, and of 2,048, of 352 or of 320 each at 6 ranks."""
    for width in (3072, 2048):
        held = 0
        for rank in range(ranks):
            s = sharding(stored(form), rank, ranks)
            gate_up = GateUpParallelLinear("m", 1024, width, s)
            down = RowParallelLinear("m.down_proj", width, 1024, s, span=gate_up.span)
            assert down.weight.format == replace(form, first=gate_up.span.start % form.block)
            held += gate_up.nbytes() + down.nbytes()
        assert held <= 1.05 * 3 * 1024 * width * bits / 8


def test_experts_are_held_as_they_are_stored_if_one_kernel_takes_their_projections() -> None:
    def held(**types: Format) -> list[Format]:
        formats = WeightFormats(
            BF16, BF16, lambda name: types.get(name.rpartition(".")[2].removesuffix("_proj"), types["gate"])
        )
        experts = ParallelExperts("e", 256, 256, 4, sharding(formats), top_k=2)
        return [experts.gate_up.format, experts.down.format]

    assert held(gate=Gguf("Q4_K", 256), down=Gguf("Q6_K", 256)) == [Gguf("Q4_K", 256), Gguf("Q6_K", 256)]
    assert held(gate=Gguf("Q4_K", 256), up=Gguf("Q5_K", 256)) == [BF16, BF16]
    assert held(gate=Gguf("Q4_K", 256), down=Mxfp4()) == [BF16, BF16]


@pytest.mark.parametrize("formats", [None, stored(Fp8(128, 128))])
def test_ranks_beyond_the_units_hold_nothing(formats: WeightFormats | None) -> None:
    sizes = [span.size for span in sharding(formats, 0, 25).cut_width(768, 2048).spans]
    assert sizes == [32] * 24 + [0]


def test_the_cost_rule_counts_bytes_of_the_format() -> None:
    """32/4 heads over 3 ranks: with smaller weights the cache has a larger share of the cost, which favours padding."""

    def waste(bytes_per_weight: Fraction | int) -> float:
        return cut_heads(32, 4, 128, 2048, 3, cached_tokens=4096, bytes_per_weight=bytes_per_weight).waste

    for form, per_weight in ((Int8(), 1 + Fraction(4, 4096)), (BF16, Fraction(2))):
        s = Sharding(0, 3, torch.bfloat16, None, cached_tokens=4096, formats=WeightFormats(form, Int8()))
        assert s.cut_heads(32, 4, 128, 2048).waste == waste(per_weight)
    assert waste(1) > waste(2)


def test_bytes_of_cached_numbers() -> None:
    s = Sharding(0, 3, torch.bfloat16, None, cached_tokens=4096, kv_dtype=torch.int8)
    assert (
        s.cut_heads(32, 4, 128, 2048).waste == cut_heads(32, 4, 128, 2048, 3, cached_tokens=4096, bytes_per_kv=1).waste
    )
