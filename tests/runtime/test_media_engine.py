"""The engine with pictures and videos: placeholders, shared pages and encodings, pieces of an encode, refusals."""

import functools
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from batching import (
    DEMO,
    answers,
    evict,
    forget,
    memory_files,
    one_by_one,
    prefilled,
    score_in_chunks,
    single_engine,
    spy,
)
from media_prompts import SMALL, VIDEO, ask, medium, mixed, prompt, smallest, text
from ranks import Ranks, eventually, run_ranks
from rungs import needs_compiled
from tiny import make_checkpoint

from tilerank.runtime.lead import encodings, media_encoding
from tilerank.runtime.lead.encodings import EncoderCache
from tilerank.runtime.lead.engine import Engine, Request
from tilerank.runtime.lead.media_encoding import MediaEncoding, operations_of_piece
from tilerank.runtime.protocol.areas import Area
from tilerank.runtime.protocol.errors import RequestError
from tilerank.runtime.protocol.prompt import Medium, PlaceholderRange, Prompt
from tilerank.runtime.protocol.rank_messages import Encode, EncodePiece, Frames, Message, StopEncode
from tilerank.runtime.protocol.sizes import PREFILL_CHUNK
from tilerank.runtime.rank.transfer_memory import Transfer


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3_vl", tmp_path_factory.mktemp("media"), layers=4)


def start(checkpoint: Path, *, eager: bool = False, mm_cache_bytes: int = 1 << 30) -> Engine:
    return single_engine(
        checkpoint, mm_cache_bytes=mm_cache_bytes, dtype=torch.bfloat16, max_total_tokens=2048, eager=eager
    )


@pytest.fixture(scope="module")
def shared(checkpoint: Path) -> Engine:
    return start(checkpoint)


def encoded(engine: Engine) -> int:
    """Return the bytes of all encodings that rank 0 counts."""
    return sum(kind.pool.used for kind in engine.scheduler.kinds if isinstance(kind, EncoderCache))


def encodes(sent: list[Message]) -> int:
    return sum(isinstance(message, Encode) for message in sent)


@needs_compiled
def test_a_prompt_cut_at_any_token_of_a_picture_gives_the_same_bits(engine: Engine) -> None:
    for whole in (prompt(text(1, 3), SMALL, text(2, 4)), prompt(text(1, 2), VIDEO, text(2, 3))):
        expected = engine.score(whole)
        for cut in range(1, len(whole.token_ids)):
            assert torch.equal(score_in_chunks(engine, whole, [cut]), expected), cut
        assert torch.equal(score_in_chunks(engine, whole, list(range(1, len(whole.token_ids)))), expected)


def test_a_picture_changes_what_follows_it(engine: Engine) -> None:
    """Otherwise the tests here could not fail."""
    one, other = (engine.score(prompt(text(1, 3), medium(seed, 2, 3), text(2, 4))) for seed in (1, 2))
    assert torch.equal(one[:3], other[:3]) and not torch.equal(one[-1], other[-1])


@needs_compiled
def test_a_mixed_batch_gives_the_bits_of_single_requests(engine: Engine) -> None:
    alone = one_by_one(engine, mixed())
    for rows in (PREFILL_CHUNK, 7):
        forget(engine, chunk_rows=rows)
        assert answers(engine, mixed()) == alone
    assert answers(engine, mixed()) == alone  # from shared pages


@needs_compiled
def test_a_recorded_step_gives_the_bits_of_an_eager_one(engine: Engine, checkpoint: Path) -> None:
    assert answers(start(checkpoint, eager=True), mixed()) == answers(engine, mixed())


@needs_compiled
def test_preempted_prompts_insert_their_pictures_again(engine: Engine) -> None:
    requests = [ask(prompt(text(i, 4), medium(40 + i, 4, 6), text(9, 3)), 60) for i in range(4)]
    expected = one_by_one(engine, requests)
    forget(engine, pages=8)
    assert answers(engine, requests) == expected
    assert engine.state().preemptions > 0
    forget(engine)


