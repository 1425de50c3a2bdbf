"""The models whose caches are pages that each have all of a token, so that pages can leave the cache and come back."""

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
"""The contents of a cache that cannot leave it, by what the cache is counted in."""


def check_whole_pages(option: str | None, model_dir: Path, card: ModelCard, specs: Sequence[CacheSpec]) -> None:
    """Raise EngineError for a model with other caches, if there is an option that moves pages."""
    if option is None:
        return
    other = next((_OTHER_KINDS[spec.budget] for spec in specs if spec.budget in _OTHER_KINDS), None)
    if other is None and card.pooling is not None:
        other = "no token, because it generates none"
    if other is not None:
        raise EngineError(
            f"{option}: {model_dir}: expected a model of which every layer keeps all tokens of a text, found one of "
            f"type {card.model_type}, which keeps {other}"
        )
