"""Allocates the pages of the KV cache. Sequences that begin alike share their full pages.

Only rank 0 keeps this; the other ranks receive the page numbers of each sequence. Full pages form a radix tree whose
edges are one page long: each page continues its parent by PAGE_TOKENS tokens (RadixAttention, arXiv 2312.07104). Tokens
are compared by their keys (prompt.py), so that equal placeholders of different media are different. A page that no
sequence uses stays in the tree until its memory is needed; the least recently used page is evicted first.

A sequence can use a page of the tree only as far as the other kinds of cache of its model can share it as well. The
tokens after that are computed again, into pages of the sequence's own.
"""

import hashlib
from collections import abc
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

from tilerank.kernels.kv_pages import PAGE_TOKENS

from ..protocol.areas import Area
from ..protocol.engine_state import EngineState
from ..protocol.errors import EngineError
from ..protocol.rank_messages import Chunk, Step
from ..step.cache import num_pages
from .cache_kind import CacheKind, MovedKind, PagedSequence


@dataclass(eq=False)
class Page:
    """A full page of the tree: its tokens have the prompt keys `keys` and follow the tokens of its ancestors.

    number: index of the page in the cache. digest: as of `page_digest`, empty for the root. users: number of sequences
    that have it in their tables. copies: other numbers that it has in some of these, because sequences that compute the
    same tokens at the same time fill a page each.
    """

    number: int
    keys: tuple[int, ...]
    parent: "Page | None"
    digest: bytes
    children: dict[tuple[int, ...], "Page"] = field(default_factory=dict)
    users: int = 0
    copies: list[int] = field(default_factory=list)


@dataclass(eq=False)
class PageTable:
    """The pages of one sequence in order.

    numbers: indices of its pages in the cache. shared: the pages of the tree with its first tokens; they have the same
    numbers, except for copies. sent: how many of its pages the other ranks have received.
    """

    numbers: list[int] = field(default_factory=list)
    shared: list[Page] = field(default_factory=list)
    sent: int = 0

    def __len__(self) -> int:
        return len(self.numbers)


