"""The families as launching and serving see them: files of this folder with a table FAMILIES.

FAMILIES maps a `model_type` of config.json to a record `Family`. A family without an entry has the default one.
"""

import importlib
import pkgutil
from functools import cache
from pathlib import Path

from tilerank.loader.card import ModelCard, read_config_fields
from tilerank.loader.tokenizer import Tokenizer

from .family import Family, FamilyOption, FamilyOptions
from .processor import Processor
from .task import TASK


def family_of(model_type: str) -> Family:
    return _families().get(model_type, Family())


def load_processor(model_dir: Path, tokenizer: Tokenizer) -> Processor | None:
    """Return the processor of a model directory; None if it takes text only. Raises ConfigError."""
    build = family_of(read_config_fields(model_dir).text("model_type")).processor
    return build(model_dir, tokenizer) if build else None


def check_pairs(card: ModelCard) -> None:
    """Raise ConfigError for a reranker of a family without a PairTemplate."""
    if card.pooling is not None and card.pooling.task == "rerank" and family_of(card.model_type).pairs is None:
        families = ", ".join(name for name, family in _families().items() if family.pairs is not None)
        raise card.fields.fail("model_type", f"one of {families} (other families have no form of a pair of texts)")


def all_options() -> list[FamilyOption]:
    """Return the options that change the card of a model: --task, and those of all families."""
    return [TASK, *family_options()]


def family_options() -> list[FamilyOption]:
    """Return the options of all families."""
    return list({option.name: option for family in _families().values() for option in family.options}.values())


def with_options(card: ModelCard, options: FamilyOptions) -> ModelCard:
    """Return the card of the same model with these options. Raises ConfigError for an option of another family."""
    for option in all_options():
        if option.name in options:
            card = option.apply(card, options[option.name])
    return card


@cache
def _families() -> dict[str, Family]:
    found: dict[str, Family] = {}
    for info in pkgutil.iter_modules([str(Path(__file__).parent)]):
        module = importlib.import_module(f"{__package__}.{info.name}")
        found |= getattr(module, "FAMILIES", {})
    return found
