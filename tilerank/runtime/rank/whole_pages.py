"""The models whose caches are pages and states that can leave the memory of the ranks and come back."""

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
"""The contents of a cache beside pages that have all of a token, by what the cache is counted in."""
_ALSO_MOVED: dict[str, dict[Budget, str]] = {
    "--kv-dir": {},
    "--prefill-nodes": {Budget.WINDOW_TOKENS: "a window of them", Budget.STATES: "states"},
}
"""Which of these an option moves as well, by option."""


def check_whole_pages(option: str | None, model_dir: Path, card: ModelCard, specs: Sequence[CacheSpec]) -> None:
    """Raise EngineError for a model with other caches, if there is an option that moves pages."""
    if option is None:
        return
    budgets = {spec.budget for spec in specs}
    moved = _ALSO_MOVED[option]
    other = next((text for budget, text in _OTHER_KINDS.items() if budget not in moved and budget in budgets), None)
    if other is None and card.pooling is not None:
        other = "no token, because it generates none"
    if other is not None:
        kept = " or ".join(["all tokens of a text", *moved.values()])
        raise EngineError(
            f"{option}: {model_dir}: expected a model of which every layer keeps {kept}, found one of type "
            f"{card.model_type}, which keeps {other}"
        )
