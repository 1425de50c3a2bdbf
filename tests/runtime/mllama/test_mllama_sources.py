"""The engine with sources of cross-attention: what rows see, shared and dropped sources, refusals."""

import functools
import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from batching import (
    answers,
    evict,
    forget,
    memory_files,
    one_by_one,
    pinned,
    prefilled,
    score_in_chunks,
    single_engine,
    spy,
)
from media_files import DEMO_VL
from media_prompts import ask, text
from rungs import COMPILED, needs_compiled
from safetensors.torch import load_file, save_file
from tiny import make_checkpoint

from tilerank.kernels.kv_pages import PAGE_TOKENS
from tilerank.parallel.sharding import Sharding
from tilerank.runtime.lead import media_encoding
from tilerank.runtime.lead.engine import Engine, Request
from tilerank.runtime.lead.lru_pool import NumberedEntry, NumberedPool
from tilerank.runtime.lead.sources import SourcePool
from tilerank.runtime.models.cross_attention import CrossAttention
from tilerank.runtime.protocol.areas import Area
from tilerank.runtime.protocol.errors import RequestError
from tilerank.runtime.protocol.prompt import Medium, PlaceholderRange, Prompt, Segment, VisibleRange
from tilerank.runtime.protocol.rank_messages import Encode, Message, StoreSource
from tilerank.runtime.rank.registry import build_model, read_supported_card
from tilerank.runtime.rank.transfer_memory import Transfer

VOCAB, SIDE, TOKENS = 777, 4, 68  # of make_tiny.py: patches of a tile's side, tokens of a picture


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("mllama", tmp_path_factory.mktemp("sources"), vocab=VOCAB)


def start(
    checkpoint: Path, *, eager: bool = False, source_bytes: int = 1 << 24, transfer: Transfer | None = None
) -> Engine:
    return single_engine(
        checkpoint,
        dtype=torch.bfloat16,
        max_total_tokens=4096,
        eager=eager,
        source_bytes=source_bytes,
        transfer=transfer,
    )


@pytest.fixture(scope="module")
def shared(checkpoint: Path) -> Engine:
    return start(checkpoint)


def picture(seed: int, rows: int = 1, columns: int = 1) -> Medium:
    """A picture of rows x columns tiles."""
    height, width = 20 * rows, 30 * columns
    pixels = random.Random(seed).randbytes(height * width * 3)
    return Medium("image", pixels, (1, height, width), (1, SIDE * rows, SIDE * columns))


def prompt(*parts: list[int] | Medium) -> Prompt:
    """Text and pictures in order. Tokens see the tiles of the last picture; those before the first see everything."""
    ids: list[int] = []
    media: list[Medium] = []
    visible_ranges: list[VisibleRange] = []
    total = TOKENS * sum(isinstance(part, Medium) for part in parts)
    for part in parts:
        if isinstance(part, list):
            if total and not ids:
                visible_ranges.append(VisibleRange(0, 0, total, False))
            ids += part
            continue
        tiles = part.grid[1] * part.grid[2] // SIDE**2
        visible_ranges.append(VisibleRange(len(ids), TOKENS * len(media), 17 * tiles, True))
        media.append(part)
        ids.append(VOCAB)
    return Prompt(ids, media, source=[Segment(i, 0, TOKENS) for i in range(len(media))], visible_ranges=visible_ranges)


def mixed(count: int) -> list[Request]:
    """Prompts with none to three pictures of one to four tiles, and text of different lengths before and behind."""
    draw = random.Random(5)
    requests = []
    for i in range(count):
        parts: list[list[int] | Medium] = [text(i, draw.randrange(1, 50))] if i % 3 else []
        for _ in range(draw.randrange(4)):
            parts.append(picture(draw.randrange(12), *draw.choice([(1, 1), (2, 2), (1, 3), (2, 1)])))
            parts.append(text(100 + i, draw.randrange(1, 12)))
        requests.append(ask(prompt(*(parts or [text(i, 4)])), draw.randrange(1, 14)))
    return requests


