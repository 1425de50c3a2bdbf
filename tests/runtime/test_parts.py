"""Small parts of the engine, by hand or against transformers: caches, pages, steps, batches, families."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tilerank.kernels.errors import KernelError
from tilerank.kernels.kv_pages import PAGE_TOKENS, KVPages
from tilerank.kernels.latent_pages import LatentPages
from tilerank.kernels.state_slots import StateSlots
from tilerank.loader.card import read_card
from tilerank.loader.errors import ConfigError
from tilerank.loader.pooling import Pooling
from tilerank.parallel.sharding import Sharding
from tilerank.runtime.media.registry import check_pairs
from tilerank.runtime.protocol import rank_messages
from tilerank.runtime.protocol.prompt import Medium, PlaceholderRange
from tilerank.runtime.protocol.rank_messages import (
    Chunk,
    Count,
    Encode,
    EncodePiece,
    Frames,
    Message,
    Step,
    Stop,
    StopEncode,
)
from tilerank.runtime.rank.registry import build_model, read_supported_card
from tilerank.runtime.step.batch import BatchContent, BatchFiller, BatchLimits, RankSequence
from tilerank.runtime.step.cache import (
    CacheSpec,
    EncoderKV,
    PagedKV,
    PagedLatent,
    RecurrentState,
    allocate,
    num_pages,
)
from tilerank.runtime.step.draft_rows import separate_drafts

DEMO = Path(__file__).parents[2] / "assets" / "demo-lm"
BF16 = torch.bfloat16

# Llama 3.1 8B and Qwen3 8B, from their config.json.


@pytest.mark.parametrize(
    ("spec", "count", "nbytes"),
    [
        # 100 tokens are 4 pages of 32; keys and values; 2 heads of 64; 2 bytes
        (PagedKV(2, 64, BF16), 100, 4 * 32 * 2 * 2 * 64 * 2),
        (PagedKV(1, 128, torch.float32), 32, 32 * 2 * 128 * 4),
        # DeepSeek-V3: 512 + 64 numbers a token
        (PagedLatent(512, 64, BF16), 33, 2 * 32 * 576 * 2),
        (EncoderKV(8, 128, BF16), 0, 0),
        (EncoderKV(8, 128, BF16), 6404, 201 * 32 * 2 * 8 * 128 * 2),
        # Qwen3.5: 3 past inputs of 8192 channels in bf16, 32 matrices of 128 x 128 in fp32, for each of 5 requests
        (RecurrentState(8192, 4, 32, 128, 128, BF16), 5, 5 * (3 * 8192 * 2 + 32 * 128 * 128 * 4)),
        # and for each of 7 drafts the input, q, k and v in bf16, and two gates of each matrix in fp32
        (RecurrentState(8192, 4, 32, 128, 128, BF16, 7), 1, (3 + 2 * 7) * 8192 * 2 + 32 * (128 * 128 + 7 * 2) * 4),
    ],
    ids=repr,
)
def test_bytes_of_every_kind_of_cache(spec: CacheSpec, count: int, nbytes: int) -> None:
    assert spec.nbytes(count) == nbytes


def test_allocates_the_bytes_it_declares() -> None:
    """Layers that grow with the tokens get pages, layers with states get slots."""
    kv, latent, state = PagedKV(2, 64, BF16), PagedLatent(64, 32, BF16), RecurrentState(48, 4, 3, 8, 16, BF16, 2)
    pages, rows, slots = allocate([kv, latent, state], 100, 5)
    assert isinstance(pages, KVPages) and isinstance(rows, LatentPages) and isinstance(slots, StateSlots)
    assert pages.num_pages == rows.num_pages == 4
    assert pages.k.nbytes + pages.v.nbytes == kv.nbytes(100) and rows.data.nbytes == latent.nbytes(100)
    assert slots.conv.shape == (5, 3 + 2, 48) and slots.conv.dtype is BF16
    assert slots.state.shape == (5, 3, 8, 16) and slots.state.dtype is torch.float32
    assert slots.drafts.shape == (5, 2, 48) and slots.drafts.dtype is BF16
    assert slots.draft_gates.shape == (5, 2, 2 * 3) and slots.draft_gates.dtype is torch.float32
    held = (slots.conv, slots.state, slots.drafts, slots.draft_gates)
    assert sum(tensor.nbytes for tensor in held) == state.nbytes(5)
    assert not any(tensor.any() for tensor in held)


def test_copies_one_slot_of_states_to_another() -> None:
    slots = StateSlots.empty(4, 3, 5, 2, 4, 6, BF16, 2)
    slots.conv.copy_(torch.arange(4.0).view(4, 1, 1).expand_as(slots.conv))
    slots.state.copy_(torch.arange(4.0).view(4, 1, 1, 1).expand_as(slots.state))
    slots.copy(3, 1)
    assert slots.conv[:, 1, 4].tolist() == slots.state[:, 1, 3, 5].tolist() == [0, 3, 2, 3]


def test_a_rank_without_heads_has_empty_states() -> None:
    (slots,) = allocate([RecurrentState(0, 4, 0, 8, 16, BF16)], 32, 5)
    assert isinstance(slots, StateSlots) and slots.conv.shape == (5, 3, 0) and slots.state.shape == (5, 0, 8, 16)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"slots": 0}, "StateSlots: expected slots >= 1, found 0"),
        ({"dtype": torch.int8}, "StateSlots: dtype: expected float32 or bfloat16, found int8"),
    ],
)
def test_refuses_states_that_no_kernel_takes(change: dict[str, Any], says: str) -> None:
    sizes: dict[str, Any] = {"slots": 2, "width": 4, "channels": 8, "value_heads": 1, "drafts": 7}
    sizes |= {"key_dim": 8, "value_dim": 8}
    with pytest.raises(KernelError, match=f"^{says}$"):
        StateSlots.empty(**{**sizes, "dtype": BF16, **change})


def test_sources_have_pages_of_their_own() -> None:
    kv, source = PagedKV(1, 8, BF16), EncoderKV(2, 8, BF16)
    pages, encoded = allocate([kv, source], 32, source_tokens=100)
    assert isinstance(pages, KVPages) and isinstance(encoded, KVPages)
    assert (pages.num_pages, encoded.num_pages) == (1, 4)
    assert encoded.k.nbytes + encoded.v.nbytes == source.nbytes(100)


def test_pages_of_tokens() -> None:
    assert [num_pages(n) for n in (0, 1, 31, 32, 33, 64, 65)] == [0, 1, 1, 1, 2, 2, 3]


MESSAGES = st.one_of(
    st.just(Stop()),
    st.just(Count()),
    st.builds(
        Step,
        st.lists(
            st.builds(
                Chunk,
                st.integers(0, 1 << 40),
                st.integers(0, 1 << 30),
                st.lists(st.integers(0, 1 << 24)),
                st.lists(st.integers(0, 1 << 24)),
                st.integers(0, 4096),
                st.just([]) | st.lists(st.lists(st.integers(0, 1 << 30)), min_size=3, max_size=3),
                st.integers(-(1 << 30), 1 << 30),
                st.lists(st.builds(PlaceholderRange, *[st.integers(0, 1 << 30)] * 4)),
            )
        ),
        st.lists(st.integers(0, 1 << 40)),
        st.lists(st.integers(0, 1 << 40)),
        st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 1 << 20))),
        st.lists(st.integers(0, 1 << 20)),
    ),
    st.builds(
        Encode,
        st.integers(0, 1 << 40),
        st.builds(
            Medium, st.sampled_from(["image", "video"]), st.binary(), *[st.tuples(*[st.integers(0, 99)] * 3)] * 2
        ),
        st.floats(1, 1e18),
        st.lists(st.integers(0, 1 << 40)),
    ),
    st.builds(Frames, st.binary()),
    st.just(EncodePiece()),
    st.just(StopEncode()),
)


@given(MESSAGES)
def test_messages_arrive_as_they_were_sent(message: Message) -> None:
    assert rank_messages.decode(rank_messages.encode(message)) == message


def test_a_decode_step_is_a_small_message() -> None:
    chunks = [Chunk(i, 5000, [150000], [], 1) for i in range(64)]
    assert len(rank_messages.encode(Step(chunks, []))) < 64 * 17 + 32


@pytest.mark.parametrize(
    "data", [b"", b"\xc1", msgspec.msgpack.encode(["Step", [[1, 2]], []]), b"\x93\xa5Other\x90\x90"]
)
def test_strange_messages_are_refused(data: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        rank_messages.decode(data)


def filler(**content: Any) -> BatchFiller:
    return BatchFiller(BatchContent(**content), BatchLimits(sequences=5, pages=4, spare_page=9))


def test_a_batch_of_a_decoding_sequence_and_a_chunk_of_a_prompt() -> None:
    """Sequence 7 has 33 tokens cached and decodes; sequence 3 gets prompt tokens 30 to 34, logits of the last."""
    chunks = [Chunk(7, 33, [9], [], 1), Chunk(3, 30, [1, 2, 3, 4, 5], [6, 0], 1)]
    batch = filler().fresh(Step(chunks, []), {7: RankSequence([4, 2, 5]), 3: RankSequence([6, 0])}, {})
    assert batch.token_ids.tolist() == [9, 1, 2, 3, 4, 5]
    assert batch.positions.tolist() == [[33, 30, 31, 32, 33, 34]]
    page = PAGE_TOKENS
    assert batch.slots.tolist() == [2 * page + 1, 6 * page + 30, 6 * page + 31, 0, 1, 2]
    assert batch.page_tables.tolist() == [[4, 2, 5], [6, 0, 0]]
    assert batch.seq_lens.tolist() == [34, 35]
    assert batch.query_starts.tolist() == [0, 1, 6]
    assert batch.logit_rows is not None
    assert (batch.logit_rows.rows.tolist(), batch.logit_rows.starts.tolist()) == ([0, 5], [0, 1, 2])


def test_a_batch_with_logits_of_no_row_or_of_all() -> None:
    held = {0: RankSequence([0]), 1: RankSequence([1])}
    some = filler().fresh(Step([Chunk(0, 0, [1, 2], [0], 0), Chunk(1, 0, [3, 4, 5], [1], 3)], []), held, {}).logit_rows
    assert some is not None and (some.rows.tolist(), some.starts.tolist()) == ([2, 3, 4], [0, 0, 3])
    none = filler().fresh(Step([Chunk(0, 0, [1, 2], [0], 0)], []), held, {}).logit_rows
    assert none is not None and none.rows.shape == (0,) and none.rows.dtype is torch.int64
    assert none.starts.tolist() == [0, 0]
    assert filler().fresh(Step([Chunk(0, 0, [1, 2], [0], 2)], []), held, {}).logit_rows is None


def test_steps_of_single_tokens_with_logits_are_decode_steps() -> None:
    def step(count: int, tokens: int = 1, logits: int = 1) -> Step:
        return Step([Chunk(i, 0, [1] * tokens, [], logits) for i in range(count)], [])

    assert filler().is_decode(step(1)) and filler().is_decode(step(5))
    assert not filler().is_decode(step(6)) and not filler().is_decode(step(1, tokens=2))
    assert not filler().is_decode(step(1, logits=0))


@pytest.mark.parametrize("copy_padding", [False, True])
def test_a_padded_batch_is_the_fresh_one_and_rows_that_write_to_the_spare_page(copy_padding: bool) -> None:
    """Three decoding sequences padded to four rows; the shortest has 5 tokens before this one."""
    fills, page = filler(copy_padding=copy_padding), PAGE_TOKENS
    step = Step([Chunk(7, 33, [9], [], 1), Chunk(3, 5, [8], [], 1), Chunk(4, 70, [7], [], 1)], [])
    held = {7: RankSequence([4, 2]), 3: RankSequence([6]), 4: RankSequence([1, 3, 5])}
    fresh, padded = fills.fresh(step, held, {}), fills.padded(step, held)
    assert padded.token_ids[:3].tolist() == fresh.token_ids.tolist()
    assert padded.positions[:, :3].tolist() == fresh.positions.tolist()
    assert padded.slots[:3].tolist() == fresh.slots.tolist() == [2 * page + 1, 6 * page + 5, 5 * page + 6]
    assert padded.seq_lens[:3].tolist() == fresh.seq_lens.tolist()
    assert padded.query_starts.tolist() == [0, 1, 2, 3, 4] and padded.logit_rows is None
    for row, chunk in enumerate(step.chunks):
        pages = held[chunk.sequence].pages
        assert padded.page_tables[row, : len(pages)].tolist() == pages
    assert padded.slots[3] == 9 * page + 3
    copied = (padded.token_ids[3], padded.positions[0, 3], padded.seq_lens[3], padded.page_tables[3, 0])
    assert tuple(map(int, copied)) == ((8, 5, 6, 6) if copy_padding else (0, 0, 1, 9))
    # The next step of this size fills the same tensors.
    held[7].pages.append(0)
    later = Step([Chunk(7, 64, [1], [0], 1), Chunk(4, 71, [2], [], 1), Chunk(3, 6, [3], [], 1)], [3])
    assert fills.padded(later, held) is padded
    assert padded.token_ids[:3].tolist() == [1, 2, 3] and padded.page_tables[0, :3].tolist() == [4, 2, 0]
    assert padded.page_tables[1, :3].tolist() == [1, 3, 5]


def test_a_batch_with_pieces_of_two_media() -> None:
    """Sequence 7 decodes 3 positions behind its index. Sequence 3 goes on inside one medium, up to the third token of
    another one, which has fewer levels (sound)."""
    one, other = (torch.arange(0, 12 * n, dtype=torch.float32).view(n, 4, 3) for n in (3, 1))
    positions = [[5, 5, 8, 9, 9], [6, 6, 8, 9, 9], [6, 7, 8, 9, 10]]
    ranges = [PlaceholderRange(0, 2, 11, 2), PlaceholderRange(3, 2, 12, 0)]
    chunks = [Chunk(7, 33, [9], [], 1, shift=-3), Chunk(3, 30, [1, 1, 2, 1, 1], [6, 0], 0, positions, -20, ranges)]
    held = {7: RankSequence([4, 2]), 3: RankSequence([6, 0])}
    fills = filler(position_axes=3)
    batch = fills.fresh(Step(chunks, []), held, {11: one, 12: other})
    assert batch.positions.tolist() == [[30, *axis] for axis in positions]
    assert batch.slots.tolist() == [2 * PAGE_TOKENS + 1, 6 * PAGE_TOKENS + 30, 6 * PAGE_TOKENS + 31, 0, 1, 2]
    assert batch.seq_lens.tolist() == [34, 35]
    assert batch.inserts is not None and batch.inserts.rows.tolist() == [1, 2, 4, 5]
    assert torch.equal(batch.inserts.values, torch.cat([one[0, 2:4], other[0, 0:2]]))
    deep = [(rows.tolist(), values.tolist()) for rows, values in batch.inserts.deep]
    assert deep == [([1, 2], one[level, 2:4].tolist()) for level in (1, 2)]
    assert fills.fresh(Step(chunks[:1], []), held, {}).inserts is None


def test_steps_with_placeholders_or_positions_are_not_decode_steps() -> None:
    def step(positions: list[list[int]], ranges: list[PlaceholderRange]) -> Step:
        return Step([Chunk(0, 4, [1], [], 1, positions, -2, ranges)], [])

    fills = filler(position_axes=3)
    assert fills.is_decode(step([], []))
    assert not fills.is_decode(step([[2], [2], [2]], []))
    assert not fills.is_decode(step([], [PlaceholderRange(0, 1, 0, 0)]))


@pytest.mark.parametrize("copy_padding", [False, True])
def test_a_padded_batch_has_positions_on_every_axis(copy_padding: bool) -> None:
    fills = filler(position_axes=3, copy_padding=copy_padding)
    chunks = [Chunk(7, 33, [9], [], 1, shift=-3), Chunk(3, 5, [8], [], 1, shift=-2), Chunk(4, 70, [7], [], 1)]
    padded = fills.padded(Step(chunks, []), {7: RankSequence([4, 2]), 3: RankSequence([6]), 4: RankSequence([1, 3, 5])})
    assert padded.positions.tolist() == [[30, 3, 70, 3 if copy_padding else 0]] * 3
    assert padded.seq_lens.tolist() == [34, 6, 71, 6 if copy_padding else 1]


@pytest.mark.parametrize("copy_padding", [False, True])
def test_a_batch_has_the_slots_of_states(copy_padding: bool) -> None:
    """A padding row repeats the states of the shortest sequence, which is in row 1, and has none of its own."""
    fills = filler(has_states=True, copy_padding=copy_padding)
    chunks = [Chunk(7, 33, [9], [], 1), Chunk(3, 5, [8], [], 1), Chunk(4, 70, [7], [], 1)]
    step, held = (
        Step(chunks, [], state_slots=[5, 0, 2]),
        {7: RankSequence([4, 2]), 3: RankSequence([6]), 4: RankSequence([1, 3, 5])},
    )
    fresh, padded = fills.fresh(step, held, {}).state_slots, fills.padded(step, held).state_slots
    assert fresh is not None and fresh.tolist() == [5, 0, 2] and fresh.dtype is torch.int32
    assert padded is not None and padded.tolist() == [5, 0, 2, -2] and padded.dtype is torch.int32
    later = fills.padded(Step(chunks[::-1], [], state_slots=[2, 0, 5]), held).state_slots
    assert later is padded and padded.tolist() == [2, 0, 5, -2]
    assert filler().padded(step, held).state_slots is None and filler().fresh(step, held, {}).state_slots is None


def test_a_batch_has_drafts_that_states_take_in() -> None:
    """Sequence 7 has two drafts, after a step of which two were right; sequence 3 has no drafts."""
    fills = filler(has_states=True)
    chunks = [Chunk(7, 33, [9, 8, 7], [], 3, drafts=2), Chunk(3, 50, [6], [], 1)]
    step = separate_drafts(Step(chunks, [], state_slots=[5, 0]))
    held = {7: RankSequence([4, 2], state_tokens=31), 3: RankSequence([6, 8], state_tokens=50)}
    for batch in (fills.fresh(step, held, {}), fills.padded(step, held)):
        assert batch.state_slots is not None and batch.kept_drafts is not None
        assert batch.state_slots.tolist() == [5, 5, 5, 0]
        assert (batch.kept_drafts.tolist()[0], batch.kept_drafts.tolist()[3]) == (2, 0)
        assert batch.seq_lens.tolist() == [34, 35, 36, 51]
        assert [divmod(slot, PAGE_TOKENS) for slot in batch.slots.tolist()] == [(2, 1), (2, 2), (2, 3), (8, 18)]


def test_an_unknown_family_is_refused_with_those_that_run(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    says = "model_type: expected one of deepseek_v3, .*llama, .*qwen3_vl_moe, smollm3, found 'gpt2'"
    with pytest.raises(ConfigError, match=f"{re.escape(str(tmp_path / 'config.json'))}: {says}"):
        read_supported_card(tmp_path)


def test_a_reranker_needs_a_family_with_a_form_of_pairs() -> None:
    card = replace(read_card(DEMO), pooling=Pooling("rerank"))
    check_pairs(replace(card, model_type="qwen3"))
    with pytest.raises(ConfigError, match="model_type: expected one of qwen3 "):
        check_pairs(replace(card, model_type="llama"))


@pytest.mark.parametrize(
    ("model_type", "needs"),
    [
        ("qwen4_exp", "the hyper-connections, sparse attention and embeddings of n-grams of Qwen3.8-Flash-Next"),
        ("deepseek_v32", "the sparse attention of DeepSeek-V3.2"),
        ("glm_moe_dsa", "the sparse attention of GLM-5"),
    ],
)
def test_a_relative_that_does_not_run_is_refused_with_what_is_missing(
    tmp_path: Path, model_type: str, needs: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(ConfigError) as refused:
        read_supported_card(tmp_path)
    ending = f" ({model_type} needs {needs}, not supported yet), found '{model_type}'"
    assert str(refused.value).endswith(ending)


def test_a_model_declares_before_it_allocates() -> None:
    card = read_card(DEMO)
    for strategy in ("pad", "split"):
        models = [build_model(card, Sharding(rank, 6, BF16, None, strategy)) for rank in range(6)]
        assert all(not hasattr(layer, "packed") for model in models for layer in model.walk())
        specs = [spec for model in models for spec in model.cache_specs()[:1]]
        heads = [spec.kv_heads for spec in specs if isinstance(spec, PagedKV)]
        # 8 query and 2 KV heads: padded to one KV head a rank, or each KV head held by the three ranks that use it.
        assert heads == [1] * 6


def test_tied_models_leave_a_stored_head_out() -> None:
    model = build_model(read_card(DEMO), Sharding(0, 1, BF16, None))  # tie_word_embeddings
    assert model.ignore("lm_head.weight")
    assert model.ignore("model.layers.0.self_attn.rotary_emb.inv_freq")  # in very old checkpoints
    assert not model.ignore("model.layers.0.self_attn.q_proj.weight")
