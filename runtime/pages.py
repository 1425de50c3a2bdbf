"""Who has which page of the KV cache: sequences that begin alike share the full pages of what they have in common.

Kept on rank 0 only: the other ranks are told which pages a sequence reads and writes. Full pages form a tree, each the
continuation of its parent by KV_BLOCK tokens (RadixAttention, arXiv 2312.07104, with edges of one page). A page that no
sequence uses any more stays in the tree until its room is needed, least recently used first.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tilerank.kernels.attention import KV_BLOCK

from .errors import EngineError


@dataclass(eq=False)
class Page:
    """A full page: the keys and values of `token_ids`, which follow those of its ancestors."""

    block: int
    token_ids: tuple[int, ...]
    parent: "Page | None"
    children: dict[tuple[int, ...], "Page"] = field(default_factory=dict)
    users: int = 0


@dataclass(eq=False)
class Table:
    """The pages of one sequence: `shared` ones, which are in the tree, then its own."""

    shared: list[Page] = field(default_factory=list)
    own: list[int] = field(default_factory=list)
    # Another sequence has put the same tokens into the tree first: what follows would have two parents.
    private: bool = False

    def __len__(self) -> int:
        return len(self.shared) + len(self.own)

    @property
    def blocks(self) -> list[int]:
        return [page.block for page in self.shared] + self.own


class PagePool:
    """All pages of the cache."""

    def __init__(self, blocks: int) -> None:
        self.total = blocks
        self._empty = list(range(blocks - 1, -1, -1))  # handed out from the end: lowest first
        self._root = Page(-1, (), None)
        # In the order in which they are given up. Whoever uses a page uses its ancestors, and gives it back before
        # them: the first one here has no children.
        self._idle: dict[Page, None] = {}

    @property
    def free(self) -> int:
        """Pages that can be had."""
        return len(self._empty) + len(self._idle)

    @property
    def cached(self) -> int:
        """Pages that no sequence uses and a new one may find."""
        return len(self._idle)

    def open(self, token_ids: Sequence[int]) -> Table:
        """A table with the pages that the tree has for the beginning of `token_ids`, but never all of its tokens: the
        last one has to be computed, for its logits."""
        table = Table()
        page = self._root
        for token_ids_of_page in _pages(token_ids[:-1]):
            child = page.children.get(token_ids_of_page)
            if child is None:
                break
            page = child
            table.shared.append(page)
        for page in table.shared:
            if not page.users:
                del self._idle[page]
            page.users += 1
        return table

    def extend(self, table: Table, tokens: int) -> None:
        """Gives the table pages for `tokens` tokens. The caller has looked at `free`."""
        for _ in range(len(table), -(-tokens // KV_BLOCK)):
            table.own.append(self._take())

    def publish(self, table: Table, token_ids: Sequence[int]) -> None:
        """Puts the sequence's own pages that the computed `token_ids` fill into the tree."""
        for token_ids_of_page in _pages(token_ids, start=len(table.shared)):
            parent = table.shared[-1] if table.shared else self._root
            if table.private or token_ids_of_page in parent.children:
                table.private = True
                return
            page = Page(table.own.pop(0), token_ids_of_page, parent, users=1)
            parent.children[token_ids_of_page] = page
            table.shared.append(page)

    def close(self, table: Table) -> None:
        """The sequence is over: its pages in the tree stay until their room is needed."""
        self._empty.extend(reversed(table.own))
        for page in reversed(table.shared):
            page.users -= 1
            if not page.users:
                self._idle[page] = None
        table.shared, table.own = [], []

    def _take(self) -> int:
        if self._empty:
            return self._empty.pop()
        page = next(iter(self._idle), None)
        if page is None or page.parent is None:
            raise EngineError(f"a page was asked of a cache that has none of {self.total} free")
        del self._idle[page]
        del page.parent.children[page.token_ids]
        return page.block


def _pages(token_ids: Sequence[int], start: int = 0) -> Iterator[tuple[int, ...]]:
    for first in range(start * KV_BLOCK, len(token_ids) - KV_BLOCK + 1, KV_BLOCK):
        yield tuple(token_ids[first : first + KV_BLOCK])
