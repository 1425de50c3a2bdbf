"""The engine with frames of MOSS-VL as sources: chunks, batches, preemption, recorded steps, turns, refusals."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from batching import answers, forget, one_by_one, score_in_chunks, single_engine
from media_prompts import ask
from rungs import needs_compiled
from tiny import make_checkpoint

from tilerank.kernels.kv_pages import PAGE_TOKENS
from tilerank.runtime.lead.engine import Engine, Request
from tilerank.runtime.media.decoder import DecodedMedium
from tilerank.runtime.media.processor import Processor
from tilerank.runtime.models import moss_vl
from tilerank.runtime.protocol.errors import RequestError
from tilerank.runtime.protocol.prompt import Prompt


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("moss_vl", tmp_path_factory.mktemp("moss"))


def start(model_dir: Path, *, eager: bool = False) -> Engine:
    return single_engine(model_dir, dtype=torch.bfloat16, max_total_tokens=4096, eager=eager)


@pytest.fixture(scope="module")
def shared(model_dir: Path) -> Engine:
    return start(model_dir)


def picture(seed: int, height: int, width: int) -> DecodedMedium:
    return DecodedMedium("image", (1, height, width), random.Random(seed).randbytes(height * width * 3), [0], None)


def video(seed: int, count: int) -> DecodedMedium:
    pixels = random.Random(seed).randbytes(count * 40 * 64 * 3)
    return DecodedMedium("video", (count, 40, 64), pixels, list(range(0, 7 * count, 7)), 4.0)


WORDS = ("one", "cat", "sees", "blue", "under", "the", "stone", "and", "then")


def words(seed: int, count: int) -> str:
    draw = random.Random(seed)
    return " ".join(draw.choice(WORDS) for _ in range(count))


def mixed(processor: Processor, count: int) -> list[Request]:
    """Prompts with none to three pictures and videos of many sizes, and text before, between and behind."""
    draw = random.Random(count)
    requests = []
    for i in range(count):
        text, media = words(i, draw.randrange(1, 30)), list[DecodedMedium]()
        for _ in range(draw.randrange(4)):
            if draw.random() < 0.3:
                media.append(video(draw.randrange(4), draw.randrange(1, 6)))
            else:
                media.append(picture(draw.randrange(8), *draw.choice([(64, 64), (40, 200), (130, 70), (1, 1)])))
            text += f"<|{media[-1].kind}|>" + words(50 + i, draw.randrange(3))
        requests.append(ask(processor.prompt(text + words(90 + i, 2), media), draw.randrange(1, 14)))
    return requests


def cut_prompt(processor: Processor) -> Prompt:
    media = [picture(1, 64, 96), picture(2, 40, 200), video(3, 3)]
    return processor.prompt("a cat <|image|><|image|>sees <|video|>the stone", media)


@needs_compiled
def test_a_prompt_cut_anywhere_gives_the_same_bits(engine: Engine, processor: Processor) -> None:
    whole = cut_prompt(processor)
    expected = engine.score(whole)
    for cut in range(1, len(whole.token_ids)):
        assert torch.equal(score_in_chunks(engine, whole, [cut]), expected), cut
    assert torch.equal(score_in_chunks(engine, whole, list(range(1, len(whole.token_ids)))), expected)


@needs_compiled
def test_tokens_see_the_frames_up_to_their_own_alone(engine: Engine, processor: Processor) -> None:
    """Before the first frame, logits are those of text. Another frame changes its placeholder and what follows."""
    text = "the cat <|image|>sees <|image|>the stone"
    one, other = (processor.prompt(text, [picture(1, 64, 64), picture(seed, 64, 96)]) for seed in (2, 3))
    first, second = (visible.start for visible in one.visible_ranges)
    logits = engine.score(one)
    alone = engine.score(processor.prompt("the cat ", []))
    assert torch.equal(logits[: first - 1], alone[: first - 1])
    same = [torch.equal(a, b) for a, b in zip(logits, engine.score(other), strict=True)]
    assert same == [True] * second + [False] * (len(same) - second)


@needs_compiled
def test_groups_of_frames_change_no_bit(engine: Engine, processor: Processor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of five frames: all at once, two at a time, and each alone. Frames are encoded like pictures of their own."""
    [medium] = processor.prompt("<|video|>", [video(1, 5)]).media
    _, rows, columns = medium.grid
    frames = torch.frombuffer(bytearray(medium.frames), dtype=torch.uint8).view(*medium.size, 3)
    assert engine.worker.encoder is not None
    encode = engine.worker.encoder.encode
    *_, whole = encode(frames, medium.grid, 1e6)
    assert whole is not None
    for patches in (2 * rows * columns, 1):
        monkeypatch.setattr(moss_vl, "_GROUP", patches)
        *_, found = encode(frames, medium.grid, 1e6)
        assert found is not None and torch.equal(found, whole)
    for i, own in enumerate(whole[0].view(5, -1, whole.shape[2])):
        *_, alone = encode(frames[i : i + 1], (1, rows, columns), 1e6)
        assert alone is not None and torch.equal(alone[0], own)


