"""Paged attention on every rung, against float64."""

import math
from itertools import accumulate
from typing import Any

import pytest
import torch
from attention_batch import DTYPES, GQA, MHA, UNEVEN, Batch, assert_exact
from torch import Tensor

from tilerank.kernels import core
from tilerank.kernels.attention import attention, store_kv
from tilerank.kernels.errors import KernelError
from tilerank.kernels.kv_pages import PAGE_TOKENS, KVPages

pytestmark = pytest.mark.usefixtures("rung")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("d", [8, 16, 24, 40, 64, 72, 128, 200, 256, 264, 512])
def test_head_sizes(dtype: torch.dtype, d: int) -> None:
    batch = Batch([45], GQA, d, dtype).store_all()
    assert_exact(batch.whole(0), batch, 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kv_map", [MHA, GQA, UNEVEN, [(0, 7)], [(0, 16)], [(2, 33)]], ids=str)
def test_query_heads_follow_the_map(dtype: torch.dtype, kv_map: list[tuple[int, int]]) -> None:
    batch = Batch([37], kv_map, 16, dtype).store_all()
    found = batch.whole(0)
    assert_exact(found, batch, 0)
    served = {head for first, count in kv_map for head in range(first, first + count)}
    padding = [head for head in range(batch.q_heads) if head not in served]
    assert padding
    assert not found[:, padding].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", [1, 31, 32, 33, 127, 128, 129, 300])
def test_lengths_around_pages_and_chunks(dtype: torch.dtype, length: int) -> None:
    batch = Batch([length], MHA, 32, dtype).store_all()
    assert_exact(batch.whole(0), batch, 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_results_of_more_than_a_mebibyte(dtype: torch.dtype) -> None:
    batch = Batch([530], [(0, 4), (4, 5)], 128, dtype).store_all()
    found = batch.whole(0)
    assert found.nbytes > 1 << 20  # large enough for non-temporal stores
    assert_exact(found, batch, 0)
    assert torch.equal(found[:90], batch.attend([(0, 0, 90)])[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scores_far_apart_and_a_late_maximum(dtype: torch.dtype) -> None:
    batch = Batch([200], MHA, 16, dtype)
    batch.scale = 3.0
    batch.k[0][150] *= 3  # a late jump of the running maximum
    batch.store_all()
    assert_exact(batch.whole(0), batch, 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_long_sequence(dtype: torch.dtype) -> None:
    batch = Batch([1300], [(0, 4)], 24, dtype).store_all()
    assert_exact(batch.whole(0), batch, 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [-0.2, 0.0])
def test_a_scale_that_is_not_positive(dtype: torch.dtype, scale: float) -> None:
    batch = Batch([70], GQA, 40, dtype).store_all()
    batch.scale = scale
    assert_exact(batch.whole(0), batch, 0)


def test_attention_equals_that_of_torch() -> None:
    batch = Batch([70], GQA, 64, torch.float32).store_all()
    q, k, v = batch.q[0][:, :6].transpose(0, 1), batch.k[0].transpose(0, 1), batch.v[0].transpose(0, 1)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q[None], k[None], v[None], is_causal=True, scale=batch.scale, enable_gqa=True
    )[0].transpose(0, 1)
    torch.testing.assert_close(batch.whole(0)[:, :6], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("heads", [1, 2, 3, 8])
@pytest.mark.parametrize("scale", [0.1, -0.1])
def test_many_rows_of_strided_arguments(heads: int, scale: float) -> None:
    batch = Batch([200], [(0, heads), (heads, heads)], 64, torch.bfloat16).store_all()
    batch.scale = scale
    found = batch.whole(0)
    assert_exact(found, batch, 0)
    for row in (0, 15, 16, 63, 64, 127, 128, 199):
        assert torch.equal(batch.attend([(0, row, row + 1)])[0], found[row : row + 1]), f"row {row}"
    # Queries, keys and values are slices of wider rows.
    wide = torch.full((200, batch.q_heads + 3, 64), math.nan, dtype=torch.bfloat16)
    wide[:, 2:-1] = batch.q[0]
    lengths, starts = torch.tensor([200], dtype=torch.int32), torch.tensor([0, 200], dtype=torch.int32)
    again = attention(wide[:, 2:-1], batch.cache, batch.tables, lengths, starts, batch.kv_map, scale)
    assert torch.equal(again, found)


@pytest.mark.parametrize("length", [48, 112])
def test_rows_of_two_heads_that_share_a_tile_group(length: int) -> None:
    batch = Batch([length], [(0, 2), (2, 2)], 64, torch.bfloat16).store_all()
    assert_exact(batch.whole(0), batch, 0)


def attend_all(batch: Batch, q: list[Tensor], lse: Tensor | None = None) -> list[Tensor]:
    """Compute rows q[i] over all tokens of sequence i, in one call."""
    starts = torch.tensor([0, *accumulate(len(rows) for rows in q)], dtype=torch.int32)
    lengths = torch.tensor(batch.lengths, dtype=torch.int32)
    out = attention(
        torch.cat(q), batch.cache, batch.tables, lengths, starts, batch.kv_map, batch.scale, causal=False, lse=lse
    )
    return list(torch.split(out, [len(rows) for rows in q]))


def full_attention(batch: Batch, i: int, q: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows q over all tokens of sequence i in float64, and the log-sum-exp of their scores."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    lse = torch.full(q.shape[:2], -math.inf, dtype=torch.float64)
    if batch.lengths[i]:
        for kv_head, (first, count) in enumerate(batch.kv_map.tolist()):
            for head in range(first, first + count):
                scores = q[:, head].double() @ batch.k[i][:, kv_head].double().T * batch.scale
                lse[:, head] = scores.logsumexp(-1)
                out[:, head] = scores.softmax(-1) @ batch.v[i][:, kv_head].double()
    return out, lse


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_without_a_causal_mask_every_row_attends_to_all_tokens(dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(5)
    lengths = [0, 1, 31, 32, 33, 300, *torch.randint(0, 90, (122,), generator=random).tolist()]
    batch = Batch(lengths, UNEVEN, 24, dtype).store_all()
    counts = [3, 40, 1, 2, 35, 50, *torch.randint(0, 4, (122,), generator=random).tolist()]
    q = [torch.randn(n, batch.q_heads, 24, generator=random).to(dtype) for n in counts]
    lse = torch.full((sum(counts), batch.q_heads), math.nan)
    found = attend_all(batch, q, lse=lse)
    # bf16: rounding of probabilities and of the result; fp32: a few roundings.
    tolerance = 2e-2 if dtype == torch.bfloat16 else 2e-6
    for i, (rows, of_rows) in enumerate(zip(found, torch.split(lse, counts), strict=True)):
        exact, exact_lse = full_attention(batch, i, q[i])
        torch.testing.assert_close(rows.double(), exact, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(of_rows.double(), exact_lse, rtol=1e-5, atol=1e-5)
        assert torch.equal(rows == 0, exact == 0)  # exact zeros for rows over no tokens and for padding heads
    alone = Batch(lengths[5:6], UNEVEN, 24, dtype)
    alone.k[0], alone.v[0] = batch.k[5], batch.v[5]
    alone.store_all()
    assert torch.equal(attend_all(alone, q[5:6])[0], found[5])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parts_merge_by_their_log_sum_exp(dtype: torch.dtype) -> None:
    whole, left, right = (Batch([n], GQA, 64, dtype) for n in (400, 150, 250))
    for part, start, stop in ((left, 0, 150), (right, 150, 400)):
        part.k[0], part.v[0] = whole.k[0][start:stop], whole.v[0][start:stop]
    q, lse = whole.q[0][:20], torch.zeros(2, 20, whole.q_heads)
    parts = [
        attend_all(part.store_all(), [q], lse=of_part)[0] for part, of_part in zip((left, right), lse, strict=True)
    ]
    weights = lse[:, :, :6].softmax(0)[..., None]
    merged = sum(weight * part[:, :6].float() for weight, part in zip(weights, parts, strict=True))
    [expected] = attend_all(whole.store_all(), [q])
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(merged, expected[:, :6].float(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_log_sum_exp_of_causal_rows(dtype: torch.dtype) -> None:
    batch = Batch([90], [(0, 1)], 32, dtype).store_all()
    lse = torch.zeros(90, 2)
    starts, lengths = ints(0, 90), ints(90)
    attention(batch.q[0], batch.cache, batch.tables, lengths, starts, batch.kv_map, batch.scale, lse=lse)
    scores = batch.q[0][:, 0].double() @ batch.k[0][:, 0].double().T * batch.scale
    exact = scores.masked_fill(torch.ones(90, 90).triu(1) > 0, -math.inf).logsumexp(-1)
    torch.testing.assert_close(lse[:, 0].double(), exact, rtol=1e-5, atol=1e-5)
    assert bool((lse[:, 1] == -math.inf).all())  # a padding head


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_views_of_a_fused_projection(dtype: torch.dtype) -> None:
    batch = Batch([50], GQA, 16, dtype).store_all()
    expected = batch.whole(0)
    fused = torch.cat([batch.q[0], batch.k[0], batch.v[0]], dim=1).flatten(1)
    heads = [batch.q_heads, 2, 2]
    parts = torch.split(fused, [h * 16 for h in heads], dim=1)
    batch.q[0], batch.k[0], batch.v[0] = (part.view(50, -1, 16) for part in parts)
    batch.cache.k.fill_(math.nan)
    batch.cache.v.fill_(math.nan)
    batch.store_all()
    starts, lengths = torch.tensor([0, 50], dtype=torch.int32), torch.tensor([50], dtype=torch.int32)
    found = attention(batch.q[0], batch.cache, batch.tables, lengths, starts, batch.kv_map, batch.scale)
    assert torch.equal(found, expected)


def test_empty_batches() -> None:
    batch = Batch([40], GQA, 16, torch.float32).store_all()
    assert batch.attend([(0, 40, 40)])[0].shape == (0, 7, 16)
    assert batch.attend([(0, 0, 0)])[0].shape == (0, 7, 16)
    batch.store(0, 5, 5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("d", [8, 24, 64])
def test_pages_written_on_one_rung_serve_every_other(dtype: torch.dtype, d: int, rung: str) -> None:
    batch = Batch([70, 3], GQA, d, dtype).store_all()
    core.force_isa("reference")
    other = Batch([70, 3], GQA, d, dtype).store_all()
    assert torch.equal(batch.cache.k.nan_to_num(7.0), other.cache.k.nan_to_num(7.0))
    # Every rung writes padding lanes with zeros.
    assert torch.equal(batch.cache.v.nan_to_num(7.0), other.cache.v.nan_to_num(7.0))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("d", [8, 64, 128])
def test_nbytes_of_pages(dtype: torch.dtype, d: int) -> None:
    layer = KVPages.empty(5, 3, d, dtype)
    size = KVPages.nbytes(5, 3, d, dtype)
    assert layer.k.nbytes + layer.v.nbytes == size
    payload = 2 * 5 * 3 * PAGE_TOKENS * d * dtype.itemsize
    assert size == (payload if d % 16 == 0 else payload * 3 // 2)  # 8 dims of V are padded to 16
    assert not layer.k.any()
    assert not layer.v.any()


def call(**changes: Tensor) -> Tensor:
    """A valid call of two sequences (3 new of 40 tokens, 1 of 1), with one argument replaced."""
    arguments: dict[str, Any] = {
        "q": torch.zeros(4, 6, 16),
        "page_tables": torch.tensor([[0, 1], [2, 99]], dtype=torch.int32),
        "seq_lens": torch.tensor([40, 1], dtype=torch.int32),
        "query_starts": torch.tensor([0, 3, 4], dtype=torch.int32),
        "kv_map": torch.tensor(GQA, dtype=torch.int32),
    }
    arguments.update(changes)
    return attention(cache=KVPages.empty(3, 2, 16, torch.float32), scale=1.0, **arguments)


def ints(*values: int | list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"q": torch.zeros(4, 6, 24)}, "q: expected shape [any, any, 16], found [4, 6, 24]"),
        ({"q": torch.zeros(4, 6, 16).bfloat16()}, "q: expected dtype float32, found bfloat16"),
        ({"seq_lens": torch.tensor([40, 1])}, "seq_lens: expected dtype int32, found int64"),
        ({"query_starts": ints(0, 4)}, "query_starts: expected shape [3], found [2]"),
        ({"query_starts": ints(0, 3, 5)}, "query_starts: expected 0 to 4, found 0 to 5"),
        ({"query_starts": ints(1, 3, 4)}, "query_starts: expected 0 to 4, found 1 to 4"),
        ({"query_starts": ints(0, 2, 4)}, "query_starts: expected 0 to 1 queries of sequence 1, found 2"),
        ({"seq_lens": ints(40, -1)}, "seq_lens: expected at least 0 tokens of sequence 1, found -1"),
        ({"lse": torch.zeros(4, 5)}, "lse: expected shape [4, 6], found [4, 5]"),
        ({"query_starts": ints(0, 5, 4)}, "query_starts: expected 0 to 1 queries of sequence 1, found -1"),
        ({"page_tables": ints([0, 1])}, "seq_lens: expected shape [1], found [2]"),
        ({"page_tables": ints([0], [2])}, "page_tables: expected 2 pages for sequence 0, found 1"),
        ({"page_tables": ints([0, 3], [2, 99])}, "page_tables: expected pages in [0, 3) for sequence 0, found 3"),
        ({"page_tables": ints([0, -1], [2, 99])}, "page_tables: expected pages in [0, 3) for sequence 0, found -1"),
        ({"kv_map": ints([0, 3])}, "kv_map: expected shape [2, 2], found [1, 2]"),
        ({"kv_map": ints([0, 3], [4, 3])}, "kv_map: expected query heads in [3, 6) for KV head 1, found 3 from 4"),
        ({"kv_map": ints([0, 3], [2, 3])}, "kv_map: expected query heads in [3, 6) for KV head 1, found 3 from 2"),
        ({"kv_map": ints([-1, 3], [3, 3])}, "kv_map: expected query heads in [0, 6) for KV head 0, found 3 from -1"),
    ],
)
def test_a_wrong_argument_is_named(changes: dict[str, Tensor], sentence: str) -> None:
    assert call().shape == (4, 6, 16)
    with pytest.raises(KernelError) as error:
        call(**changes)
    assert str(error.value) == f"attention: {sentence}"


@pytest.mark.parametrize("slot", [-1, 3 * PAGE_TOKENS, 2**40])
def test_a_wrong_slot_is_named_and_nothing_is_written(slot: int) -> None:
    layer = KVPages.empty(3, 2, 16, torch.float32)
    k = torch.ones(40, 2, 16)
    slots = torch.arange(40)
    slots[-1] = slot
    with pytest.raises(KernelError, match=rf"^store_kv: slots: expected values in \[0, 96\), found {slot}$"):
        store_kv(k, k, layer, slots)
    assert not layer.k.any()
    assert not layer.v.any()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((1, 1, 12, torch.float32), "KVPages: head_dim: expected a multiple of 8 up to 512, found 12"),
        ((1, 1, 520, torch.float32), "KVPages: head_dim: expected a multiple of 8 up to 512, found 520"),
        ((1, 1, 16, torch.float16), "KVPages: dtype: expected float32, bfloat16 or int8, found float16"),
        ((0, 1, 16, torch.float32), "KVPages: expected sizes >= 1, found num_pages 0 and kv_heads 1"),
    ],
)
def test_wrong_sizes_of_pages_are_refused(arguments: tuple[int, int, int, torch.dtype], sentence: str) -> None:
    for make in (KVPages.empty, KVPages.nbytes):
        with pytest.raises(KernelError) as error:
            make(*arguments)
        assert str(error.value) == sentence
