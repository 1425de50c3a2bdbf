"""Rules for logits that are kept up token by token, against a formula that reads all lists and tokens in every step."""

import math
import random
import socket
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from batching import DEMO, single_engine

from tilerank.parallel.errors import GroupError
from tilerank.runtime.lead.engine import Engine, Request
from tilerank.runtime.lead.logits_rules import LogitsRules, TextRules, as_bits, edit_logits
from tilerank.runtime.lead.sampling import Row, choose, uniform
from tilerank.runtime.protocol.errors import RequestError
from tilerank.runtime.protocol.events import Event
from tilerank.runtime.protocol.framing import encode
from tilerank.runtime.protocol.params import SamplingParams
from tilerank.runtime.protocol.prompt import Prompt
from tilerank.runtime.server.link.engine_loop import serve_connections
from tilerank.runtime.server.link.messages import Submit

VOCAB = 40
ENDS = frozenset({1, 2, 57})  # a tokenizer may have more tokens than the model


def expected(logits: torch.Tensor, p: SamplingParams, prompt: list[int], text: list[int]) -> torch.Tensor:
    """The logits of every token in turn."""
    allowed = set(p.allowed_token_ids or range(VOCAB))
    banned = {
        word[-1]
        for word in p.bad_words
        if len(word) - 1 <= len(text) and tuple(text[len(text) - len(word) + 1 :]) == word[:-1]
    }
    if len(text) < p.min_new_tokens:
        banned |= ENDS
    if all(logits[id] == -math.inf for id in allowed - banned):
        banned = set()
    counts, seen = Counter(text), {*prompt, *text}
    values = torch.full_like(logits, -math.inf)
    for id in sorted(allowed - banned):
        value = logits[id] + torch.tensor(p.logit_bias[id]) if id in p.logit_bias else logits[id]
        if id in seen and p.repetition_penalty != 1:
            value = value / p.repetition_penalty if value > 0 else value * p.repetition_penalty
        if counts[id]:
            value = value - torch.tensor(p.presence_penalty + p.frequency_penalty * counts[id])
        values[id] = value
    return values


def edited(rules: TextRules, logits: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    values = logits.clone()
    edit_logits(values[None], [rules.edits(tokens, None)])
    return values


CASES: dict[str, dict[str, Any]] = {
    "allowed": {"allowed_token_ids": (7, 8, 7, 9, 31) * 3},
    "bias": {"logit_bias": {3: -100.0, 39: 2.5, 0: 0.1}},
    "repetition": {"repetition_penalty": 1.3},
    "less than one": {"repetition_penalty": 0.7},
    "presence": {"presence_penalty": 0.3},
    "frequency": {"frequency_penalty": 0.1},
    "bad words": {"bad_words": ((5,), (5, 6), (6, 5, 4), (4, 4), (4, 4, 4, 3), (3, 5, 6, 7))},
    "ends": {"min_new_tokens": 9},
    "bad words that are all": {"bad_words": tuple((id,) for id in range(VOCAB))},
    "all": {
        "allowed_token_ids": tuple(range(1, 12)),
        "logit_bias": {3: 1.5, 4: -2.0, 30: 5.0},
        "repetition_penalty": 1.2,
        "presence_penalty": -0.4,
        "frequency_penalty": 0.15,
        "bad_words": ((9,), (3, 4), (4, 3, 3)),
        "min_new_tokens": 5,
    },
}


@pytest.mark.parametrize("given", CASES.values(), ids=CASES)
def test_each_step_is_that_of_the_formula(given: dict[str, Any]) -> None:
    """Two choices share the rules of their request, and grow differently."""
    params = SamplingParams(**given)
    rng, generator = random.Random(1), torch.Generator().manual_seed(2)
    prompt = [3, 7, 3, 38, 4000]  # the last one is a placeholder
    request = LogitsRules(params, ENDS, VOCAB)
    texts = [list[int](), list[int]()]
    rules = [TextRules(request, prompt) for _ in texts]
    for step in range(150):
        text, own = texts[step % 3 % 2], rules[step % 3 % 2]
        logits = torch.randn(VOCAB, generator=generator) * 3
        assert torch.equal(edited(own, logits, prompt + text), expected(logits, params, prompt, text))
        text.append(rng.choice((3, 4, 4, 5, 6, rng.randrange(VOCAB))))


def test_a_text_that_was_long_before_the_first_step() -> None:
    params = SamplingParams(**CASES["all"])
    text = [random.Random(3).randrange(VOCAB) for _ in range(300)]
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(4))
    values = edited(TextRules(LogitsRules(params, ENDS, VOCAB), [3]), logits, [3, *text])
    assert torch.equal(values, expected(logits, params, [3], text))