def source_pages(engine: Engine) -> int:
    """Return the pages of all sources that rank 0 counts."""
    return sum(kind.pool.used for kind in engine.scheduler.kinds if isinstance(kind, SourcePool))


def stores(sent: list[Message]) -> int:
    return sum(isinstance(message, StoreSource) for message in sent)


@needs_compiled
def test_a_prompt_cut_anywhere_gives_the_same_bits(engine: Engine) -> None:
    whole = prompt(text(1, 5), picture(1, 1, 3), text(2, 4), picture(2), picture(3, 2, 2), text(3, 6))
    expected = engine.score(whole)
    for cut in range(1, len(whole.token_ids)):
        assert torch.equal(score_in_chunks(engine, whole, [cut]), expected), cut
    assert torch.equal(score_in_chunks(engine, whole, list(range(1, len(whole.token_ids)))), expected)


def test_tokens_see_only_what_is_shown_to_them(engine: Engine) -> None:
    """Otherwise the tests here could not fail: another second picture changes the tokens from it on, and those before
    the first picture, which see everything."""
    one, other = (
        engine.score(prompt(text(1, 3), picture(1), text(2, 4), picture(seed), text(3, 2))) for seed in (2, 3)
    )
    same = [torch.equal(a, b) for a, b in zip(one, other, strict=True)]
    assert same[8:] == [False] * 3
    assert not any(same[:3])


@needs_compiled
def test_128_mixed_requests_give_the_bits_of_single_ones(engine: Engine) -> None:
    requests = mixed(128)
    alone = one_by_one(engine, requests)
    forget(engine)
    assert answers(engine, requests) == alone
    assert answers(engine, requests) == alone  # from shared pages


@needs_compiled
def test_chunks_cancels_and_preemption_change_no_bit(engine: Engine) -> None:
    requests = mixed(24)
    alone = one_by_one(engine, requests)
    forget(engine, chunk_rows=7)
    assert answers(engine, requests) == alone
    forget(engine)
    for steps in range(8):
        number = engine.submit(ask(prompt(text(9, 3), picture(200 + steps), text(8, 2))))
        for _ in range(steps):
            engine.step()
        engine.cancel(number)
    assert answers(engine, requests) == alone
    growing = [ask(prompt(text(i, 4), picture(40 + i), text(9, 3)), 60) for i in range(4)]
    alone = one_by_one(engine, growing)
    forget(engine, pages=8)
    assert answers(engine, growing) == alone
    assert engine.state().preemptions > 0
    forget(engine)


@needs_compiled
def test_a_recorded_step_gives_the_bits_of_an_eager_one(engine: Engine, checkpoint: Path) -> None:
    assert answers(start(checkpoint, eager=True), mixed(20)) == answers(engine, mixed(20))


