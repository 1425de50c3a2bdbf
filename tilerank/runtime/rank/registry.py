"""The model families: every file of `models/` that runs checkpoints has a table MODELS.

MODELS maps a `model_type` of config.json to a function (card, sharding) -> model.
"""

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

from tilerank.loader.card import ModelCard, read_card, read_config_fields
from tilerank.loader.errors import ConfigError
from tilerank.loader.pooling import DOES
from tilerank.parallel.sharding import Sharding

from .. import models
from ..media.family import NO_OPTIONS, FamilyOptions
from ..media.missing import missing_for
from ..media.registry import with_options
from ..step.cache import Budget
from ..step.model import Model

Builder = Callable[[ModelCard, Sharding], Model]


def build_model(card: ModelCard, sharding: Sharding) -> Model:
    """Build the model of a card; nothing is allocated. Raises ConfigError or ShardError."""
    model = _builders()[card.model_type](card, sharding)
    if card.draft_head and model.draft_head is None:
        raise card.fields.fail("model_type", "a family with multi-token-prediction heads for --speculative mtp")
    return model


def build_draft_model(card: ModelCard, sharding: Sharding) -> Model:
    """Build the model of a card of `read_draft_card`. Raises as `build_model` does, and for a model that keeps anything
    else of a text than entries of all its tokens, for which there are the pages of the model that it drafts for."""
    model = build_model(card, sharding)
    if model.encoder is not None or any(spec.budget is not Budget.TOKENS for spec in model.cache_specs()):
        raise card.fields.fail(
            "model_type", "a family whose models can draft: they read text alone, and all layers keep all tokens"
        )
    return model


def read_supported_card(model_dir: Path, options: FamilyOptions = NO_OPTIONS) -> ModelCard:
    """Read the card of a checkpoint. ConfigError names an unknown family before any field that it spells otherwise.

    options: of its family.
    """
    fields = read_config_fields(model_dir)
    if (model_type := fields.text("model_type")) not in _builders():
        raise fields.fail("model_type", f"one of {', '.join(sorted(_builders()))}{missing_for(model_type)}")
    return with_options(read_card(model_dir), options)


def read_draft_card(model_dir: Path, context_length: int) -> ModelCard:
    """Read the card of a checkpoint that drafts for a model of this context length. Raises as `read_supported_card`
    does, and for a model that generates no text."""
    card = read_supported_card(model_dir)
    if card.pooling is not None:
        raise ConfigError(
            f"{model_dir}: expected a model that generates text, to draft with it, found one that "
            f"{DOES[card.pooling.task]}"
        )
    return replace(card, context_length=min(card.context_length, context_length))


@cache
def _builders() -> dict[str, Builder]:
    found: dict[str, Builder] = {}
    for info in pkgutil.iter_modules(models.__path__):
        module = importlib.import_module(f"{models.__name__}.{info.name}")
        found |= getattr(module, "MODELS", {})
    return found
