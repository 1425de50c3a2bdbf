"""Allocates the pages of the KV cache. Sequences that begin alike share their full pages.

Only rank 0 keeps this; the other ranks receive the page numbers of each sequence. Full pages form a radix tree whose
edges are one page long: each page continues its parent by PAGE_TOKENS tokens (RadixAttention, arXiv 2312.07104). Tokens
are compared by their keys (prompt.py), so that equal placeholders of different media are different. A page that no
sequence uses stays in the tree until its memory is needed; the least recently used page is evicted first.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tilerank.kernels.kv_pages import PAGE_TOKENS

from .errors import EngineError


@dataclass(eq=False)
class Page:
    """A full page of the tree: its tokens have the prompt keys `keys` and follow the tokens of its ancestors.

    number: index of the page in the cache. users: number of sequences that use it.
    """

    number: int
    keys: tuple[int, ...]
    parent: "Page | None"
    children: dict[tuple[int, ...], "Page"] = field(default_factory=dict)
    users: int = 0


@dataclass(eq=False)
class PageTable:
    """The pages of one sequence in order: `shared` pages, which are in the tree, then the numbers of its `own` pages.

    private: another sequence has put the same tokens into the tree first, so this one's later pages cannot join it.
    """

    shared: list[Page] = field(default_factory=list)
    own: list[int] = field(default_factory=list)
    private: bool = False

    def __len__(self) -> int:
        return len(self.shared) + len(self.own)

    @property
    def page_numbers(self) -> list[int]:
        return [page.number for page in self.shared] + self.own


class PagePool:
    """All pages of the cache, numbered from 0 to `pages` - 1."""

    def __init__(self, pages: int) -> None:
        self.total = pages
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
        """Return a table with the tree's pages for the beginning of `keys`.

        The last token is never covered, because its logits have to be computed.
        """
        table = PageTable()
        page = self._root
        for page_keys in _pages(keys[:-1]):
            child = page.children.get(page_keys)
            if child is None:
                break
            page = child
            table.shared.append(page)
        for page in table.shared:
            if not page.users:
                del self._idle[page]
            page.users += 1
        return table

    def extend(self, table: PageTable, tokens: int) -> None:
        """Allocate pages until the table holds `tokens` tokens. The caller has checked `free`."""
        for _ in range(len(table), -(-tokens // PAGE_TOKENS)):
            table.own.append(self._allocate())

    def publish(self, table: PageTable, keys: Sequence[int]) -> None:
        """Move the table's own pages that the computed `keys` fill into the tree."""
        for page_keys in _pages(keys, start=len(table.shared)):
            parent = table.shared[-1] if table.shared else self._root
            if table.private or page_keys in parent.children:
                table.private = True
                return
            page = Page(table.own.pop(0), page_keys, parent, users=1)
            parent.children[page_keys] = page
            table.shared.append(page)

    def close(self, table: PageTable) -> None:
        """Release the table's pages. Those in the tree stay there until they are evicted."""
        self._empty.extend(reversed(table.own))
        for page in reversed(table.shared):
            page.users -= 1
            if not page.users:
                self._idle[page] = None
        table.shared, table.own = [], []

    def _allocate(self) -> int:
        if self._empty:
            return self._empty.pop()
        page = next(iter(self._idle), None)
        if page is None or page.parent is None:
            raise EngineError(f"the KV cache has no free page; all {self.total} are in use")
        del self._idle[page]
        del page.parent.children[page.keys]
        return page.number


def _pages(keys: Sequence[int], start: int = 0) -> Iterator[tuple[int, ...]]:
    """Yield the tokens of each full page, from page `start` on."""
    for first in range(start * PAGE_TOKENS, len(keys) - PAGE_TOKENS + 1, PAGE_TOKENS):
        yield tuple(keys[first : first + PAGE_TOKENS])
