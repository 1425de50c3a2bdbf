"""The interface of every kind of cache: pages, pages in files, pages of windows, states, sources and encodings, which
rank 0 gives to sequences.

The ranks hold the caches. Rank 0 alone decides what a sequence has of each, and the messages of a step say so. The
schedulers loop over the kinds of their model and name none.
"""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Sequence
from typing import ClassVar, Generic, Protocol, TypeVar

from tilerank.kernels.kv_pages import PAGE_TOKENS

from ..protocol.areas import Area
from ..protocol.engine_state import EngineState
from ..protocol.rank_messages import Chunk, Step
from ..rank.worker import Worker
from .lru_pool import PoolEntry


class PagedSequence(Protocol):
    """A sequence of tokens whose keys and values are in pages. cached: the number of its tokens that are there."""

    cached: int

    @property
    def request(self) -> int:
        """The number of its request, in order of arrival."""

    @property
    def length(self) -> int:
        """The number of its tokens."""

    @property
    def keys(self) -> Sequence[int]:
        """The keys by which its pages are shared, one number a token (prompt.py)."""

    @property
    def reusable_keys(self) -> Sequence[int]:
        """The keys of the tokens that need not be computed if the cache has them, and of one more token."""


S = TypeVar("S", contravariant=True)


class CacheKind(Generic[S]):
    """A kind of cache. Each method does nothing by default, for a kind that has no part in it.

    Admission is a transaction: every kind of a model reserves what a sequence needs, in the order of the model's list,
    and then all of them commit. If one cannot, those before it release what they have reserved.
    """

    def check_fits(self, sequence: S) -> None:
        """Raise RequestError if a sequence does not fit even alone."""

    def reserve(self, sequence: S) -> bool:
        """Hold what there is already for a sequence, and check that there is room for the rest. Returns False, and
        holds nothing, if there is none."""
        return True

    def commit(self, sequence: S) -> None:
        """Give a sequence what it has reserved."""

    def grow(self, sequence: S) -> bool:
        """Give a running sequence room for the next token. Returns False if there is none."""
        return True

    def draft_room(self, sequence: S, drafts: int) -> int:
        """Give a sequence whose next token is scheduled room for drafts of the tokens after it, as far as no other
        sequence may need the room. Returns for how many there is room, at most `drafts`."""
        return drafts

    def new_pages(self, sequence: S) -> list[int]:
        """Return the pages of the model's cache that a sequence has and the ranks have not received, and count them as
        sent."""
        return []

    def release(self, sequence: S, *, share: bool = True) -> None:
        """Take back what a sequence has. share: whether later sequences may use what it leaves."""

    def limit(self, sequence: S, tokens: int) -> int:
        """Return how many of the next `tokens` tokens of a sequence can be computed in one step now."""
        return tokens

    def work(self, sequence: S) -> "WorkInPieces | None":
        """Return what has to be computed before a running sequence can go on; None if nothing has to be."""
        return None

    def announce(self, step: Step, scheduled: list[tuple[S, Chunk]]) -> None:
        """Add to a step what the ranks need for its sequences, and what has happened since the step before it."""

    def publish(self, sequence: S) -> None:
        """Share what the computed step of a sequence has filled, and release what it does not need any more."""

    def continuable(self, sequence: S, tokens: int) -> int:
        """Return the last place, at most `tokens`, at which other ranks can continue the prompt of a sequence."""
        return tokens

    def will_share(self, running: S, waiting: S) -> bool:
        """Return whether a running sequence is about to fill what a waiting one could share, and plan that it does."""
        return True

    def shared(self, sequence: S, pages: Sequence[Hashable]) -> int:
        """Return how many of these pages, which begin with the tokens of a sequence, it can share."""
        return len(pages)

    def filled(self, sequence: S, pages: Sequence[Hashable], first: int) -> None:
        """pages[first:] have become shared pages of a sequence, whose tokens begin with all `pages`."""

    def drop(self, page: Hashable) -> None:
        """Drop what belongs to `page`, which is dropped."""

    def report(self, state: EngineState) -> None:
        """Set the fields of `state` that are about this kind."""


class MovedKind(CacheKind[S], ABC):
    """A kind of cache whose pages, or slots, prefill ranks give to decode ranks, each named by the digest of all tokens
    up to its end.

    area: of the memory between them. least_tokens: of the shortest prompt from which something moves.
    """

    area: ClassVar[Area]
    least_tokens: ClassVar[int] = PAGE_TOKENS + 1

    @abstractmethod
    def moved_keys(self, sequence: S, digests: Sequence[bytes]) -> Sequence[bytes]:
        """Return the digests of the pages from which a sequence is continued. digests: of all pages before."""

    @abstractmethod
    def given(self, sequence: S, pages: int) -> list[int]:
        """Return the numbers of these pages of a running sequence of which exactly `pages` pages are computed."""

    @abstractmethod
    def take(self, sequence: S, pages: int) -> list[int | None]:
        """Let a sequence that is admitted, and of which nothing is computed yet, hold the pages from which it is
        continued after `pages` pages. Returns their numbers to be filled, None for a page that the tree has."""

    def taken(self, sequence: S) -> None:
        """Use the pages that `take` has returned: they are filled now."""

    def pending_copies(self) -> list[tuple[int, int]]:
        """Return, once, the copies of slots that the ranks have not received: (from, to)."""
        return []


class WorkInPieces(ABC):
    """An encoding or a source that all ranks compute, or pages that they read, in pieces between the steps of other
    sequences.

    entry: of the pool that it belongs to; `ready` once it is complete.
    """

    entry: PoolEntry

    @abstractmethod
    def pieces(self, worker: Worker, operations: float) -> Iterator[bool]:
        """Start when first advanced, and then lead a piece each time, of about `operations` operations if it is
        computed, until the entry is ready. Yields whether it was computed or read, rather than sent."""

    @abstractmethod
    def stop(self, worker: Worker) -> None:
        """End it before it is complete."""
