"""Grammar-constrained decoding, checked against languages that are written out, and its effect on other requests."""

import json
import socket
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from batching import single_engine
from command import DEMO, demo_copy

from tilerank.loader.tokenizer import Tokenizer
from tilerank.parallel.errors import GroupError
from tilerank.runtime.lead import grammar_masks
from tilerank.runtime.lead.engine import Engine, Request
from tilerank.runtime.lead.sampling import SamplingParams
from tilerank.runtime.protocol.errors import RequestError
from tilerank.runtime.protocol.events import EndedEvent, Event, FailedEvent, TokenEvent
from tilerank.runtime.protocol.framing import encode
from tilerank.runtime.protocol.grammar import Vocabulary, allowed_tokens
from tilerank.runtime.protocol.prompt import Prompt
from tilerank.runtime.protocol.rank_messages import Step
from tilerank.runtime.server.link.engine_loop import serve_connections
from tilerank.runtime.server.link.messages import Submit

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
def engine() -> Engine:
    return single_engine(DEMO, dtype=torch.float32, context_length=256, max_total_tokens=512)


def events(engine: Engine, *asked: dict[str, Any]) -> list[list[Event]]:
    """Run all requests together and return the events of each."""
    numbers = [engine.submit(Request(Prompt(PROMPT), SamplingParams(**params))) for params in asked]
    found: dict[int, list[Event]] = {number: [] for number in numbers}
    while engine.busy:
        for event in engine.step():
            found[event.request].append(event)
    return [found[number] for number in numbers]


def tokens(some: Iterable[Event]) -> list[TokenEvent]:
    return [event for event in some if isinstance(event, TokenEvent)]


def text(some: Iterable[Event]) -> str:
    return TOKENIZER.decode([event.token_id for event in tokens(some)])


def test_takes_the_likeliest_token_that_the_language_has(engine: Engine) -> None:
    """By hand: at a branch, the token with the highest logit among those that continue a word of the language.

    Where only one continuation exists, the tokens are those of the tokenizer.
    """
    pieces = {id: TOKENIZER.decode([id]) for id in range(TOKENIZER.num_tokens)}
    (found,) = events(engine, {"grammar": CHOICE})
    branches = 0
    generated = tokens(found)
    for at, event in enumerate(generated):
        before = [event.token_id for event in generated[:at]]
        said = TOKENIZER.decode(before)
        words = [word for word in LANGUAGE if word.startswith(said)]
        may = [id for id, piece in pieces.items() if piece and any(word.startswith(said + piece) for word in words)]
        if not all(word.startswith(said + pieces[event.token_id]) for word in words):
            branches += 1
            logits = engine.score(Prompt(PROMPT + before))[-1]
            assert event.token_id == max(may, key=lambda id: float(logits[id]))
        assert event.token_id in may
    assert branches > 0
    assert text(found) in LANGUAGE
    assert [event.finish_reason for event in generated] == [None] * len(generated)
    assert found == [*generated, EndedEvent(generated[0].request)]


