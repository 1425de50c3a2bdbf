"""Pages for the sources of prompts: the keys and values that layers of cross-attention keep of encoded media.

Prompts with the same source (prompt.py) share its pages. Its keys and values are computed once, from the encodings of
all media of a prompt.
"""

from collections import abc
from collections.abc import Iterator
from typing import ClassVar

from tilerank.kernels.kv_pages import PAGE_TOKENS

from ..protocol.areas import Area
from ..protocol.engine_state import EngineState
from ..protocol.errors import RequestError
from ..protocol.prompt import Segment, cut_segments
from ..protocol.rank_messages import Chunk, ChunkSource, Step, StoreSource
from ..rank.worker import Worker
from ..step.cache import num_pages
from .cache_kind import MovedKind, WorkInPieces
from .encodings import EncoderCache
from .lru_pool import NumberedEntry, NumberedPool
from .pages import page_digest
from .sequence import Scheduled, Sequence


class SourcePool(MovedKind[Sequence]):
    """All pages of the caches of sources, numbered from 0 to `pages` - 1. A source is ready once it is stored."""

    area: ClassVar = Area.SOURCE_PAGES

    def __init__(self, pages: int, encodings: EncoderCache) -> None:
        self.pool = NumberedPool(pages)
        self._encodings = encodings
        self._pinned: dict[Sequence, NumberedEntry] = {}
        self._sent: set[Sequence] = set()  # those whose pages the ranks have received

    def check_fits(self, sequence: Sequence) -> None:
        if (pages := _pages(sequence)) > self.pool.capacity:
            raise RequestError(
                f"the keys and values of its pictures and videos take {pages} pages, but the cache of encodings has "
                f"{self.pool.capacity}"
            )

    def reserve(self, sequence: Sequence) -> bool:
        if not sequence.prompt.source:
            return True
        pinned = self.pool.pin([NumberedEntry(sequence.prompt.source_digest, _pages(sequence))])
        if pinned is None:
            return False
        (self._pinned[sequence],) = pinned
        sequence.has_source = pinned[0].ready
        return True

    def release(self, sequence: Sequence, *, share: bool = True) -> None:
        if (source := self._pinned.pop(sequence, None)) is not None:
            self.pool.unpin(source)
        self._sent.discard(sequence)

    def limit(self, sequence: Sequence, tokens: int) -> int:
        source = self._pinned.get(sequence)
        return tokens if source is None or source.ready else 0

    def work(self, sequence: Sequence) -> WorkInPieces | None:
        source, encodings = self._pinned.get(sequence), self._encodings.of(sequence)
        if source is None or source.ready or sequence.takes:
            return None
        if not all(encoding.ready for encoding in encodings.values()):
            return None
        prompt = sequence.prompt
        parts = [Segment(encodings[part.medium].number, part.first, part.count) for part in prompt.source]
        return StoreWork(source, StoreSource(source.numbers, parts, prompt.source_positions))

    def announce(self, step: Step, scheduled: Scheduled) -> None:
        for sequence, chunk in scheduled:
            source = self._pinned.get(sequence)
            if source is not None and (sequence not in self._sent or chunk.start < sequence.prompt_len):
                pages = [] if sequence in self._sent else source.numbers
                step.sources.append(ChunkSource(sequence.number, pages, _rows(sequence, chunk)))
                self._sent.add(sequence)

    def moved_keys(self, sequence: Sequence, digests: abc.Sequence[bytes]) -> abc.Sequence[bytes]:
        """Return the digests of all pages of the source, unless nothing else moves."""
        pages = range(_pages(sequence) if digests else 0)
        return [page_digest(sequence.prompt.source_digest, (page,)) for page in pages]

    def given(self, sequence: Sequence, pages: int) -> list[int]:
        source = self._pinned.get(sequence)
        return [] if source is None or not pages else source.numbers

    def take(self, sequence: Sequence, pages: int) -> list[int | None]:
        source = self._pinned.get(sequence)
        if source is None:
            return []
        return [None if source.ready else number for number in source.numbers]

    def taken(self, sequence: Sequence) -> None:
        if (source := self._pinned.get(sequence)) is not None:
            source.ready = True

    def report(self, state: EngineState) -> None:
        state.source_pages, state.source_pages_used = self.pool.capacity, self.pool.pinned


class StoreWork(WorkInPieces):
    """The computation of the keys and values of a source whose encodings are there. message: stores it whole."""

    def __init__(self, source: NumberedEntry, message: StoreSource) -> None:
        self.entry = source
        self._message = message

    def pieces(self, worker: Worker, operations: float) -> Iterator[bool]:
        tokens = int(operations / max(worker.source_operations(self._message.parts[0].medium), 1))
        pieces = list(pieces_of_source(self._message, max(tokens // PAGE_TOKENS, 1)))
        yield False
        for left, piece in zip(reversed(range(len(pieces))), pieces, strict=True):
            worker.announce(piece)
            worker.store_source(piece)
            self.entry.ready = not left
            yield True

    def stop(self, worker: Worker) -> None:
        """The pages that are written already are those of a source that is dropped."""


def pieces_of_source(whole: StoreSource, pages: int) -> Iterator[StoreSource]:
    """Cut a source into pieces of so many pages each; the last may be smaller."""
    for first in range(0, len(whole.pages), pages):
        start, stop = first * PAGE_TOKENS, (first + pages) * PAGE_TOKENS
        positions = [axis[start:stop] for axis in whole.positions]
        yield StoreSource(whole.pages[first : first + pages], cut_segments(whole.parts, start, stop), positions)


def _pages(sequence: Sequence) -> int:
    return num_pages(sum(segment.count for segment in sequence.prompt.source))


def _rows(sequence: Sequence, chunk: Chunk) -> list[tuple[int, int, int, bool]]:
    """Return ChunkSource.rows of a chunk."""
    start, stop = chunk.start, chunk.start + len(chunk.token_ids)
    ranges = [visible for visible in sequence.prompt.visible_ranges if visible.start < stop]
    before = [visible for visible in ranges if visible.start <= start]
    rows = [(0, seen.first, seen.count, seen.shown) for seen in before[-1:]] or [(0, 0, 0, False)]
    return rows + [(seen.start - start, seen.first, seen.count, seen.shown) for seen in ranges[len(before) :]]