class PagePool(MovedKind[PagedSequence]):
    """All pages of the cache, numbered from 0 to `pages` - 1. beside: the other kinds of cache that a sequence has to
    continue where it continues pages of the tree."""

    area: ClassVar = Area.PAGES

    def __init__(self, pages: int, beside: abc.Sequence[CacheKind[Any]] = ()) -> None:
        self.total = pages
        self.tables: dict[PagedSequence, PageTable] = {}
        """The page tables of the running sequences."""
        self._beside = beside
        self._empty = list(range(pages - 1, -1, -1))  # taken from the end, lowest number first
        self._root = Page(-1, (), None, b"")
        # Pages without users, in order of eviction. A sequence uses all ancestors of its pages and releases pages
        # before their ancestors, so the first page here never has children.
        self._idle: dict[Page, None] = {}

    @property
    def free(self) -> int:
        """The number of pages that can be allocated."""
        return len(self._empty) + len(self._idle)

    def prefix(self, keys: abc.Sequence[int]) -> list[Page]:
        """Return the pages of the tree for the beginning of `keys`."""
        pages, page = [], self._root
        for page_keys in full_pages(keys):
            child = page.children.get(page_keys)
            if child is None:
                break
            page = child
            pages.append(page)
        return pages

    def reserve(self, sequence: PagedSequence) -> bool:
        """Use the pages of the tree that begin with a sequence's tokens. Returns False unless the other pages are free,
        and one more for each running sequence.

        The last token is never covered, because its logits have to be computed.
        """
        shared = self.prefix(sequence.reusable_keys[:-1])
        before = -1
        while len(shared) != before:  # until all of the other kinds can share them
            before = len(shared)
            for kind in self._beside:
                del shared[kind.shared(sequence, shared) :]
        for page in shared:
            if not page.users:
                del self._idle[page]
            page.users += 1
        running, table = len(self.tables), PageTable([page.number for page in shared], shared)
        self.tables[sequence], sequence.cached = table, len(table) * PAGE_TOKENS
        if num_pages(sequence.length) - len(table) + running <= self.free:
            return True
        self.release(sequence)
        return False

    def commit(self, sequence: PagedSequence) -> None:
        self._extend(sequence, sequence.length)

    def grow(self, sequence: PagedSequence) -> bool:
        if len(self.tables[sequence]) * PAGE_TOKENS <= sequence.cached and not self.free:
            return False
        self._extend(sequence, sequence.cached + 1)
        return True

    def draft_room(self, sequence: PagedSequence, drafts: int) -> int:
        """Take pages as long as one is left for each running sequence."""
        numbers = self.tables[sequence].numbers
        while len(numbers) < num_pages(sequence.cached + drafts) and self.free > len(self.tables):
            numbers.append(self._allocate())
        return min(drafts, len(numbers) * PAGE_TOKENS - sequence.cached)

    def new_pages(self, sequence: PagedSequence) -> list[int]:
        table = self.tables[sequence]
        new = table.numbers[table.sent :] if len(table) > table.sent else []
        table.sent += len(new)
        return new

    def release(self, sequence: PagedSequence, *, share: bool = True) -> None:
        """Release the pages of a sequence. Those in the tree stay there until they are evicted, or without `share` as
        long as other sequences use them."""
        table, sequence.cached = self.tables.pop(sequence), 0
        self._empty.extend(reversed(table.numbers[len(table.shared) :]))
        for page, number in zip(reversed(table.shared), reversed(table.numbers[: len(table.shared)]), strict=True):
            page.users -= 1
            if number != page.number:
                page.copies.remove(number)
                self._empty.append(number)
            elif not page.users:
                self._idle[page] = None
            elif page.users == len(page.copies):
                self._replace(page, page.copies.pop())
            if not share and not page.users:
                self._drop(page)

    def announce(self, step: Step, scheduled: list[tuple[PagedSequence, Chunk]]) -> None:
        for sequence, chunk in scheduled:
            chunk.new_pages.extend(self.new_pages(sequence))

    def publish(self, sequence: PagedSequence) -> None:
        """Put the pages that the computed tokens fill into the tree."""
        table = self.tables[sequence]
        first = len(table.shared)
        if sequence.cached // PAGE_TOKENS == first:
            return
        for page_keys in full_pages(sequence.keys[: sequence.cached], first):
            parent = table.shared[-1] if table.shared else self._root
            number = table.numbers[len(table.shared)]
            page = parent.children.get(page_keys)
            if page is None:
                digest = page_digest(parent.digest, page_keys)
                page = parent.children[page_keys] = Page(number, page_keys, parent, digest)
            elif page.users:
                page.copies.append(number)
            else:
                del self._idle[page]
                self._replace(page, number)
            page.users += 1
            table.shared.append(page)
        for kind in self._beside:
            kind.filled(sequence, table.shared, first)

    def will_share(self, running: PagedSequence, waiting: PagedSequence) -> bool:
        end = (len(self.tables[running].shared) + 1) * PAGE_TOKENS
        return end < min(running.length, waiting.length) and running.keys[:end] == waiting.keys[:end]

    def continuable(self, sequence: PagedSequence, tokens: int) -> int:
        return tokens // PAGE_TOKENS * PAGE_TOKENS

    def moved_keys(self, sequence: PagedSequence, digests: abc.Sequence[bytes]) -> abc.Sequence[bytes]:
        return digests

    def given(self, sequence: PagedSequence, pages: int) -> list[int]:
        return self.tables[sequence].numbers[:pages]

    def take(self, sequence: PagedSequence, pages: int) -> list[int | None]:
        table = self.tables[sequence]
        first = len(table.shared)
        return [*[None] * first, *table.numbers[first:pages]]

    def report(self, state: EngineState) -> None:
        state.cache_used = 1 - self.free / self.total

    def _extend(self, sequence: PagedSequence, tokens: int) -> None:
        """Allocate pages until a sequence has those of `tokens` tokens."""
        table = self.tables[sequence]
        for _ in range(len(table), num_pages(tokens)):
            table.numbers.append(self._allocate())

    def _allocate(self) -> int:
        if self._empty:
            return self._empty.pop()
        page = next(iter(self._idle), None)
        if page is None:
            raise EngineError(f"the KV cache has no free page; all {self.total} are in use")
        self._drop(page)
        return self._empty.pop()

    def _drop(self, page: Page) -> None:
        """Remove a page that no sequence uses from the tree, with all pages that continue it."""
        assert page.parent is not None
        del page.parent.children[page.keys]
        dropped = [page]
        for one in dropped:
            dropped += one.children.values()
            del self._idle[one]
            for kind in self._beside:
                kind.drop(one)
            self._empty.append(one.number)

    def _replace(self, page: Page, number: int) -> None:
        """Let a page of the tree be page `number` of the cache, which has the same tokens; no sequence uses the old."""
        self._empty.append(page.number)
        page.number = number


def page_digest(before: bytes, keys: tuple[int, ...]) -> bytes:
    """Return 16 bytes that identify the tokens of a page and all tokens before them. before: the digest of the page
    before it, empty if it is the first."""
    return hashlib.blake2b(repr((before, keys)).encode(), digest_size=16).digest()


def full_pages(keys: abc.Sequence[int], start: int = 0) -> Iterator[tuple[int, ...]]:
    """Yield the tokens of each full page, from page `start` on."""
    for first in range(start * PAGE_TOKENS, len(keys) - PAGE_TOKENS + 1, PAGE_TOKENS):
        yield tuple(keys[first : first + PAGE_TOKENS])