def test_prompts_with_the_same_pictures_share_their_source(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = spy(engine, monkeypatch)
    same = prompt(picture(70), text(1, 40))
    first = answers(engine, [ask(same)] * 3)
    assert stores(sent) == 1 and first[0] == first[1] == first[2]
    before = engine.state().prompt_tokens
    assert answers(engine, [ask(same)]) == first[:1]
    assert engine.state().prompt_tokens - before == 41 - PAGE_TOKENS
    assert stores(sent) == 1 and sum(isinstance(message, Encode) for message in sent) == 1
    # The encoding of a picture serves another source with it.
    answers(engine, [ask(prompt(picture(70), text(1, 4), picture(71), text(2, 3)))])
    assert stores(sent) == 2 and sum(isinstance(message, Encode) for message in sent) == 2


@needs_compiled
def test_others_get_a_token_in_every_step_of_a_store(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two pictures of 68 tokens are 5 pages, one in each piece here. A request that ends before the last piece leaves
    nothing, and pieces give the bits of a whole source."""
    asked = ask(prompt(picture(90), text(2, 3), picture(91, 2, 2), text(3, 2)), 6)
    expected = answers(engine, [asked])
    forget(engine)
    evict(engine, SourcePool)
    monkeypatch.setattr(media_encoding, "BESIDE_S", 0.0)
    monkeypatch.setattr(media_encoding, "operations_of_piece", lambda *_: 1.0)
    sent = spy(engine, monkeypatch)
    talks = engine.submit(ask(prompt(text(1, 8)), 40))
    engine.step()
    looks = engine.submit(asked)
    engine.step()  # admits it
    for stored in range(1, 4):
        assert [event.request for event in engine.step()] == [talks]
        assert stores(sent) == stored
    engine.cancel(looks)
    assert engine.state().source_pages_used == 0 and not source_pages(engine)
    looks = engine.submit(asked)
    found = [[event.request for event in engine.step()] for _ in range(6)]
    assert found == [[talks]] * 5 + [[talks, looks]] and stores(sent) == 3 + 5
    assert [len(message.pages) for message in sent if isinstance(message, StoreSource)] == [1] * 8
    engine.cancel(talks)
    engine.cancel(looks)
    assert answers(engine, [asked]) == expected


def test_sources_are_dropped_when_their_pages_are_needed(checkpoint: Path) -> None:
    page = 2 * 2 * 2 * 32 * 32 * 2  # layers, keys and values, heads, dims, tokens, bytes
    engine = start(checkpoint, source_bytes=7 * page)  # two sources of 68 tokens
    assert engine.worker.source_pages == 7
    requests = [ask(prompt(picture(80 + i), text(i, 9)), 5) for i in range(5)]
    alone = one_by_one(engine, requests)
    assert answers(engine, requests) == alone or not COMPILED
    assert source_pages(engine) == 6
    with pytest.raises(RequestError, match="take 9 pages, but the cache of encodings has 7"):
        engine.submit(ask(prompt(*[picture(i) for i in range(4)], text(1, 3))))


@needs_compiled
def test_sources_of_prefill_ranks_are_neither_encoded_nor_stored(
    checkpoint: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decode ranks compute a source if they have the pages of its prompt and not the source, or if it is gone."""
    one, other = (
        ask(prompt(text(1, 20), picture(i, 2, 2), text(i, 50), picture(i + 1), text(3, 9))) for i in (300, 302)
    )
    alone = one_by_one(engine, [one, other])
    with memory_files() as files:
        prefill, decode = (start(checkpoint, eager=True, transfer=Transfer(files, gives)) for gives in (True, False))
        slots, others = (prefilled(prefill, request) for request in (one, other))
        assert [len(slots[area]) for area in (Area.PAGES, Area.SOURCE_PAGES)] == [2, 5]
        evict(prefill, SourcePool)
        assert prefilled(prefill, one) == slots
        sent = spy(decode, monkeypatch)
        assert answers(decode, [replace(one, slots=slots)]) == alone[:1]
        assert stores(sent) == 0 and not any(isinstance(message, Encode) for message in sent)
        evict(decode, SourcePool)
        assert answers(decode, [replace(one, slots=slots)]) == alone[:1] and stores(sent) == 1
        assert answers(decode, [replace(other, slots=[*others[:-1], slots[-1]])]) == alone[1:]
        assert stores(sent) == 2 and decode.state().missed_prompts == 1
        assert source_pages(decode) == 2 * 5 and not pinned(decode)


def test_a_source_without_its_keys_and_values_is_forgotten() -> None:
    pool = NumberedPool(6)

    def pin(key: bytes, pages: int) -> NumberedEntry | None:
        found = pool.pin([NumberedEntry(key, pages)])
        return found[0] if found else None

    first = pin(b"a", 2)
    assert first is not None and pool.used == pool.pinned == 2
    pool.unpin(first)
    assert pool.used == 0
    second, third = pin(b"b", 3), pin(b"c", 3)
    assert second is not None and third is not None and pin(b"d", 1) is None
    second.ready = third.ready = True
    pool.unpin(third)
    pool.unpin(second)
    assert (pool.used, pool.pinned) == (6, 0)
    assert pin(b"d", 1) is not None  # in place of c, which has been idle for longer
    assert pin(b"b", 3) is second and pool.used == 4


SOURCE = functools.partial(Prompt, [1, VOCAB, 3], [picture(1)])


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (SOURCE(), "medium 0: expected it in the source of the prompt, found no segment of it"),
        (SOURCE(source=[Segment(1, 0, 5)]), "segment 0: expected one of 1 media, found 1"),
        (SOURCE(source=[Segment(0, 60, 9)]), "segment 0: expected tokens of the 68 of medium 0, found 9 from 60 on"),
        (
            SOURCE(source=[Segment(0, 0, 68)], visible_ranges=[VisibleRange(1, 60, 9, True)]),
            "visible range 0: expected a range of the 68 tokens of the source, found 9 from 60 on",
        ),
        (
            SOURCE(source=[Segment(0, 0, 68)], visible_ranges=[VisibleRange(1, 0, 9, True)] * 2),
            "visible range 1: expected a token after 1 of the prompt, found 1",
        ),
        (
            SOURCE([PlaceholderRange(0, 1, 0, 0)]),
            "the prompt has placeholders of media, but the model sees media by cross-attention",
        ),
        (Prompt([1, VOCAB + 8]), "expected token ids from 0 to 784, found 785"),
    ],
)
def test_refuses_prompts_that_do_not_fit_together(engine: Engine, bad: Prompt, says: str) -> None:
    with pytest.raises(RequestError, match=f"the request: {says}"):
        engine.submit(Request(bad))


