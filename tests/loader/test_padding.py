"""Padding arithmetic against hand-computed numbers and properties, TP 1..8."""

import math
from types import SimpleNamespace as Config
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from thread_ranks import fill

from tilerank.loader.errors import CheckpointError, ConfigError
from tilerank.loader.padding import (
    get_head_dim_and_projection_size,
    get_num_heads_padding_size,
    pad_loaded_weight,
    resolve_head_dim,
)
from tilerank.parallel.shard import Span
from tilerank.parallel.sharding import Sharding
from tilerank.runtime.models.towers.audio import Convolution


@pytest.mark.parametrize(
    ("cfg", "num_heads", "text", "expected"),
    [
        pytest.param(Config(hidden_size=4096), 32, True, 128, id="default"),
        pytest.param(Config(d_model=1280), 20, False, 64, id="d_model"),
        pytest.param(Config(hidden_size=2048, head_dim=128), 32, True, 128, id="explicit"),
        pytest.param(Config(hidden_size=4096, head_dim=None), 32, True, 128, id="null is absent"),
        pytest.param({"hidden_size": 4096, "head_dim": 96}, 32, True, 96, id="mapping"),
        pytest.param(
            Config(hidden_size=7168, qk_head_dim=192, head_dim=64, text_config=Config(head_dim=128)),
            128,
            True,
            192,
            id="qk_head_dim wins",
        ),
        pytest.param(
            Config(head_dim=64, text_config=Config(hidden_size=2048, head_dim=128)), 16, True, 128, id="text before top"
        ),
        pytest.param(
            Config(head_dim=64, text_config=Config(hidden_size=2048)), 16, True, 64, id="top before the default"
        ),
        pytest.param({"text_config": {"hidden_size": 2048}}, 16, True, 128, id="nested default"),
        pytest.param(
            Config(hidden_size=2048, hf_config=Config(head_dim=80), hf_text_config=Config(head_dim=96)),
            16,
            True,
            96,
            id="holder of both",
        ),
        pytest.param(
            Config(hidden_size=1152, head_dim=72, qk_head_dim=96), 16, False, 72, id="vision ignores qk_head_dim"
        ),
        pytest.param(Config(hidden_size=1152), 16, False, 72, id="vision default"),
        pytest.param(Config(), 16, True, None, id="neither, text"),
        pytest.param(Config(num_heads=16), 16, False, None, id="neither, vision"),
    ],
)
def test_head_dim(cfg: Any, num_heads: int, text: bool, expected: int | None) -> None:
    assert resolve_head_dim(cfg, num_heads, text) == expected


def test_head_dim_of_no_heads() -> None:
    with pytest.raises(ConfigError, match=r"4096.*at least 1 head, found 0"):
        resolve_head_dim(Config(hidden_size=4096), 0, True)


# By hand for TP 1..8.
PADDING = {
    (None, 128): [1, 2, 3, 4, 5, 6, 7, 8],
    (None, None): [1, 2, 3, 4, 5, 6, 7, 8],
    ((128, 128), 128): [1, 2, 3, 4, 5, 6, 7, 8],  # one head is one block
    ((128, 128), 256): [1, 2, 3, 4, 5, 6, 7, 8],  # one head is two blocks
    ((128, 128), 192): [3, 6, 9, 12, 15, 18, 21, 24],  # lcm 384 / 128 = 3
    ((128, 128), 72): [9, 18, 27, 36, 45, 54, 63, 72],  # lcm 1152 / 128 = 9
    ((128, 128), 64): [1, 2, 3, 4, 5, 6, 7, 8],  # lcm 128 / 128 = 1
    ((96, 128), 128): [4, 8, 12, 16, 20, 24, 28, 32],  # rows count, not columns: lcm 384 / 96 = 4
    ((128, 128), None): [2, 2, 6, 4, 10, 6, 14, 8],  # odd TP doubled
}


@pytest.mark.parametrize("case", PADDING, ids=str)
def test_num_heads_padding_size(case: tuple[tuple[int, int] | None, int | None]) -> None:
    shape, head_dim = case
    block = None if shape is None else list(shape)
    assert [get_num_heads_padding_size(tp, block, head_dim) for tp in range(1, 9)] == PADDING[case]


