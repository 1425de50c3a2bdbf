"""Drafts in the plan: what is drafted, and the weights of a draft model and what it keeps of every token."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_sysfs import SNC3, Machine
from model_configs import write_config
from planning import DEMO, config_of, plan_on

from tilerank.launch.options.model import ModelOptions
from tilerank.launch.planning.plan import model_bytes
from tilerank.launch.planning.plan_text import as_json, render
from tilerank.launch.planning.plan_types import Plan
from tilerank.launch.text import size
from tilerank.loader.card import ModelCard, read_card
from tilerank.loader.errors import ConfigError
from tilerank.loader.pooling import Pooling

TP = 3


@pytest.fixture
def card(tmp_path: Path) -> ModelCard:
    return config_of(tmp_path)


def test_a_draft_model_takes_memory(tmp_path: Path, card: ModelCard) -> None:
    """The cache that fits is smaller, as each of its tokens takes more, and as there is less room for them."""

    def planned(card: ModelCard, draft_model: Path | None = None) -> Plan:
        speculative = "draft" if draft_model else "off"
        options: dict[str, Any] = {"cached_tokens": None, "speculative": speculative, "draft_model": draft_model}
        return plan_on(Machine(SNC3), tmp_path, card, TP, **options)

    alone, both = planned(card), planned(card, DEMO)
    drafts = planned(read_card(DEMO))
    for one, other, together in zip(alone.ranks, drafts.ranks, both.ranks, strict=True):
        # Tables of positions end with the context, which the model has more of.
        assert together.draft_model == other.weights and together.weights == one.weights + other.weights
        assert together.cache_per_token == one.cache_per_token + other.cache_per_token
    assert both.bits_per_weight == alone.bits_per_weight and both.parameters == alone.parameters
    assert both.cached_tokens < alone.cached_tokens * alone.memory.cache_per_token / both.memory.cache_per_token
    weights = size(drafts.memory.weights)
    assert f"Drafts: tokens of the draft model, which is {weights} of the weights." in render(both)


@pytest.mark.parametrize(
    ("asked", "pooling", "drafts", "text"),
    [
        ("off", None, "off", "Drafts: none."),
        ("auto", None, "ngram", "Drafts: tokens that texts repeat."),
        ("auto", Pooling("embed"), "off", "Drafts: none."),
    ],
)
def test_the_plan_says_what_is_drafted(
    tmp_path: Path, card: ModelCard, asked: str, pooling: Pooling | None, drafts: str, text: str
) -> None:
    plan = plan_on(Machine(SNC3), tmp_path, replace(card, pooling=pooling), TP, speculative=asked)
    assert as_json(plan)["speculative"] == drafts and text in render(plan)


def test_replicas_hold_a_draft_model_each(card: ModelCard) -> None:
    alone, drafts = (model_bytes(one, ModelOptions()) for one in (card, read_card(DEMO)))
    both = model_bytes(card, ModelOptions(speculative="draft", draft_model=DEMO))
    assert both.weights == alone.weights + drafts.weights and both.token == alone.token


def test_a_quantised_draft_model_of_a_model_in_float32(tmp_path: Path, card: ModelCard) -> None:
    method = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    (tmp_path / "draft").mkdir()
    draft_model = write_config(tmp_path / "draft", method, dict(card.fields.values))
    options: dict[str, Any] = {"dtype": "float32", "speculative": "draft", "draft_model": draft_model}
    with pytest.raises(ConfigError, match="dtype: expected bfloat16 with quantised weights, found float32"):
        plan_on(Machine(SNC3), tmp_path, card, TP, **options)