def test_the_same_picture_is_encoded_and_computed_once(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    picture, sent = medium(50, 6, 8), spy(engine, monkeypatch)  # 48 tokens
    same = prompt(text(1, 20), picture, text(2, 10))
    first = answers(engine, [ask(same)] * 3)
    assert encodes(sent) == 1 and first[0] == first[1] == first[2]
    before = engine.state().prompt_tokens
    assert answers(engine, [ask(same)]) == first[:1]
    assert engine.state().prompt_tokens - before == 78 - 64  # two whole pages are found
    # The encoding is found by a prompt that shares no page.
    answers(engine, [ask(prompt(text(3, 20), picture, text(2, 10)))])
    assert encodes(sent) == 1
    # Another picture behind the same tokens shares the page before it at most.
    other = answers(engine, [ask(prompt(text(1, 20), medium(51, 6, 8), text(2, 10)))])
    assert encodes(sent) == 2 and other != first[:1]
    forget(engine)
    assert answers(engine, [ask(prompt(text(1, 20), medium(51, 6, 8), text(2, 10)))]) == other


def test_pages_that_cover_a_picture_need_no_encoding(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    covered = prompt(text(1, 4), medium(60, 4, 7), text(2, 20))  # the picture ends with the first page
    first = answers(engine, [ask(covered)])
    evict(engine, EncoderCache)
    sent = spy(engine, monkeypatch)
    assert answers(engine, [ask(covered)]) == first
    assert encodes(sent) == 0


def test_others_get_a_token_in_every_step_of_an_encode(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """36 patches in tasks of up to 32: 3 of rows of blocks, 4 of each of 4 blocks, 1 of each of 4 mergers."""
    monkeypatch.setattr(media_encoding, "BESIDE_S", 0.0)
    monkeypatch.setattr(media_encoding, "operations_of_piece", smallest)
    sent = spy(engine, monkeypatch)
    talks = engine.submit(ask(prompt(text(1, 8)), 40))
    engine.step()
    looks = engine.submit(ask(prompt(text(2, 3), medium(70, 3, 3), text(3, 2)), 1))
    pieces = 3 + 4 * 4 + 4
    found = [[event.request for event in engine.step()] for _ in range(pieces + 1)]
    assert sum(isinstance(message, EncodePiece) for message in sent) == pieces
    assert found == [[talks]] * pieces + [[talks, looks]]
    engine.cancel(talks)


def test_pieces_are_begun_until_their_time_is_over(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media_encoding, "BESIDE_S", 1e3)
    monkeypatch.setattr(media_encoding, "operations_of_piece", smallest)
    talks = engine.submit(ask(prompt(text(1, 8)), 40))
    engine.step()
    looks = engine.submit(ask(prompt(text(2, 3), medium(71, 3, 3), text(3, 2)), 1))
    assert [[event.request for event in engine.step()] for _ in range(2)] == [[talks], [talks, looks]]
    engine.cancel(talks)


def test_a_piece_is_begun_if_the_longest_of_the_last_would_end_in_time(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a clock on which only pieces take time, 50 ms between steps, and 25 ms expected of a piece at least."""
    now, seconds, encode_piece = 0.0, iter([0.010] * 3 + [0.031] + [0.010] * 19), engine.worker.encode_piece

    def timed() -> bool:
        nonlocal now
        now += next(seconds)
        return encode_piece()

    monkeypatch.setattr(media_encoding, "time", SimpleNamespace(perf_counter=lambda: now))
    monkeypatch.setattr(engine.worker, "encode_piece", timed)
    monkeypatch.setattr(media_encoding, "operations_of_piece", smallest)
    engine.encoding = MediaEncoding(engine.worker)
    talks = engine.submit(ask(prompt(text(1, 8)), 40))
    engine.step()
    looks = engine.submit(ask(prompt(text(2, 3), medium(74, 3, 3), text(3, 2)), 1))
    engine.step()
    sent = spy(engine, monkeypatch)
    begun = []
    for _ in range(5):
        engine.step()
        begun.append(sum(isinstance(message, EncodePiece) for message in sent))
    assert begun == [3, 4, 6, 8, 10]
    engine.cancel(talks)
    engine.cancel(looks)


def test_a_small_encode_is_one_piece(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = spy(engine, monkeypatch)
    answers(engine, [ask(prompt(text(2, 3), medium(72, 3, 3), text(3, 2)))])
    assert sum(isinstance(message, EncodePiece) for message in sent) == 1


@needs_compiled
@pytest.mark.parametrize(("rows", "columns", "frames"), [(3, 3, 1), (12, 14, 1), (14, 4, 5)])
def test_an_encode_cut_anywhere_gives_the_same_bits(engine: Engine, rows: int, columns: int, frames: int) -> None:
    encoder, whole = engine.worker.encoder, medium(73, rows, columns, frames)
    assert encoder is not None
    pixels = torch.frombuffer(bytearray(whole.frames), dtype=torch.uint8).view(*whole.size, 3)
    (expected,) = encoder.encode(pixels, whole.grid, math.inf)
    counts = []
    for operations in (1.0, 1e5, 1e6, 5e6, 2e7):
        *pieces, found = encoder.encode(pixels, whole.grid, operations)
        assert found is not None and expected is not None and torch.equal(found, expected), operations
        counts.append(len(pieces))
    assert counts == sorted(counts, reverse=True) and counts[0] > counts[-1] > 0


def test_pieces_grow_with_threads_and_ranks() -> None:
    one = operations_of_piece(torch.bfloat16, 1)
    assert operations_of_piece(torch.bfloat16, 6) == 6 * one
    assert operations_of_piece(torch.float32, 1) <= one


@pytest.mark.parametrize("steps", [1, 2, 6, 20])
def test_a_cancelled_encode_leaves_nothing(engine: Engine, monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    monkeypatch.setattr(media_encoding, "ALONE_S", 0.0)
    monkeypatch.setattr(media_encoding, "operations_of_piece", smallest)
    wanted = prompt(text(1, 3), medium(80, 3, 4), text(2, 2))
    held, used = engine.worker._encodings, encoded(engine)
    sent = spy(engine, monkeypatch)
    number = engine.submit(ask(wanted))
    for _ in range(steps):
        assert engine.step() == []
    engine.cancel(number)
    assert sum(isinstance(message, StopEncode) for message in sent) == (steps > 1)
    assert held._pieces is None and not held._frames and held._medium is None
    assert encoded(engine) == used and engine.state().cache_used == 0
    # Another request needs the picture too: one of two is cancelled, and the encode goes on.
    pair = [engine.submit(ask(wanted)), engine.submit(ask(prompt(text(5, 3), *wanted.media)))]
    for _ in range(steps):
        engine.step()
    engine.cancel(pair[0])
    events = [event for _ in range(40) for event in engine.step()]
    assert [event.request for event in events] == [pair[1]] * 6
    evict(engine, EncoderCache)


def test_frames_are_sent_in_parts(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    request = ask(prompt(text(1, 3), medium(90, 3, 4), text(2, 2)))
    whole = answers(engine, [request])
    forget(engine)
    evict(engine, EncoderCache)
    monkeypatch.setattr(encodings, "PART_BYTES", 5000)
    sent = spy(engine, monkeypatch)
    assert answers(engine, [request]) == whole
    parts = [message.frames for message in sent if isinstance(message, Frames)]
    (first,) = (message.medium for message in sent if isinstance(message, Encode))
    assert first.frames + b"".join(parts) == request.prompt.media[0].frames
    assert max(map(len, parts)) == 5000


def test_encodings_are_evicted_within_the_budget(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for two pictures of 6 tokens, of four levels of 128 bf16 numbers each."""
    nbytes = 4 * 6 * 128 * 2
    engine = start(checkpoint, mm_cache_bytes=2 * nbytes)
    sent = spy(engine, monkeypatch)
    held = engine.worker._encodings.tensors
    pictures = [medium(seed, 2, 3) for seed in range(4)]

    def look(*which: int) -> int:
        before = encodes(sent)
        forget(engine)
        answers(engine, [ask(prompt(text(1, 3), *(pictures[i] for i in which), text(2, 2)))])
        assert encoded(engine) <= 2 * nbytes
        return encodes(sent) - before

    assert [look(0), look(1), look(0), look(2), look(0), look(1)] == [1, 1, 0, 1, 0, 1]
    assert look(2, 3) == 2 and look(3, 2) == 0
    assert len(held) == 2 and sum(tensor.nbytes for tensor in held.values()) == 2 * nbytes
    # Several at once, which wait for each other's encodings.
    forget(engine)
    some = [ask(prompt(text(i, 3), pictures[i % 4], pictures[(i + 1) % 4], text(2, 2))) for i in range(5)]
    alone = one_by_one(engine, some)
    forget(engine)
    assert answers(engine, some) == alone
    with pytest.raises(RequestError, match=f"take {3 * nbytes} bytes, but the encoder cache has {2 * nbytes}"):
        look(0, 1, 2)


GOOD = prompt(text(1, 4), SMALL, text(2, 3))


def changed(**changes: object) -> Prompt:
    fields = {name: getattr(GOOD, name) for name in ("token_ids", "media", "placeholder_ranges", "positions")}
    return Prompt(**(fields | changes))


def reshaped(**changes: object) -> Prompt:
    fields = {name: getattr(SMALL, name) for name in ("kind", "frames", "size", "grid")}
    return changed(media=[Medium(**(fields | changes))])


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (changed(placeholder_ranges=[]), r"medium 0: a grid of \(1, 4, 6\) has 6 tokens, found placeholders for 0"),
        (changed(placeholder_ranges=[PlaceholderRange(4, 5, 0, 0)]), "has 6 tokens, found placeholders for 5"),
        (
            changed(placeholder_ranges=[PlaceholderRange(4, 6, 1, 0)]),
            "placeholder range 0: expected one of 1 media, found medium 1",
        ),
        (
            changed(placeholder_ranges=[PlaceholderRange(8, 6, 0, 0)]),
            "placeholder range 0: expected tokens .* within the prompt's 13, found 6 from 8 on",
        ),
        (
            changed(placeholder_ranges=[PlaceholderRange(4, 3, 0, 0), PlaceholderRange(6, 3, 0, 3)]),
            "placeholder range 1: expected tokens after range 0",
        ),
        (
            changed(placeholder_ranges=[PlaceholderRange(4, 3, 0, 0), PlaceholderRange(7, 3, 0, 2)]),
            "placeholder range 1: expected to go on with token 3 of medium 0",
        ),
        (changed(positions=[[1] * 13] * 2), r"expected 3 lists of 13 numbers, found lists of \[13, 13\]"),
        (changed(positions=[[1] * 12] * 3), r"found lists of \[12, 12, 12\]"),
        (changed(positions=[[0] * 12 + [1 << 40]] * 3), "positions: expected numbers from 0 to"),
        (changed(positions=[[-1] + [0] * 12] * 3), "found -1"),
        (reshaped(grid=(1, 4, 8)), r"a grid of \(1, 4, 8\) has 8 tokens, found placeholders for 6"),
        (reshaped(grid=(1, 0, 6)), "medium 0: expected a size and a grid of positive numbers"),
        (reshaped(size=(1, 64, 95)), "medium 0: 1 frames of 95 x 64 have 18240 bytes, found 18432"),
    ],
)
def test_refuses_prompts_that_do_not_fit_together(engine: Engine, bad: Prompt, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        engine.submit(Request(bad))


def test_positions_end_with_the_context(checkpoint: Path) -> None:
    """A picture uses fewer positions than tokens, but a prompt may ask for more."""
    engine = start(checkpoint)
    limit = engine.card.context_length
    far = changed(positions=[[0] * 12 + [limit - 3]] * 3)
    assert len(answers(engine, [ask(far, 50)])[0]) == 2
    with pytest.raises(RequestError, match="positions: expected numbers"):
        engine.submit(Request(changed(positions=[[0] * 12 + [limit]] * 3)))


def test_a_model_of_text_refuses_pictures() -> None:
    engine = single_engine(DEMO, dtype=torch.float32, max_total_tokens=512)
    with pytest.raises(RequestError, match="positions: expected none"):
        engine.submit(Request(GOOD))
    with pytest.raises(RequestError, match="the model takes text alone"):
        engine.submit(Request(changed(positions=[])))


@needs_compiled
def test_ranks_encode_together(checkpoint: Path) -> None:
    """Batches, cuts, evictions and cancelled encodes over three ranks, by the bits of single requests."""
    assert run_ranks(3, "media_prompts:same_answers", kwargs={"model": str(checkpoint)}, timeout=300)[0] == []


@pytest.mark.parametrize("culprit", [0, 2])
def test_a_rank_that_fails_in_an_encode_ends_the_others(checkpoint: Path, culprit: int) -> None:
    kwargs = {"model": str(checkpoint), "culprit": culprit}
    with Ranks(3, "media_prompts:fails", kwargs=kwargs, timeout_s=600.0) as ranks:
        assert all(ranks.wait(rank, timeout=300.0) != 0 for rank in range(3))
        for rank in range(3):
            says = "ValueError: the culprit's own error" if rank == culprit else f"GroupError: rank {culprit}"
            assert says in eventually(functools.partial(ranks.output, rank), says)


def test_pictures_before_pages_that_are_read_from_files_are_not_encoded(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = single_engine(checkpoint, dtype=torch.bfloat16, max_total_tokens=2048, eager=True, kv_dir=tmp_path / "kv")
    request = ask(prompt(text(1, 20), SMALL, text(2, 70), medium(9, 2, 3), text(3, 5)), 4)
    first = answers(engine, [request])
    assert engine.worker.store is not None
    engine.worker.store.flush(60)
    forget(engine)
    evict(engine, EncoderCache)
    sent = spy(engine, monkeypatch)
    assert answers(engine, [request]) == first
    assert encodes(sent) == 1  # of the second picture, which follows the three full pages
    engine.worker.store.close()


def test_pictures_before_pages_of_prefill_ranks_are_not_encoded_again(
    checkpoint: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of two pictures follows the three full pages: prefill ranks leave it to decode ranks."""
    config: dict[str, Any] = {"dtype": torch.bfloat16, "max_total_tokens": 2048, "eager": True}
    request = ask(prompt(text(1, 20), SMALL, text(2, 70), medium(9, 2, 3), text(3, 5)), 4)
    with memory_files() as files:
        prefill, decode = (
            single_engine(checkpoint, **config, transfer=Transfer(files, gives)) for gives in (True, False)
        )
        sent = spy(prefill, monkeypatch)
        slots = prefilled(prefill, request)
        assert len(slots[Area.PAGES]) == 3 and encodes(sent) == 1
        sent = spy(decode, monkeypatch)
        assert answers(decode, [replace(request, slots=slots)]) == answers(engine, [request])
        assert encodes(sent) == 1
