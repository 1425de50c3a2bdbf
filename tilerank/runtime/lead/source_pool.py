"""Pages for the sources of prompts: the keys and values that layers of cross-attention keep of encoded media.

Only rank 0 keeps this. Prompts with the same source (prompt.py) share its pages. A source that no sequence needs stays
until its pages are needed; the least recently used one is dropped first.
"""

from collections import OrderedDict
from dataclasses import dataclass

from ..protocol.errors import RequestError
from ..protocol.rank_messages import StoreSource
from ..step.cache import num_pages


@dataclass(eq=False)
class Source:
    """A source and its pages. stored: whether its keys and values are there.

    users: how many running sequences have it.
    """

    digest: bytes
    pages: list[int]
    stored: bool = False
    users: int = 0


@dataclass(frozen=True)
class Unstored:
    """A source whose encodings are all there, and the message that lets the ranks store it whole."""

    source: Source
    message: StoreSource


class SourcePool:
    """All pages of the caches of encodings, numbered from 0 to `pages` - 1."""

    def __init__(self, pages: int) -> None:
        self.total = pages
        self._free = list(range(pages - 1, -1, -1))  # taken from the end, lowest number first
        self._sources: dict[bytes, Source] = {}
        self._idle: OrderedDict[bytes, Source] = OrderedDict()  # without users, in order of eviction

    @property
    def used(self) -> int:
        """The number of pages of all sources."""
        return self.total - len(self._free)

    @property
    def in_use(self) -> int:
        """The number of pages of sources that running sequences have."""
        return sum(len(source.pages) for source in self._sources.values() if source.users)

    def check_fits(self, tokens: int) -> None:
        """Raise RequestError if a source of so many tokens does not fit even alone."""
        if (pages := num_pages(tokens)) > self.total:
            raise RequestError(
                f"the keys and values of its pictures and videos take {pages} pages, but the cache of encodings has "
                f"{self.total}"
            )

    def pin(self, digest: bytes, tokens: int) -> Source | None:
        """Return the source of a sequence, or None if there are no pages for it beside those of other sequences."""
        source = self._sources.get(digest)
        if source is None:
            pages = num_pages(tokens)
            if pages > len(self._free) + sum(len(idle.pages) for idle in self._idle.values()):
                return None
            while len(self._free) < pages:
                self._drop(next(iter(self._idle.values())))
            source = self._sources[digest] = Source(digest, [self._free.pop() for _ in range(pages)])
        self._idle.pop(digest, None)
        source.users += 1
        return source

    def release(self, source: Source) -> None:
        """End one use of a source. It stays if its keys and values are stored."""
        source.users -= 1
        if source.users:
            return
        if source.stored:
            self._idle[source.digest] = source
        else:
            self._drop(source)

    def _drop(self, source: Source) -> None:
        del self._sources[source.digest]
        self._idle.pop(source.digest, None)
        self._free.extend(reversed(source.pages))
