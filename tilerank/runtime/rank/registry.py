"""The model families: every file of `models/` that runs checkpoints has a table MODELS.

MODELS maps a `model_type` of config.json to a function (card, sharding) -> model.
"""

import importlib
import pkgutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

from tilerank.loader.card import ModelCard, read_card, read_config_fields
from tilerank.parallel.sharding import Sharding

from .. import models
from ..media.family import NO_OPTIONS, FamilyOptions
from ..media.missing import missing_for
from ..media.registry import with_options
from ..step.model import Model

Builder = Callable[[ModelCard, Sharding], Model]


def build_model(card: ModelCard, sharding: Sharding) -> Model:
    """Build the model of a card; nothing is allocated. Raises ConfigError or ShardError."""
    model = _builders()[card.model_type](card, sharding)
    if card.draft_head and model.draft_head is None:
        raise card.fields.fail("model_type", "a family with multi-token-prediction heads for --speculative mtp")
    return model


def read_supported_card(model_dir: Path, options: FamilyOptions = NO_OPTIONS) -> ModelCard:
    """Read the card of a checkpoint. ConfigError names an unknown family before any field that it spells otherwise.

    options: of its family.
    """
    fields = read_config_fields(model_dir)
    if (model_type := fields.text("model_type")) not in _builders():
        raise fields.fail("model_type", f"one of {', '.join(sorted(_builders()))}{missing_for(model_type)}")
    return with_options(read_card(model_dir), options)


@cache
def _builders() -> dict[str, Builder]:
    found: dict[str, Builder] = {}
    for info in pkgutil.iter_modules(models.__path__):
        module = importlib.import_module(f"{models.__name__}.{info.name}")
        found |= getattr(module, "MODELS", {})
    return found
