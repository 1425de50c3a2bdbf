"""The engine speaks: its codes and samples against transformers, and requests that come, wait and go."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from batching import DEMO, forget, single, single_engine
from ranks import run_ranks
from safetensors.torch import load_file

from tests.runtime.omni.speaking_ranks import Answer, Listener, differs, limits, prompts, request, speak, start
from tests.runtime.omni.speech_cases import CASES, FRAMES
from tilerank.runtime.lead.engine import Engine
from tilerank.runtime.lead.sampling import SamplingParams
from tilerank.runtime.protocol.errors import RequestError
from tilerank.runtime.protocol.events import FailedEvent, SoundEvent
from tilerank.runtime.protocol.params import SpeechParams
from tilerank.runtime.protocol.prompt import Prompt
from tilerank.runtime.protocol.speech_messages import SpeechStep
from tilerank.runtime.rank.speech_rank import SpeechOutputs


@pytest.mark.parametrize(("tp", "eager"), [(1, False), (2, False), (3, False), (6, False), (1, True)])
def test_an_engine_speaks_as_transformers_does(reference: Path, tp: int, eager: bool) -> None:
    """Greedy codes and samples of each case alone, and of all together beside texts that are not spoken."""
    job = {"out": str(reference), "cases": CASES, "frames": FRAMES, "eager": eager}
    found = run_ranks(tp, "tests.runtime.omni.speaking_ranks:run", kwargs=job, timeout=200)[0]
    assert {problem for way in found.values() for problems in way.values() for problem in problems} == set(), found


@pytest.fixture(scope="module")
def made(reference: Path) -> Listener:
    return Listener(Engine(start(single(), str(reference))))


@pytest.fixture(scope="module")
def wanted(reference: Path) -> dict[str, torch.Tensor]:
    return load_file(reference / "omni.safetensors")


@pytest.fixture(scope="module")
def asked(reference: Path, wanted: dict[str, torch.Tensor]) -> dict[str, Prompt]:
    return prompts(str(reference), CASES, wanted)


@pytest.fixture
def listener(made: Listener) -> Iterator[Listener]:
    """An engine that ends speech after FRAMES frames. After the test, neither it nor the ranks may hold anything."""
    with limits(FRAMES):
        yield made
    engine = made.engine
    assert not engine.busy and engine.state().cache_used == 0
    assert engine.state().talker_pages_used == 0
    assert engine.worker.speech is not None and not engine.worker.speech._held
    assert not engine.worker.speech._sounds._held


def contents(answers: list[Answer]) -> list[Any]:
    return [(answer.tokens, answer.codes, answer.samples, answer.ended) for answer in answers]


def test_pages_that_run_out_change_no_sound(reference: Path, asked: dict[str, Prompt], listener: Listener) -> None:
    """Speeches wait for pages and lose them to older ones. Sound that was sent is not sent again."""
    some = [request(asked[name], max_new_tokens=12) for name in ("text", "media", "turns", "text")]
    small = Listener(Engine(start(single(), str(reference), talker_pages=5)))
    with limits(60):
        expected = contents([speak(listener, [one])[0] for one in some])
        assert contents(speak(small, some)) == expected
    state, speaking = small.engine.state(), small.engine.speaking
    assert (state.talker_pages, state.talker_pages_used) == (5, 0)
    assert sum(len(step.moved) for step in small.steps) == speaking.preemptions > 1


def test_texts_that_are_preempted_go_on_speaking(asked: dict[str, Prompt], listener: Listener) -> None:
    """Also before their media are heard by the talker: the ranks keep these again."""
    some = [request(asked[name], max_new_tokens=70) for name in ("media", "text", "media", "turns")]
    expected = contents([speak(listener, [one])[0] for one in some])
    engine = listener.engine
    for pages in (8, 9, 11):
        forget(engine, pages=pages)
        assert contents(speak(listener, some)) == expected
        assert engine.state().preemptions > 0
    forget(engine)


def test_shared_pages_change_no_sound(
    asked: dict[str, Prompt], wanted: dict[str, torch.Tensor], listener: Listener
) -> None:
    """The talker reads media that the cache has: those of the same prompt, now and before, spoken or not."""
    forget(listener.engine)
    speak(listener, [request(asked["media"], speaks=False)])
    found = speak(listener, [request(asked["media"])] * 3) + speak(listener, [request(asked["media"])])
    assert [differs(answer, wanted, "media") for answer in found] == [[]] * 4


def test_a_request_ends_at_any_moment(asked: dict[str, Prompt], listener: Listener) -> None:
    """Others go on. What it held is free at once, on the ranks as well."""
    engine = listener.engine
    expected = contents(speak(listener, [request(asked["text"])]))
    for steps in range(1, 24, 2):
        number = engine.submit(request(asked["media"]))
        for _ in range(steps):
            engine.step()
        engine.cancel(number)
        assert not engine.busy
    for steps in range(1, 16, 3):
        number = engine.submit(request(asked["media"]))
        for _ in range(steps):
            engine.step()
        other = engine.submit(request(asked["text"]))
        engine.step()
        engine.cancel(number)
        found = Answer()
        while engine.busy:
            for event in engine.step():
                assert event.request == other
                found.samples += event.samples if isinstance(event, SoundEvent) else b""
        assert found.samples == expected[0][2]


def test_numbers_that_are_none_fail_one_request(
    asked: dict[str, Prompt], listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, speak_once = listener.engine, listener.engine.worker.speak
    expected = contents(speak(listener, [request(asked["turns"])]))
    bad = engine.submit(request(asked["text"], max_new_tokens=40))
    good = engine.submit(request(asked["turns"]))

    def damaged(step: SpeechStep) -> SpeechOutputs:
        spoken = speak_once(step)
        speech = engine.speaking.speeches.get(bad)
        for row, frame in enumerate(step.frames):
            if speech is not None and frame.sequence == speech.number and speech.frames == 3:
                spoken.logits[row - len(step.frames)] = float("nan")
        return spoken

    monkeypatch.setattr(engine.worker, "speak", damaged)
    samples, failed = b"", []
    while engine.busy:
        for event in engine.step():
            failed += [event] if isinstance(event, FailedEvent) else []
            samples += event.samples if isinstance(event, SoundEvent) and event.request == good else b""
    assert [event.request for event in failed] == [bad]
    assert failed[0].sentence.startswith("the talker computes NaN or infinity after 3 frames of this speech")
    assert samples == expected[0][2]


@pytest.mark.parametrize("temperature", [0.0, 1e-5])
def test_codes_that_cannot_be_chosen_fail_one_request(
    reference: Path, asked: dict[str, Prompt], temperature: float
) -> None:
    """The code predictor alone computes NaN, in the fourth frame of the older of two speeches."""
    engine = Engine(start(single(), str(reference), eager=True))
    assert engine.worker.speech is not None
    predictor: Any = engine.worker.speech.speaker.predictor

    def damaged(x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = whole(x)
        speech = engine.speaking.speeches.get(bad)
        if speech is not None and speech.frames == 4:
            logits[0] = math.nan
        return logits

    whole = predictor.heads[2]
    params: dict[str, Any] = {"temperature": temperature, "seed": 3}
    with limits(FRAMES):
        expected = speak(Listener(engine), [request(asked["turns"], **params)])[0]
        bad = engine.submit(request(asked["text"], **params))
        good = engine.submit(request(asked["turns"], **params))
        predictor.heads[2] = damaged
        samples, failed = b"", []
        while engine.busy:
            for event in engine.step():
                failed += [event] if isinstance(event, FailedEvent) else []
                samples += event.samples if isinstance(event, SoundEvent) and event.request == good else b""
    assert [(event.request, event.sentence.split(":")[0]) for event in failed] == [
        (bad, "the talker computes NaN or infinity after 4 frames of this speech")
    ]
    assert samples == expected.samples and not engine.worker.speech._held


def test_seeds_give_speeches(asked: dict[str, Prompt], listener: Listener) -> None:
    """The same seed gives the same codes and samples, whatever else speaks."""

    def sampled(seed: int) -> Any:
        return request(asked["text"], temperature=1e-5, seed=seed)

    one, other = speak(listener, [sampled(1), sampled(2)])
    (again,) = speak(listener, [sampled(1)])
    assert contents([one]) == contents([again])
    assert one.tokens == other.tokens and one.codes != other.codes
    spread = [{codes[i] for codes in one.codes} for i in range(len(one.codes[0]))]
    assert all(len(values) > 1 for values in spread)


def test_the_first_sound_comes_while_the_text_is_written(asked: dict[str, Prompt], listener: Listener) -> None:
    engine = listener.engine
    engine.submit(request(asked["text"], max_new_tokens=30))
    kinds = []
    while engine.busy:
        kinds += [type(event).__name__ for event in engine.step()]
    assert 4 <= kinds[: kinds.index("SoundEvent")].count("TokenEvent") <= 7
    assert kinds.count("TokenEvent") == 30 and kinds[-1] == "SoundEvent"


def header(listener: Listener, prompt: Prompt) -> int:
    """Return where the text of the answer begins, after the three tokens that open its turn."""
    return listener.engine.speaking.prompt(prompt, SamplingParams(), SpeechParams("ethan")).text_start


def test_an_answer_of_its_end_alone_is_silent(asked: dict[str, Prompt], listener: Listener) -> None:
    prompt = Prompt(asked["text"].token_ids[: header(listener, asked["text"])])
    (answer,) = speak(listener, [request(prompt, max_new_tokens=1)])
    assert (len(answer.tokens), answer.codes, answer.samples, answer.ended) == (1, [], b"", 1)


@pytest.mark.parametrize(
    ("params", "sentence"),
    [
        ({"speech": SpeechParams("nobody")}, "voice: expected one of chelsie, ethan, aiden, found 'nobody'"),
        ({"grammar": "start: /a+/"}, "without a grammar, of at least one new token, found a grammar"),
        ({"max_new_tokens": 0}, "of at least one new token, found max_new_tokens 0"),
    ],
)
def test_refusals(asked: dict[str, Prompt], listener: Listener, params: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RequestError, match=sentence):
        listener.engine.submit(request(asked["text"], **params))


def test_a_text_in_the_prompt_is_spoken_as_a_generated_one(asked: dict[str, Prompt], listener: Listener) -> None:
    """As /v1/audio/speech asks: the prompt has the text, but for its last token, the only one that may follow."""
    generated = speak(listener, [request(asked["text"], max_new_tokens=12)])[0]
    *before, last = generated.tokens
    prompt = Prompt(asked["text"].token_ids + before)
    read = speak(listener, [request(prompt, max_new_tokens=1, allowed_token_ids=(last,))])[0]
    assert read.tokens == [last] and (read.codes, read.samples) == (generated.codes, generated.samples)


def test_prompts_that_can_never_be_spoken(reference: Path, asked: dict[str, Prompt], listener: Listener) -> None:
    ids = asked["text"].token_ids
    end = header(listener, asked["text"])
    for prompt in (Prompt(ids[: end - 1]), Prompt(ids[: end - 3]), Prompt([5])):
        with pytest.raises(RequestError, match="expected a chat whose last turn is that of the assistant"):
            listener.engine.submit(request(prompt))
    long = Prompt([*ids[:3], *[7] * 30, *ids[3:]])
    small = Engine(start(single(), str(reference), talker_pages=1))
    with pytest.raises(
        RequestError, match=r"\d+ tokens of the user's turns and one frame need to fit in the talker's 32"
    ):
        small.submit(request(long))
    silent = single_engine(DEMO, dtype=torch.float32, max_total_tokens=512)
    with pytest.raises(RequestError, match="expected a model that speaks"):
        silent.submit(request(Prompt([5])))