def test_special_tokens_named_outside_the_tokenizer_are_no_text(tmp_path: Path) -> None:
    (moses, *_) = TOKENIZER.encode("Moses", add_special_tokens=False)
    model = demo_copy(tmp_path / "model")
    for special, may in (([], True), ([TOKENIZER.token(moses)], False)):
        config = json.loads((DEMO / "tokenizer_config.json").read_text()) | {"extra_special_tokens": special}
        (model / "tokenizer_config.json").write_text(json.dumps(config))
        allowed = allowed_tokens(Vocabulary(model).matcher(CHOICE))
        assert bool(allowed[moses // 8] >> moses % 8 & 1) == may
        assert any(allowed)


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
def test_holds_with_any_other_parameters(engine: Engine, params: dict[str, Any]) -> None:
    word, poem = events(engine, {"grammar": CHOICE, **params}, {"grammar": JSON, "max_new_tokens": 100, **params})
    assert text(word) in LANGUAGE
    value = json.loads(text(poem))
    assert set(value) == {"title", "lines"} and len(value["title"]) <= 12 and 2 <= len(value["lines"]) <= 3
    assert all(type(line) is int and 0 <= line < 100 for line in value["lines"])
    assert isinstance(word[-1], EndedEvent) and isinstance(poem[-1], EndedEvent)


def test_log_probabilities_are_those_of_the_free_text(engine: Engine) -> None:
    first = tokens(*events(engine, {"grammar": CHOICE, "logprobs": 3}))[0]
    expected = torch.log_softmax(engine.score(Prompt(PROMPT))[-1], -1)
    assert first.logprobs is not None
    assert first.logprobs.chosen == pytest.approx(float(expected[first.token_id]), abs=1e-4)
    assert [id for id, _ in first.logprobs.top] == expected.topk(3).indices.tolist()


def test_others_of_the_batch_get_the_same_bits(engine: Engine) -> None:
    free: list[dict[str, Any]] = [
        {"max_new_tokens": 30, "logprobs": 2},
        {"max_new_tokens": 20, "temperature": 1.0, "seed": 7, "logprobs": 1},
    ]

    def values(some: list[Event]) -> list[object]:
        return [(event.token_id, event.logprobs) for event in tokens(some)]

    alone = [values(events(engine, one)[0]) for one in free]
    constrained: dict[str, Any] = {"grammar": JSON, "max_new_tokens": 100}
    first, _, second, poem = events(engine, free[0], {"grammar": CHOICE, "temperature": 1.0}, free[1], constrained)
    assert [values(first), values(second)] == alone
    assert values(poem) == values(events(engine, constrained)[0])


def test_survives_preemption(engine: Engine) -> None:
    """Preempted sequences keep their place in the grammar."""
    long = {"grammar": "start: /([a-z]{3}[0-9]){50}/", "max_new_tokens": 210}
    (alone,) = events(engine, long)
    assert len(alone) > 90
    found = events(engine, long, long, long, long)
    assert engine.state().preemptions > 0
    assert [text(one) for one in found] == [text(alone)] * 4


def test_other_requests_do_not_wait_for_a_grammar(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither while it is compiled nor while its masks are computed."""
    for slow in (Vocabulary.matcher, grammar_masks.GrammarMasks.compute_state):
        may_go_on = threading.Event()

        def waits(*args: Any, slow: Any = slow, gate: threading.Event = may_go_on) -> Any:
            assert gate.wait(110)
            return slow(*args)

        owner = Vocabulary if slow is Vocabulary.matcher else grammar_masks.GrammarMasks
        grammar = f"start: /{'|'.join(LANGUAGE)}|{'@' * (1 + (owner is Vocabulary))}/"
        with monkeypatch.context() as patch:
            patch.setattr(owner, slow.__name__, waits)
            constrained = engine.submit(Request(Prompt(PROMPT), SamplingParams(grammar=grammar)))
            free = engine.submit(Request(Prompt(PROMPT), SamplingParams(max_new_tokens=20, ignore_eos=True)))
            found = [event for _ in range(25) for event in engine.step()]
            assert [event.request for event in found] == [free] * 20
            may_go_on.set()
            while engine.busy:
                found += engine.step()
        words = [event for event in found if event.request == constrained]
        assert text(words) in LANGUAGE and isinstance(words[-1], EndedEvent)


def test_a_rank_is_lost_while_a_constrained_answer_ends(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The failure of the step is raised, although the answer ended before it."""
    compute, most = engine.worker.run, 0

    def lost_with_the_first_answer(step: Step) -> torch.Tensor:
        nonlocal most
        most = max(most, engine.state().running)
        if engine.state().running < most:
            raise GroupError("rank 1 is gone")
        return compute(step)

    monkeypatch.setattr(engine.worker, "run", lost_with_the_first_answer)
    constrained = Submit(7, Prompt(PROMPT), SamplingParams(grammar=CHOICE), [0])
    free = Submit(8, Prompt(PROMPT), SamplingParams(max_new_tokens=200, ignore_eos=True), [0])
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.sendall(encode(constrained) + encode(free))
        with pytest.raises(GroupError, match="rank 1 is gone"):
            serve_connections(engine, [ours], [])


def end_of(engine: Engine, grammar: str) -> list[Event]:
    """Return the events of a request with this grammar, next to one without a grammar, which has to complete."""
    constrained = engine.submit(Request(Prompt(PROMPT), SamplingParams(grammar=grammar)))
    free = engine.submit(Request(Prompt(PROMPT), SamplingParams(max_new_tokens=8, ignore_eos=True)))
    found: list[Event] = []
    while engine.busy:
        found += engine.step()
    assert sum(event.request == free for event in found) == 8
    assert engine.state().cache_used == 0
    return [event for event in found if event.request == constrained]


def test_a_grammar_that_fails_ends_its_own_request_alone(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    for grammar, says in (
        ("start: /(/", "unclosed group"),
        ("start: missing", "missing"),
        ('start: %json {"type": "string", "pattern": "(?=a)b"}', "look-around"),
        ("start: /x{1000000}/", "too many expressions"),  # after the first token
    ):
        *_, failed = end_of(engine, grammar)
        assert isinstance(failed, FailedEvent) and says in failed.sentence and "\n" not in failed.sentence
    with pytest.raises(RequestError, match=r"request 0: the grammar: .*unclosed group"):
        list(engine.generate([Request(Prompt(PROMPT), SamplingParams(grammar="start: /(/"))]))

    with monkeypatch.context() as patch:
        patch.setattr(grammar_masks, "BASE_BUDGET_S", -1e9)  # every mask takes longer
        *before, failed = end_of(engine, CHOICE)
        assert len(before) == 1
        assert isinstance(failed, FailedEvent) and "takes too long" in failed.sentence

    class PanicException(BaseException):
        """Stands for the exception of the library's Rust code, which is not a subclass of Exception."""

    def panics(*_: object) -> None:
        raise PanicException("index out of bounds: the len is 3")

    monkeypatch.setattr(grammar_masks.GrammarMasks, "compute_state", panics)
    (failed,) = end_of(engine, "start: /another/")
    assert isinstance(failed, FailedEvent) and "see the server's log" in failed.sentence


def test_a_complete_grammar_without_an_end_token(tmp_path: Path) -> None:
    """Answers of a model without end-of-sequence tokens end with their grammar."""
    model = demo_copy(tmp_path / "model")
    for name in ("config.json", "generation_config.json"):
        values = {key: value for key, value in json.loads((DEMO / name).read_text()).items() if "eos" not in key}
        (model / name).write_text(json.dumps(values))
    engine = single_engine(model, dtype=torch.float32)
    (found,) = events(engine, {"grammar": "start: /[0-9]{4}/"})
    assert len(text(found)) == 4 and isinstance(found[-1], EndedEvent)