def test_num_heads_padding_size_without_head_dim() -> None:
    assert get_num_heads_padding_size(3, [128, 128]) == 6
    assert get_num_heads_padding_size(3, None) == 3


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((1152, 18, 16), (72, 1296)),
        ((1152, 16, 16), (72, 1152)),
        ((1280, 21, 20), (64, 1344)),
        ((128, 6, 4), (32, 192)),
    ],
)
def test_head_dim_and_projection_size(sizes: tuple[int, int, int], expected: tuple[int, int]) -> None:
    assert get_head_dim_and_projection_size(*sizes) == expected


@pytest.mark.parametrize("original", [0, 17])
def test_projection_of_fewer_heads_than_there_were(original: int) -> None:
    with pytest.raises(ConfigError, match=f"{original} heads cannot be padded to 16"):
        get_head_dim_and_projection_size(1152, 16, original)


def test_parts_are_padded_at_their_own_end() -> None:
    q, k, v = torch.full((4, 3), 1.0), torch.full((2, 3), 2.0), torch.full((2, 3), 3.0)
    padded = pad_loaded_weight(torch.cat([q, k, v]), 0, [6, 3, 3])
    assert padded[:, 0].tolist() == [1, 1, 1, 1, 0, 0, 2, 2, 0, 3, 3, 0]


def test_nothing_to_pad_copies_nothing() -> None:
    weight = torch.randn(6, 2)
    assert pad_loaded_weight(weight, 0, [4, 2]) is weight


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int8], ids=str)
def test_dtype_stays(dtype: torch.dtype) -> None:
    padded = pad_loaded_weight(torch.ones(2, 4).to(dtype), 1, [3, 3])
    assert padded.dtype == dtype
    assert padded.float().tolist() == [[1, 1, 0, 1, 1, 0]] * 2


@pytest.mark.parametrize(
    ("found", "sizes", "message"),
    [
        (10, [6, 3], r"shape \[10, 4\] has 10 rows in dimension 0, expected at most 9 = 6 \+ 3"),
        (10, [9, 3], r"shape \[10, 4\] has 10 rows .*proportions 9 \+ 3 of 12"),
        (7, [3, 3, 3], r"shape \[7, 4\] has 7 rows .*proportions 3 \+ 3 \+ 3 of 9"),
    ],
)
def test_parts_that_do_not_add_up(found: int, sizes: list[int], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        pad_loaded_weight(torch.ones(found, 4), 0, sizes)


@given(
    heads=st.tuples(st.integers(1, 8), st.integers(1, 8)),
    head_dim=st.integers(1, 5),
    tp=st.integers(1, 8),
    dim=st.integers(0, 1),
)
def test_padded_heads_drop_nothing(heads: tuple[int, int], head_dim: int, tp: int, dim: int) -> None:
    """A fused q|k|v of group x kv heads, padded to tp: every real row is found where its part begins, the rest is 0."""
    group, kv = heads
    padded_kv = -(-kv // tp) * tp
    parts = [torch.randn(n * head_dim, 3) for n in (group * kv, kv, kv)]
    sizes = [n * head_dim for n in (group * padded_kv, padded_kv, padded_kv)]
    fused = torch.cat(parts)
    padded = pad_loaded_weight(fused.T.contiguous() if dim else fused, dim, sizes)
    for part, chunk in zip(parts, torch.split(padded.T if dim else padded, sizes), strict=True):
        assert torch.equal(chunk[: len(part)], part)
        assert not chunk[len(part) :].any()


@given(tp=st.integers(1, 8), head_dim=st.integers(1, 512), rows=st.sampled_from([32, 64, 96, 128]))
def test_padding_size_is_a_multiple_of_tp_and_of_nothing_more_than_needed(tp: int, head_dim: int, rows: int) -> None:
    size = get_num_heads_padding_size(tp, [rows, rows], head_dim)
    assert size % tp == 0
    assert (size == tp) == (head_dim % rows == 0 or math.lcm(head_dim, rows) == rows)


def test_filters_of_padded_channels() -> None:
    """40 channels on 2 ranks of equal shapes: 32 on the first, 8 and 24 of zeros on the second."""
    weight = torch.randn(8, 40, 3, 3)
    for rank, real in enumerate((32, 8)):
        sharding = Sharding(rank, 2, torch.float32, None, "pad")
        inputs = sharding.cut(40).spans[rank]
        layer = Convolution("c", (40, 8), inputs, Span(0, 8, 8), sharding)
        fill(layer, {"c.weight": weight, "c.bias": torch.zeros(8)})
        held = layer.weight.packed.unpack().view(8, 3, 3, 32).transpose(1, 3)
        assert torch.equal(held[:, :real], weight[:, 32 * rank :][:, :real])
        assert not held[:, real:].any()