def drawn(values: torch.Tensor, p: SamplingParams, number: float) -> tuple[int, bool]:
    """The token that `number` draws from logits, and whether no decision was so close that roundings count."""
    if p.temperature == 0:
        return int(values.argmax()), True
    probabilities, order = (values.double() / p.temperature).softmax(-1).sort(descending=True, stable=True)
    margins = [(probabilities / probabilities[0] - p.min_p).abs().min()] if p.min_p else []
    probabilities = probabilities[(probabilities > 0) & (probabilities >= p.min_p * probabilities[0])]
    if p.top_k:
        probabilities = probabilities[probabilities >= probabilities[min(p.top_k, len(probabilities)) - 1]]
    if p.top_p < 1:
        before = probabilities.cumsum(0) - probabilities - p.top_p * probabilities.sum()
        margins.append(before[1:].abs().amin() if len(before) > 1 else torch.tensor(1.0))  # the first always stays
        probabilities = probabilities[: max(int((before < 0).sum()), 1)]
    cumulative = probabilities.cumsum(0) / probabilities.sum()
    margins.append((cumulative - number).abs().min())
    return int(order[int((cumulative[:-1] <= number).sum())]), float(min(margins)) > 1e-5


def some_params(rng: random.Random) -> SamplingParams:
    given = dict(rng.choice(list(CASES.values()))) | rng.choice(list(CASES.values()))
    return SamplingParams(
        temperature=rng.choice((0.0, 0.3, 1.0, 2.5)),
        top_k=rng.choice((0, 0, 1, 5, 60)),
        top_p=rng.choice((1.0, 1.0, 0.9, 0.5, 0.0)),
        min_p=rng.choice((0.0, 0.0, 0.02, 0.3)),
        logprobs=rng.choice((0, 0, 1, 4, 60)),
        seed=rng.randrange(1 << 64),
        **given,
    )


def test_choices_follow_the_formula_with_all_parameters_together() -> None:
    """Batches of rows with parameters, grammars and texts of their own, some of them broken, against torch."""
    rng, generator = random.Random(5), torch.Generator().manual_seed(6)
    certain = total = 0
    for _ in range(150):
        params = [some_params(rng) for _ in range(rng.randrange(1, 6))]
        prompts = [rng.choices(range(VOCAB), k=rng.randrange(1, 9)) for _ in params]
        texts = [rng.choices(range(3, 9), k=rng.randrange(12)) for _ in params]
        logits = torch.randn(len(params), VOCAB, generator=generator) * 3
        logits[rng.randrange(8) :, 7] = math.nan
        grammars = [torch.rand(VOCAB, generator=generator) < rng.choice((0.5, 1.1)) for _ in params]
        for grammar, p in zip(grammars, params, strict=True):
            grammar[list(p.allowed_token_ids or (0,))[:3]] = True
        rows = [
            Row(p, prompt + text, TextRules(LogitsRules(p, ENDS, VOCAB), prompt), as_bits(grammar.numpy()))
            for p, prompt, text, grammar in zip(params, prompts, texts, grammars, strict=True)
        ]
        found = choose(logits.clone(), rows)
        for i, (choice, p, raw) in enumerate(zip(found, params, logits, strict=True)):
            values = expected(raw.masked_fill(~grammars[i], -math.inf), p, prompts[i], texts[i])
            if values.isnan().any() or (p.logprobs and raw.isnan().any()):
                assert choice is None
                continue
            token, clear = drawn(values, p, uniform(p.seed, len(rows[i].tokens)))
            total, certain = total + 1, certain + clear
            assert choice is not None and (not clear or choice.token_id == token)
            scores = raw.double().log_softmax(-1)
            if not p.logprobs:
                assert choice.logprobs is None
                continue
            assert choice.logprobs is not None
            assert choice.logprobs.chosen == pytest.approx(float(scores[choice.token_id]), rel=1e-7)
            assert choice.logprobs.rank == int((scores >= scores[choice.token_id]).sum())
            top = scores.topk(min(p.logprobs, VOCAB))
            assert [id for id, _ in choice.logprobs.top] == top.indices.tolist()
            assert [value for _, value in choice.logprobs.top] == pytest.approx(top.values.tolist(), rel=1e-7)
    assert certain > 0.9 * total > 200


