"""The sources of drafts, by their name in --speculative."""

import logging
from collections.abc import Callable, Mapping

from ..protocol.speculative import Speculative
from ..rank.worker import Worker
from .drafts import DraftSource
from .ngrams import NgramDrafts

log = logging.getLogger(__name__)

_SOURCES: Mapping[Speculative, Callable[[], DraftSource]] = {"auto": NgramDrafts, "ngram": NgramDrafts}


def draft_source(speculative: Speculative, worker: Worker) -> DraftSource | None:
    """Return the source of drafts that is asked for, None for none, and log which one it is."""
    if speculative == "off" or worker.card.pooling is not None:
        return None
    log.info("tokens that texts repeat are drafted where that pays")
    return _SOURCES[speculative]()