@needs_compiled
def test_mixed_requests_give_the_bits_of_single_ones(engine: Engine, processor: Processor) -> None:
    """In one batch, from shared pages, in small chunks, and where sequences give way to others."""
    requests = mixed(processor, 32)
    alone = one_by_one(engine, requests)
    forget(engine)
    assert answers(engine, requests) == alone
    assert answers(engine, requests) == alone
    forget(engine, chunk_rows=7)
    assert answers(engine, requests) == alone
    growing = [replace(request, params=replace(request.params, max_new_tokens=60)) for request in requests[:5]]
    alone = one_by_one(engine, growing)
    forget(engine, pages=14)
    assert answers(engine, growing) == alone
    assert engine.state().preemptions > 0
    forget(engine)


@needs_compiled
def test_a_recorded_step_gives_the_bits_of_an_eager_one(engine: Engine, processor: Processor, model_dir: Path) -> None:
    assert answers(start(model_dir, eager=True), mixed(processor, 12)) == answers(engine, mixed(processor, 12))


@needs_compiled
def test_a_second_turn_shares_the_pages_of_the_first(engine: Engine, processor: Processor) -> None:
    """Also if it has another picture, whose source holds the frames of the first turn as well."""
    first, more = processor.prompt("<|image|>" + words(1, 60), [picture(1, 64, 96)]), picture(2, 130, 70)
    [told] = answers(engine, [ask(first, 50)])
    second = processor.prompt("<|image|>" + words(1, 60) + "<|image|>" + words(2, 4), [picture(1, 64, 96), more])
    before = engine.state().prompt_tokens
    found = answers(engine, [ask(second)])
    assert engine.state().prompt_tokens - before < len(second.token_ids) - PAGE_TOKENS
    # The generated tokens are shared as well.
    continued = Prompt(**{name: getattr(first, name) for name in first.__struct_fields__})
    continued.token_ids = [*first.token_ids, *(token for token, *_ in told)]
    start = len(first.token_ids) + first.shift
    continued.positions = [[*axis, *range(start, start + len(told))] for axis in first.positions]
    before = engine.state().prompt_tokens
    again = answers(engine, [ask(continued)])
    computed = engine.state().prompt_tokens - before
    assert computed <= PAGE_TOKENS < len(told)
    forget(engine)
    assert answers(engine, [ask(second)]) == found
    assert answers(engine, [ask(continued)]) == again


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"source_positions": []}, "source positions: expected 3 lists of .* numbers, found lists of "),
        ({"source_positions": [[5000]] * 3}, "source positions: expected 3 lists"),
        ({"positions": [[0]]}, "positions: expected 3 lists"),
    ],
)
def test_refuses_positions_that_do_not_fit(
    engine: Engine, processor: Processor, change: dict[str, list[list[int]]], says: str
) -> None:
    prompt = processor.prompt("<|image|>", [picture(1, 64, 64)])
    for name, value in change.items():
        setattr(prompt, name, value)
    with pytest.raises(RequestError, match=f"the request: {says}"):
        engine.submit(Request(prompt))
    far = processor.prompt("<|image|>", [picture(1, 64, 64)])
    far.source_positions[1][0] = 4096
    with pytest.raises(RequestError, match="source positions: expected numbers from 0 to 4095, found 4096"):
        engine.submit(Request(far))