class Counted(tuple[int, ...]):
    """Ids that count how often all of them are read."""

    reads = 0

    def __iter__(self) -> Iterator[int]:
        Counted.reads += 1
        return super().__iter__()


def test_no_step_reads_the_ids_that_a_client_allows() -> None:
    """Neither do further choices of the request."""
    params = SamplingParams(allowed_token_ids=Counted((7, 8, 9, 10) * 1000))
    request = LogitsRules(params, frozenset(), VOCAB)
    Counted.reads = 0
    for _ in range(3):
        rules = TextRules(request, [1])
        for text in ([], [7], [7, 8]):
            edited(rules, torch.zeros(VOCAB), [1, *text])
    assert Counted.reads == 0


def test_the_choices_of_a_request_share_their_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 looks at the ids once for a request. Ids that do not exist fail every choice."""
    engine = single_engine(DEMO, dtype=torch.float32, max_total_tokens=2048)
    made: list[tuple[int, ...]] = []
    submitted: list[Request] = []

    def rules(params: SamplingParams) -> LogitsRules:
        made.append(params.allowed_token_ids)
        return Engine.rules(engine, params)

    def submit(request: Request) -> int:
        submitted.append(request)
        return Engine.submit(engine, request)

    def step() -> list[Event]:
        raise GroupError("enough")

    for name, function in (("rules", rules), ("submit", submit), ("step", step)):
        monkeypatch.setattr(engine, name, function)
    allowed, unknown = (SamplingParams(allowed_token_ids=ids) for ids in ((40, 41, 40), (40, 1 << 20)))
    ours, theirs = socket.socketpair()
    with theirs:
        for submission in (Submit(0, Prompt([5]), unknown, [4, 5]), Submit(2, Prompt([5]), allowed, [1, 2, 3])):
            theirs.sendall(encode(submission))
        with pytest.raises(GroupError, match="enough"):
            serve_connections(engine, [ours], [])
    assert made == [unknown.allowed_token_ids, allowed.allowed_token_ids]
    assert len({id(request.rules) for request in submitted}) == 1 and len(submitted) == 3
    assert [request.params.seed for request in submitted] == [1, 2, 3]


def test_ids_that_do_not_exist_are_named() -> None:
    engine = single_engine(DEMO, dtype=torch.float32, max_total_tokens=2048)
    top = engine.card.vocab_size - 1
    for name, params in (
        ("allowed_token_ids", SamplingParams(allowed_token_ids=(40, top + 1))),
        ("stop_token_ids", SamplingParams(stop_token_ids=(top + 1,))),
        ("logit_bias", SamplingParams(logit_bias={top + 1: 1.0})),
        ("bad_words", SamplingParams(bad_words=((3,), (4, top + 1)))),
    ):
        with pytest.raises(RequestError, match=f"{name}: expected token ids from 0 to {top}, found {top + 1}"):
            engine.submit(Request(Prompt([5]), params))
