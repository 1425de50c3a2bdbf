"""Texts that follow grammars: what may come next against a language written out, and what that does to others."""

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from command import DEMO, demo_copy

from tilerank.loader.tokenizer import Tokenizer
from tilerank.parallel.channel import Channel
from tilerank.parallel.errors import GroupError
from tilerank.parallel.group import SingleGroup
from tilerank.parallel.join import Team
from tilerank.runtime import guide as guide_module
from tilerank.runtime.engine import Engine, Failed, Request, TokenEvent
from tilerank.runtime.errors import RequestError
from tilerank.runtime.grammar import Vocabulary
from tilerank.runtime.sampling import SamplingParams
from tilerank.runtime.server.lead import lead
from tilerank.runtime.server.messages import Submit, encode
from tilerank.runtime.step import Chunk

TOKENIZER = Tokenizer(DEMO)
PROMPT = TOKENIZER.encode("In the beginning God created the heaven and")
LANGUAGE = ["Moses", "Mount Sinai", "Aaron", "the sons of Israel", "the sonnet", "42"]
CHOICE = f"start: /{'|'.join(LANGUAGE)}/"
POEM = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 12},
        "lines": {
            "type": "array",
            "items": {"type": "integer", "minimum": 0, "maximum": 99},
            "minItems": 2,
            "maxItems": 3,
        },
    },
    "required": ["title", "lines"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
JSON = f"start: %json {json.dumps(POEM)}"


@pytest.fixture
def engine() -> Iterator[Engine]:
    team = Team(SingleGroup(), Channel(0, None, {}, 10.0))
    yield Engine(DEMO, team, dtype=torch.float32, context_length=256, max_total_tokens=512)


def events(engine: Engine, *asked: dict[str, Any]) -> list[list[TokenEvent]]:
    found: list[list[TokenEvent]] = [[] for _ in asked]
    for event in engine.generate([Request(PROMPT, SamplingParams(**params)) for params in asked]):
        found[event.request].append(event)
    return found


def text(some: list[TokenEvent]) -> str:
    return TOKENIZER.decode([event.token_id for event in some])


def test_takes_the_likeliest_token_that_the_language_has(engine: Engine) -> None:
    """By hand: where words part, every token whose text leads on to one of them, and of these the one of the highest
    logit. Where there is only one way to go on, tokens are those that the tokenizer makes of it."""
    pieces = {id: TOKENIZER.decode([id]) for id in range(TOKENIZER.num_tokens)}
    (found,) = events(engine, {"grammar": CHOICE})
    partings = 0
    for at, event in enumerate(found[:-1]):
        before = [event.token_id for event in found[:at]]
        said = TOKENIZER.decode(before)
        words = [word for word in LANGUAGE if word.startswith(said)]
        may = [id for id, piece in pieces.items() if piece and any(word.startswith(said + piece) for word in words)]
        if not all(word.startswith(said + pieces[event.token_id]) for word in words):
            partings += 1
            logits = engine.score(PROMPT + before)[-1]
            assert event.token_id == max(may, key=lambda id: float(logits[id]))
        assert event.token_id in may
    assert partings > 0
    assert text(found) in LANGUAGE
    assert [event.finish_reason for event in found] == [None] * (len(found) - 1) + ["stop"]


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.5, "seed": 1},
        {"temperature": 2.0, "top_p": 0.95, "seed": 2},
        {"temperature": 1.0, "top_k": 5, "min_p": 0.01, "seed": 3},
        {"repetition_penalty": 5.0, "presence_penalty": 2.0, "frequency_penalty": 2.0},
        {"logit_bias": dict.fromkeys(TOKENIZER.encode("Pharaoh"), 100.0)},
        {"ignore_eos": True, "logprobs": 2},
        {"temperature": 1.0, "stop_token_ids": (5,), "seed": 4},
    ],
    ids=lambda params: "-".join(params),
)
def test_holds_with_whatever_else_is_asked_for(engine: Engine, params: dict[str, Any]) -> None:
    word, poem = events(engine, {"grammar": CHOICE, **params}, {"grammar": JSON, "max_new_tokens": 100, **params})
    assert text(word) in LANGUAGE
    value = json.loads(text(poem))
    assert set(value) == {"title", "lines"} and len(value["title"]) <= 12 and 2 <= len(value["lines"]) <= 3
    assert all(type(line) is int and 0 <= line < 100 for line in value["lines"])
    assert word[-1].finish_reason == poem[-1].finish_reason == "stop"


def test_log_probabilities_are_those_of_the_free_text(engine: Engine) -> None:
    (found,) = events(engine, {"grammar": CHOICE, "logprobs": 3})
    expected = torch.log_softmax(engine.score(PROMPT)[-1], -1)
    assert found[0].logprobs is not None
    assert found[0].logprobs.chosen == pytest.approx(float(expected[found[0].token_id]), abs=1e-4)
    assert [id for id, _ in found[0].logprobs.top] == expected.topk(3).indices.tolist()


def test_others_of_the_batch_get_the_same_bits(engine: Engine) -> None:
    free = [{"max_new_tokens": 30, "logprobs": 2}, {"max_new_tokens": 20, "temperature": 1.0, "seed": 7, "logprobs": 1}]

    def told(some: list[TokenEvent]) -> list[object]:
        return [(event.token_id, event.logprobs) for event in some]

    alone = [told(events(engine, one)[0]) for one in free]
    guided = {"grammar": JSON, "max_new_tokens": 100}
    first, _, second, poem = events(engine, free[0], {"grammar": CHOICE, "temperature": 1.0}, free[1], guided)
    assert [told(first), told(second)] == alone
    assert told(poem) == told(events(engine, guided)[0])


