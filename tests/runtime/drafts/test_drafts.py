"""Texts with drafts: the tokens and log-probabilities of plain decoding, in fewer steps."""

import json
from typing import Any

import pytest
import torch
from batching import DEMO, forget, single_engine
from drafting import Lengths, always_right, always_wrong, mixed, with_drafts, without_drafts

from tilerank.runtime.lead.engine import Engine, Request
from tilerank.runtime.lead.sampling import SamplingParams
from tilerank.runtime.protocol.events import Event, FailedEvent, TokenEvent
from tilerank.runtime.protocol.prompt import Prompt

PROMPTS = [
    ids[:length]
    for ids, length in zip(
        json.loads((DEMO / "eval_tokens.json").read_text())["sequences"], (40, 33, 64, 31, 5, 90), strict=False
    )
]
DIGITS = 'start: /\\{"verse": [0-9]{1,12}, "text": "[a-z ]{1,20}"\\}/'
PARAMS: list[dict[str, Any]] = [
    {"logprobs": 2},
    {"temperature": 0.9, "top_p": 0.9, "seed": 3},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2, "logprobs": 1},
    {"temperature": 1.2, "top_k": 30, "seed": 5, "frequency_penalty": 1.0, "logit_bias": {11: 3.0}},
    {"min_new_tokens": 20, "bad_words": ((17,), (5, 9)), "allowed_token_ids": tuple(range(3, 3000))},
    {"grammar": DIGITS, "temperature": 1.0, "seed": 9},
]


@pytest.fixture(scope="module")
def engine() -> Engine:
    return single_engine(DEMO, dtype=torch.float32, context_length=256, max_total_tokens=1024)


def requests(new_tokens: int = 33) -> list[Request]:
    return [
        Request(Prompt(prompt), SamplingParams(max_new_tokens=new_tokens, ignore_eos=True, **params))
        for prompt, params in zip(PROMPTS, PARAMS, strict=True)
    ]


def run(engine: Engine, some: list[Request], cancel_first_after: int = -1) -> tuple[list[list[Event]], int]:
    """Return the events of each request, and the number of steps. After so many steps, the first one is cancelled."""
    numbers = [engine.submit(request) for request in some]
    found: dict[int, list[Event]] = {number: [] for number in numbers}
    steps = 0
    while engine.busy:
        if steps == cancel_first_after:
            engine.cancel(numbers[0])
        steps += 1
        for event in engine.step():
            found[event.request].append(event)
    return [found[number] for number in numbers], steps


def texts(found: list[list[Event]]) -> list[list[Any]]:
    """Return what clients see: tokens, log-probabilities and finish reasons, and how a text ends without one."""
    return [
        [
            (event.token_id, event.logprobs, event.finish_reason) if isinstance(event, TokenEvent) else (type(event),)
            for event in events
        ]
        for events in found
    ]


def tokens(events: list[Event]) -> list[TokenEvent]:
    return [event for event in events if isinstance(event, TokenEvent)]


def answers(found: list[list[Event]]) -> list[list[Any]]:
    """Return texts as `with_drafts` takes them."""
    return [[[event.token_id] for event in tokens(events)] for events in found]


@pytest.fixture(scope="module")
def plain(engine: Engine) -> list[list[Event]]:
    return run(engine, requests())[0]


@pytest.mark.parametrize("lengths", [always_right, always_wrong, mixed])
def test_drafts_change_no_text(engine: Engine, plain: list[list[Event]], lengths: Lengths) -> None:
    """Greedy and sampled; with penalties, bias, filters, log-probabilities and a grammar."""
    forget(engine)
    drafted, _ = run(with_drafts(engine, requests(), answers(plain), lengths), requests())
    assert texts(drafted) == texts(plain)
    state = engine.state()
    events = [event for events in drafted for event in tokens(events)]
    assert sum(event.accepted for event in events) == state.accepted_tokens
    assert (state.accepted_tokens > 0) == (lengths is not always_wrong)
    assert (sum(event.rejected for event in events) > 0) == (lengths is not always_right)
    assert not state.cache_used


def test_right_drafts_save_steps(engine: Engine) -> None:
    """A prompt, and 32 more tokens: 16 in each of two steps."""
    some = requests()[:1]
    forget(engine)
    found, steps = run(without_drafts(engine), some)
    assert steps == 33
    forget(engine)
    drafted, steps = run(with_drafts(engine, some, answers(found), always_right), some)
    assert texts(drafted) == texts(found) and steps == 3
    assert engine.state().drafted_tokens == engine.state().accepted_tokens == 30
    assert [event.accepted for event in tokens(drafted[0])] == [False] + 2 * ([True] * 15 + [False])


def test_nothing_follows_an_end_that_was_drafted(engine: Engine) -> None:
    some = requests()[:2]
    forget(engine)
    found, _ = run(without_drafts(engine), some)
    ends = tuple(tokens(events)[12].token_id for events in found)
    ending = [
        Request(one.prompt, SamplingParams(max_new_tokens=33, stop_token_ids=ends, **params))
        for one, params in zip(some, PARAMS, strict=False)
    ]
    forget(engine)
    plain, _ = run(engine, ending)
    forget(engine)
    drafted, _ = run(with_drafts(engine, some, answers(found), always_right), ending)
    assert texts(drafted) == texts(plain)
    assert all(events[-1].finish_reason == "stop" and len(events) <= 13 for events in map(tokens, drafted))


def test_prompts_share_the_pages_of_drafted_texts(engine: Engine, plain: list[list[Event]]) -> None:
    """A prompt that goes on with an answer finds as much of it as after plain decoding, and it is right."""
    more = [
        Request(
            Prompt([*one.prompt.token_ids, *(e.token_id for e in tokens(events)), 7, 8]),
            SamplingParams(max_new_tokens=4, ignore_eos=True, logprobs=2),
        )
        for one, events in zip(requests(), plain, strict=True)
    ]

    def hits() -> tuple[list[list[Any]], int]:
        before = engine.state().hit_tokens
        found, _ = run(engine, more)
        return texts(found), engine.state().hit_tokens - before

    forget(engine)
    run(without_drafts(engine), requests())
    wanted = hits()
    forget(engine)
    run(with_drafts(engine, requests(), answers(plain)), requests())
    assert hits() == wanted and wanted[1] > 0


def test_a_request_can_be_cancelled_between_steps_with_drafts(engine: Engine, plain: list[list[Event]]) -> None:
    forget(engine)
    kept, _ = run(with_drafts(engine, requests(), answers(plain)), requests(), cancel_first_after=4)
    assert texts(kept[1:]) == texts(plain[1:])
    assert texts(kept[:1])[0] == texts(plain[:1])[0][: len(kept[0])] and 1 < len(kept[0]) < 33
    assert not engine.state().cache_used


def test_a_row_that_overflows_fails_its_request_alone(
    engine: Engine, plain: list[list[Event]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN in the row after an accepted draft."""
    forget(engine)
    with_drafts(engine, requests(), answers(plain), always_right)
    run_step = engine.worker.run

    def poisoned(step: Any) -> torch.Tensor:
        logits = run_step(step)
        if len(step.chunks) == 2 and step.chunks[0].drafts:
            logits[2] = torch.nan
        return logits

    monkeypatch.setattr(engine.worker, "run", poisoned)
    some = requests()
    found, _ = run(engine, some[:2])
    assert isinstance(found[0][-1], FailedEvent)
    assert texts(found[:1])[0][:3] == texts(plain[:1])[0][:3] and len(found[0]) == 4
    assert texts(found[1:]) == texts(plain[1:2])
