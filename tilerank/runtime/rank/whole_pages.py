"""The models whose caches an option can move out of the memory of the ranks and back."""

from collections.abc import Sequence
from pathlib import Path

from tilerank.loader.card import ModelCard

from ..protocol.errors import EngineError
from ..step.cache import Budget, CacheSpec

_OTHER_KINDS = {
    Budget.WINDOW_TOKENS: "a window of the tokens in some layers",
    Budget.SOURCE_TOKENS: "keys and values of encodings in some layers",
    Budget.STATES: "states in some layers",
}
"""The contents of a cache beside pages that each have all of a token, by what the cache is counted in."""


def check_generates(option: str, model_dir: Path, card: ModelCard) -> None:
    """Raise EngineError for a model that generates no text, of whose prompts nothing is used again."""
    if card.pooling is not None:
        raise EngineError(
            f"{option}: {model_dir}: expected a model that generates text, found one of type {card.model_type}, which "
            "generates none"
        )


def check_whole_pages(option: str, model_dir: Path, card: ModelCard, specs: Sequence[CacheSpec]) -> None:
    """Raise EngineError for a model with other caches than pages that each have all of a token, and as
    `check_generates`."""
    check_generates(option, model_dir, card)
    budgets = {spec.budget for spec in specs}
    for budget, kept in _OTHER_KINDS.items():
        if budget in budgets:
            raise EngineError(
                f"{option}: {model_dir}: expected a model of which every layer keeps all tokens of a text, found one "
                f"of type {card.model_type}, which keeps {kept}"
            )
