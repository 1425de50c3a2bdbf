"""Penalties, bias and min_p against transformers' processors and arithmetic by hand; stop tokens."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

from tilerank.runtime.lead.logits_rules import LogitsRules, TextRules, as_bits, edit_logits
from tilerank.runtime.lead.sampling import Row, SampledToken, SamplingParams, choose
from tilerank.runtime.protocol.errors import RequestError

VOCAB = 50
TOKENS = [3, 4, 3, 9, 4, 4, 30]  # the first three are the prompt


def rules_of(params: SamplingParams, prompt_len: int = 3) -> TextRules:
    return TextRules(LogitsRules(params, frozenset(), VOCAB), TOKENS[:prompt_len])


def reshaped(logits: torch.Tensor, **params: Any) -> torch.Tensor:
    values = logits.clone()
    edit_logits(values[None], [rules_of(SamplingParams(**params)).edits(TOKENS, None)])
    return values


def chosen_of(logits: torch.Tensor, rows: list[Row]) -> list[SampledToken]:
    """Return the choice of each row, which all have one."""
    found = [choice for choice in choose(logits, rows) if choice is not None]
    assert len(found) == len(rows)
    return found


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(0)) * 4


@pytest.mark.parametrize("penalty", [0.5, 1.3])
def test_repetition_penalty_is_that_of_transformers(logits: torch.Tensor, penalty: float) -> None:
    processor = RepetitionPenaltyLogitsProcessor(penalty)
    expected = processor(torch.tensor([TOKENS]), logits[None].clone())[0]
    assert torch.equal(reshaped(logits, repetition_penalty=penalty), expected)
    assert (expected != logits).sum() == 4  # 3, 4, 9, 30: tokens of prompt and text, each once


def test_presence_and_frequency_count_the_text_alone(logits: torch.Tensor) -> None:
    found = reshaped(logits, presence_penalty=0.5, frequency_penalty=0.25)
    expected = logits.clone()
    expected[9] -= 0.75
    expected[4] -= 0.5 + 2 * 0.25
    expected[30] -= 0.75
    torch.testing.assert_close(found, expected)
    present = SamplingParams(presence_penalty=1.0)
    fresh = chosen_of(logits[None], [Row(present, TOKENS, rules_of(present, len(TOKENS)))])
    assert [choice.token_id for choice in fresh] == [int(logits.argmax())]  # no text yet


def test_bias_penalties_and_grammars_decide_together(logits: torch.Tensor) -> None:
    best, second = logits.topk(2).indices.tolist()
    params = [
        SamplingParams(),
        SamplingParams(logit_bias={best: -100.0}, logprobs=3),
        SamplingParams(logit_bias={7: 100.0}, temperature=1.0, min_p=1.0),
        SamplingParams(logit_bias={best: 100.0}, repetition_penalty=50.0, temperature=2.0, logprobs=1),
    ]
    masks = (None, None, None, as_bits(np.arange(VOCAB) == 3))
    rows = [Row(p, TOKENS, rules_of(p), allowed) for p, allowed in zip(params, masks, strict=True)]
    chosen = chosen_of(torch.stack([logits] * 4), rows)
    assert [choice.token_id for choice in chosen] == [best, second, 7, 3]
    # Log-probabilities are those of the raw logits.
    expected = torch.log_softmax(logits, -1)
    for row, id, count in ((1, second, 3), (3, 3, 1)):
        logprobs = chosen[row].logprobs
        assert logprobs is not None and logprobs.chosen == pytest.approx(float(expected[id]))
        assert [id for id, _ in logprobs.top] == expected.topk(count).indices.tolist()
    assert chosen[0].logprobs is chosen[2].logprobs is None


@pytest.mark.parametrize(
    "params",
    [
        {"min_p": 1.5},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": 1e-38},
        {"presence_penalty": math.nan},
        {"frequency_penalty": math.inf},
        {"logit_bias": {1: math.nan}},
        {"logit_bias": {1: 101.0}},
    ],
)
def test_meaningless_parameters_are_refused(params: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=f"{next(iter(params))}: expected"):
        SamplingParams(**params)
