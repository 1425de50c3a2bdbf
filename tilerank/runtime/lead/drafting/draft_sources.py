"""The sources of drafts, by their name in --speculative."""

import logging
from collections.abc import Callable, Mapping

from tilerank.loader.pooling import DOES

from ...protocol.speculative import DRAFTS, Speculative
from ...rank.worker import Worker
from .drafts import DraftSource
from .head_drafts import HeadDrafts
from .model_drafts import ModelDrafts
from .ngrams import NgramDrafts

log = logging.getLogger(__name__)

SOURCES: Mapping[Speculative, Callable[[Worker], DraftSource | None]] = {
    "off": lambda _: None,
    "ngram": lambda _: NgramDrafts(),
    "mtp": HeadDrafts,
    "draft": ModelDrafts,
}


def draft_source(speculative: Speculative, worker: Worker) -> DraftSource | None:
    """Return the source of drafts with this name, None for none, and log which one it is."""
    if speculative == "off":
        pooling = worker.card.pooling
        log.info("no tokens are drafted%s", "" if pooling is None else f": the model {DOES[pooling.task]}")
    else:
        log.info("%s are drafted where that pays", DRAFTS[speculative])
    return SOURCES[speculative](worker)
