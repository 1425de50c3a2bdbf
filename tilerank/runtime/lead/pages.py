"""Allocates the pages of the KV cache. Sequences that begin alike share their full pages.

Only rank 0 keeps this; the other ranks receive the page numbers of each sequence. Full pages form a radix tree whose
edges are one page long: each page continues its parent by PAGE_TOKENS tokens (RadixAttention, arXiv 2312.07104). Tokens
are compared by their keys (prompt.py), so that equal placeholders of different media are different. A page that no
sequence uses stays in the tree until its memory is needed; the least recently used page is evicted first.

A model with states can use a page of the tree only if there is a snapshot of the states at its end or further on
(state_pool.py). The tokens after the deepest snapshot are computed again, into pages of the sequence's own.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tilerank.kernels.kv_pages import PAGE_TOKENS

from ..protocol.errors import EngineError
from .state_pool import StatePool


@dataclass(eq=False)
class Page:
    """A full page of the tree: its tokens have the prompt keys `keys` and follow the tokens of its ancestors.

    number: index of the page in the cache. users: number of sequences that have it in their tables. copies: other
    numbers that it has in some of these, because sequences that compute the same tokens at the same time fill a page
    each.
    """

    number: int
    keys: tuple[int, ...]
    parent: "Page | None"
    children: dict[tuple[int, ...], "Page"] = field(default_factory=dict)
    users: int = 0
    copies: list[int] = field(default_factory=list)


@dataclass(eq=False)
class PageTable:
    """The pages of one sequence in order.

    numbers: indices of its pages in the cache. shared: the pages of the tree with its first tokens; they have the same
    numbers, except for copies. known: how many pages of the tree had its first tokens when the table was opened.
    """

    numbers: list[int] = field(default_factory=list)
    shared: list[Page] = field(default_factory=list)
    known: int = 0

    def __len__(self) -> int:
        return len(self.numbers)


class PagePool:
    """All pages of the cache, numbered from 0 to `pages` - 1. states: None for models without states."""

    def __init__(self, pages: int, states: StatePool | None = None) -> None:
        self.total = pages
        self.states = states
        self._empty = list(range(pages - 1, -1, -1))  # taken from the end, lowest number first
        self._root = Page(-1, (), None)
        # Pages without users, in order of eviction. A sequence uses all ancestors of its pages and releases pages
        # before their ancestors, so the first page here never has children.
        self._idle: dict[Page, None] = {}

    @property
    def free(self) -> int:
        """The number of pages that can be allocated."""
        return len(self._empty) + len(self._idle)

    def open(self, keys: Sequence[int]) -> PageTable:
        """Return a table with the tree's pages for the beginning of `keys`, for models with states up to the deepest
        snapshot.

        The last token is never covered, because its logits have to be computed, and for models with states the last
        but one neither, because a single token would be computed in another form (kernels/state_slots.py).
        """
        table = PageTable()
        page = self._root
        for page_keys in _pages(keys[: -1 if self.states is None else -2]):
            child = page.children.get(page_keys)
            if child is None:
                break
            page = child
            table.shared.append(page)
        table.known = len(table.shared)
        while self.states is not None and table.shared and table.shared[-1] not in self.states:
            table.shared.pop()
        for page in table.shared:
            if not page.users:
                del self._idle[page]
            page.users += 1
        table.numbers = [page.number for page in table.shared]
        return table

    def extend(self, table: PageTable, tokens: int) -> None:
        """Allocate pages until the table holds `tokens` tokens. The caller has checked `free`."""
        for _ in range(len(table), -(-tokens // PAGE_TOKENS)):
            table.numbers.append(self._allocate())

    def publish(self, table: PageTable, keys: Sequence[int]) -> None:
        """Put the table's pages that the computed `keys` fill into the tree."""
        for page_keys in _pages(keys, start=len(table.shared)):
            parent = table.shared[-1] if table.shared else self._root
            number = table.numbers[len(table.shared)]
            page = parent.children.get(page_keys)
            if page is None:
                page = parent.children[page_keys] = Page(number, page_keys, parent)
            elif page.users:
                page.copies.append(number)
            else:
                del self._idle[page]
                self._replace(page, number)
            page.users += 1
            table.shared.append(page)

    def close(self, table: PageTable, *, share: bool = True) -> None:
        """Release the table's pages. Those in the tree stay there until they are evicted, or without `share` as long as
        other sequences use them."""
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
        table.shared, table.numbers = [], []

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
            if self.states is not None:
                self.states.drop(one)
            self._empty.append(one.number)

    def _replace(self, page: Page, number: int) -> None:
        """Let a page of the tree be page `number` of the cache, which has the same tokens; no sequence uses the old."""
        self._empty.append(page.number)
        page.number = number


def _pages(keys: Sequence[int], start: int = 0) -> Iterator[tuple[int, ...]]:
    """Yield the tokens of each full page, from page `start` on."""
    for first in range(start * PAGE_TOKENS, len(keys) - PAGE_TOKENS + 1, PAGE_TOKENS):
        yield tuple(keys[first : first + PAGE_TOKENS])