def test_comes_through_giving_way(engine: Engine) -> None:
    """Sequences that give their pages up go on where they were in their grammars."""
    long = {"grammar": "start: /([a-z]{3}[0-9]){50}/", "max_new_tokens": 210}
    (alone,) = events(engine, long)
    assert len(alone) > 90
    found = events(engine, long, long, long, long)
    assert engine._scheduler.preemptions > 0
    assert [text(one) for one in found] == [text(alone)] * 4


def test_nobody_else_waits_for_a_grammar(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither while it is compiled nor while a mask of it is computed."""
    for slow in (Vocabulary.matcher, guide_module.Guides.look):
        may_go_on = threading.Event()

        def waits(*args: Any, slow: Any = slow, gate: threading.Event = may_go_on) -> Any:
            assert gate.wait(110)
            return slow(*args)

        owner = Vocabulary if slow is Vocabulary.matcher else guide_module.Guides
        grammar = f"start: /{'|'.join(LANGUAGE)}|{'@' * (1 + (owner is Vocabulary))}/"
        with monkeypatch.context() as patch:
            patch.setattr(owner, slow.__name__, waits)
            guided = engine.submit(Request(PROMPT, SamplingParams(grammar=grammar)))
            free = engine.submit(Request(PROMPT, SamplingParams(max_new_tokens=20, ignore_eos=True)))
            found = [event for _ in range(25) for event in engine.step()]
            assert [event.request for event in found] == [free] * 20
            may_go_on.set()
            while engine.busy:
                found += engine.step()
        words = [event for event in found if event.request == guided and isinstance(event, TokenEvent)]
        assert text(words) in LANGUAGE and words[-1].finish_reason == "stop"


def test_a_rank_lost_as_a_guided_answer_ends_is_what_is_said(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer's end, which came before the step that failed, is not told any more."""
    compute = engine._lead

    def lost_with_the_first_answer(chunks: list[Chunk]) -> torch.Tensor:
        if set(engine._requests) == {1}:
            raise GroupError("rank 1 is gone")
        return compute(chunks)

    monkeypatch.setattr(engine, "_lead", lost_with_the_first_answer)
    guided = Submit(7, PROMPT, SamplingParams(grammar=CHOICE))
    free = Submit(8, PROMPT, SamplingParams(max_new_tokens=200, ignore_eos=True))
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.sendall(encode(guided) + encode(free))
        with pytest.raises(GroupError, match="rank 1 is gone"):
            lead(engine, [ours], [])


def end_of(engine: Engine, grammar: str) -> list[TokenEvent | Failed]:
    """What comes of a request with this grammar, beside one that has none and has to come to its end."""
    guided = engine.submit(Request(PROMPT, SamplingParams(grammar=grammar)))
    free = engine.submit(Request(PROMPT, SamplingParams(max_new_tokens=8, ignore_eos=True)))
    found: list[TokenEvent | Failed] = []
    while engine.busy:
        found += engine.step()
    assert sum(event.request == free for event in found) == 8
    assert engine._pool.free == engine._pool.total
    return [event for event in found if event.request == guided]


def test_a_grammar_that_fails_ends_its_own_request_alone(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    for grammar, says in (
        ("start: /(/", "unclosed group"),
        ("start: missing", "missing"),
        ('start: %json {"type": "string", "pattern": "(?=a)b"}', "look-around"),
        ("start: /x{1000000}/", "too many expressions"),  # after the first token
    ):
        *_, failed = end_of(engine, grammar)
        assert isinstance(failed, Failed) and says in failed.sentence and "\n" not in failed.sentence
    with pytest.raises(RequestError, match=r"request 0: the grammar: .*unclosed group"):
        events(engine, {"grammar": "start: /(/"})

    with monkeypatch.context() as patch:
        patch.setattr(guide_module, "SPENT_S", -1e9)  # even the quickest mask is more
        *tokens, failed = end_of(engine, CHOICE)
        assert len(tokens) == 1
        assert isinstance(failed, Failed) and "takes too long" in failed.sentence

    class PanicException(BaseException):
        """As the library's Rust code raises it: not even an Exception."""

    def panics(*_: object) -> None:
        raise PanicException("index out of bounds: the len is 3")

    monkeypatch.setattr(guide_module.Guides, "look", panics)
    (failed,) = end_of(engine, "start: /another/")
    assert isinstance(failed, Failed) and "log says why" in failed.sentence


def test_a_complete_grammar_without_an_end_token(tmp_path: Path) -> None:
    """A model that names no end of its texts still ends those of a grammar."""
    model = demo_copy(tmp_path / "model")
    for name in ("config.json", "generation_config.json"):
        values = {key: value for key, value in json.loads((DEMO / name).read_text()).items() if "eos" not in key}
        (model / name).write_text(json.dumps(values))
    engine = Engine(model, Team(SingleGroup(), Channel(0, None, {}, 10.0)), dtype=torch.float32)
    (found,) = events(engine, {"grammar": "start: /[0-9]{4}/"})
    assert len(text(found[:-1])) == 4 and found[-1].finish_reason == "stop"
