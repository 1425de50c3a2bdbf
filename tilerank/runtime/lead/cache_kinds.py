"""The kinds of cache that a model has."""

from ..rank.worker import Worker
from .cache_kind import CacheKind, MovedKind
from .encodings import EncoderCache
from .pages import PagePool
from .sequence import Sequence
from .sources import SourcePool
from .states import StatePool
from .transfers.given_pages import GivenPages
from .transfers.stored_pages import StoredPages
from .transfers.taken_pages import TakenPages
from .window_pages import WindowPages


def cache_kinds(worker: Worker, mm_cache_bytes: int) -> list[CacheKind[Sequence]]:
    """Return the kinds of cache of a model, in the order in which they are asked at admission: states, pages of windows
    and sources before the pages, which depend on the first two, and these before what continues them elsewhere and the
    encodings of what they do not hold."""
    beside: list[MovedKind[Sequence]] = [StatePool(worker.states)] if worker.states else []
    beside += [WindowPages(worker.window_pages, worker.window)] if worker.window else []
    # The worker keeps the keys and values of cross-attention in the other half.
    encodings = EncoderCache(mm_cache_bytes // 2 if worker.source_pages else mm_cache_bytes)
    sources: list[MovedKind[Sequence]] = []
    if worker.source_pages:
        sources = [SourcePool(worker.source_pages, encodings)]
    pages = PagePool(worker.pages, beside)
    elsewhere: list[CacheKind[Sequence]] = []
    if worker.store is not None:
        elsewhere.append(StoredPages(worker, worker.store, pages, [encodings]))
    if (memory := worker.transfers) is not None and memory.gives:
        elsewhere.append(GivenPages(worker, memory, [*beside, *sources, pages]))
    elif memory is not None:
        elsewhere.append(TakenPages(worker, memory, [*beside, *sources], pages, [encodings]))
    return [*beside, *sources, pages, *elsewhere, encodings]