def test_a_model_without_cross_attention_refuses_a_source() -> None:
    engine = single_engine(DEMO_VL, dtype=torch.bfloat16, max_total_tokens=512)
    with pytest.raises(RequestError, match="the prompt has a source for cross-attention, but the model has none"):
        engine.submit(Request(Prompt([1, 2], source=[Segment(0, 0, 1)])))


@needs_compiled
def test_the_language_model_alone_is_llama(engine: Engine, checkpoint: Path, tmp_path: Path) -> None:
    """Layers of cross-attention do nothing to text: a checkpoint of type mllama_text_model gives the bits of the whole
    one, also beside a picture, and holds neither these layers nor pages for sources."""
    config = json.loads((checkpoint / "config.json").read_text())
    text_config = config["text_config"]
    (tmp_path / "config.json").write_text(json.dumps(text_config | {"architectures": ["MllamaForCausalLM"]}))
    tensors = {
        name.removeprefix("language_model."): tensor
        for file in checkpoint.glob("*.safetensors")
        for name, tensor in load_file(file).items()
        if name.startswith("language_model.")
    }
    save_file(tensors, tmp_path / "model.safetensors")
    alone = start(tmp_path)
    requests = [ask(prompt(text(i, 5 + 40 * i)), 6) for i in range(3)]
    expected = answers(alone, requests)
    assert one_by_one(engine, requests) == expected
    forget(engine)
    assert answers(engine, [*requests, ask(prompt(picture(95), text(9, 70)), 6)])[:3] == expected
    assert alone.worker.source_pages == alone.state().source_pages == 0 < engine.state().source_pages
    cached, of_text = (
        len(build_model(read_supported_card(path), Sharding(0, 1, torch.bfloat16, None)).cache_specs())
        for path in (checkpoint, tmp_path)
    )
    assert cached - of_text == len(text_config["cross_attention_layers"])
    with pytest.raises(RequestError, match="the prompt has media, but the model takes text alone"):
        alone.submit(ask(prompt(picture(1))))


def test_steps_of_text_leave_out_cross_attention(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise AssertionError("cross-attention")

    monkeypatch.setattr(CrossAttention, "__call__", fails)
    engine.score(prompt(text(1, 5)))
    with pytest.raises(AssertionError, match="cross-attention"):
        engine.score(prompt(text(1, 5), picture(96)))
