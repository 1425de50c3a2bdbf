"""The sources of drafts, by their name in --speculative."""

import logging
from collections.abc import Callable, Mapping

from ...protocol.speculative import Speculative
from ...rank.worker import Worker
from .drafts import DraftSource
from .head_drafts import HeadDrafts
from .model_drafts import ModelDrafts
from .ngrams import NgramDrafts

log = logging.getLogger(__name__)

_SOURCES: Mapping[Speculative, tuple[Callable[[Worker], DraftSource], str]] = {
    "auto": (lambda _: NgramDrafts(), "tokens that texts repeat"),
    "ngram": (lambda _: NgramDrafts(), "tokens that texts repeat"),
    "mtp": (HeadDrafts, "tokens of the multi-token-prediction head"),
    "draft": (ModelDrafts, "tokens of the draft model"),
}


def draft_source(speculative: Speculative, worker: Worker) -> DraftSource | None:
    """Return the source of drafts that is asked for, None for none, and log which one it is."""
    if speculative == "off":
        return None
    source, tokens = _SOURCES[speculative]
    log.info("%s are drafted where that pays", tokens)
    return source(worker)
