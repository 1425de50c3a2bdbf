"""A pool of entries that sequences pin. Those that no sequence needs stay until their room is needed."""

from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar


@dataclass(eq=False)
class PoolEntry:
    """Something that is computed once and shared by its key.

    size: what it takes of the pool's capacity. users: how often it is pinned. ready: whether it is computed.
    """

    key: Hashable
    size: int
    users: int = 0
    ready: bool = False


E = TypeVar("E", bound=PoolEntry)


class LruPool(Generic[E]):
    """Entries of at most `capacity` together. An entry without users is evicted when its room is needed, the least
    recently used one first; one that is not ready is dropped with its last user. on_evict: is called with entries that
    are evicted."""

    def __init__(self, capacity: int, on_evict: Callable[[E], None] = lambda _: None) -> None:
        self.capacity = capacity
        self.used = 0
        """The size of all entries."""
        self._entries: dict[Hashable, E] = {}
        self._idle: OrderedDict[Hashable, E] = OrderedDict()  # without users, in order of eviction
        self._idle_size = 0
        self._on_evict = on_evict

    def __contains__(self, key: Hashable) -> bool:
        return key in self._entries

    def __getitem__(self, key: Hashable) -> E:
        return self._entries[key]

    @property
    def entries(self) -> Collection[E]:
        return self._entries.values()

    @property
    def idle(self) -> Collection[E]:
        """The entries without users, in order of eviction."""
        return self._idle.values()

    @property
    def pinned(self) -> int:
        """The size of the entries that have users."""
        return self.used - self._idle_size

    def pin(self, wanted: Sequence[E]) -> list[E] | None:
        """Pin all of `wanted`: for each the entry of this key, or itself if there is none. None if they do not fit
        beside the other entries that have users."""
        keys = {entry.key for entry in wanted}
        new = {entry.key: entry for entry in wanted if entry.key not in self._entries}
        if not self._make_room(total_size(new.values()), keys):
            return None
        for entry in new.values():
            self._add(entry)
        pinned = [self._entries[entry.key] for entry in wanted]
        for entry in pinned:
            entry.users += 1
            self._end_idle(entry)
        return pinned

    def unpin(self, entry: E) -> None:
        """End one use of an entry. It stays if it is ready."""
        entry.users -= 1
        if entry.users:
            return
        if entry.ready:
            self._begin_idle(entry)
        else:
            self.remove(entry)

    def add_idle(self, entry: E) -> bool:
        """Add an entry without users. Returns False if there is no room."""
        if not self._make_room(entry.size):
            return False
        self._add(entry)
        self._begin_idle(entry)
        return True

    def touch(self, key: Hashable) -> None:
        """Let the idle entry of this key be the most recently used one."""
        self._idle.move_to_end(key)

    def expire(self, key: Hashable) -> None:
        """Let the idle entry of this key be the next one to be evicted."""
        self._idle.move_to_end(key, last=False)

    def rename(self, entry: E, key: Hashable) -> None:
        """Give an entry that has users another key, which no other entry has."""
        del self._entries[entry.key]
        entry.key = key
        self._entries[key] = entry

    def remove(self, entry: E) -> None:
        self._end_idle(entry)
        del self._entries[entry.key]
        self.used -= entry.size

    def _begin_idle(self, entry: E) -> None:
        self._idle[entry.key] = entry
        self._idle_size += entry.size

    def _end_idle(self, entry: E) -> None:
        if self._idle.pop(entry.key, None) is not None:
            self._idle_size -= entry.size

    def _add(self, entry: E) -> None:
        self._entries[entry.key] = entry
        self.used += entry.size

    def _make_room(self, size: int, spared: Collection[Hashable] = ()) -> bool:
        """Evict entries other than `spared` until there is room for `size`. Returns False, and evicts none, if that is
        not enough."""
        evictable = self._idle_size - total_size(self._idle[key] for key in spared if key in self._idle)
        if self.used + size > self.capacity + evictable:
            return False
        while self.used + size > self.capacity:
            entry = next(entry for key, entry in self._idle.items() if key not in spared)
            self.remove(entry)
            self._on_evict(entry)
        return True


@dataclass(eq=False)
class NumberedEntry(PoolEntry):
    """An entry that has `size` of the numbers of its pool."""

    numbers: list[int] = field(default_factory=list)


class NumberedPool(LruPool[NumberedEntry]):
    """A pool of pages or slots, numbered from 0 to `capacity` - 1."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._free = list(range(capacity - 1, -1, -1))  # taken from the end, lowest number first

    def remove(self, entry: NumberedEntry) -> None:
        super().remove(entry)
        self._free.extend(reversed(entry.numbers))

    def _add(self, entry: NumberedEntry) -> None:
        super()._add(entry)
        entry.numbers = [self._free.pop() for _ in range(entry.size)]


def total_size(entries: Iterable[PoolEntry]) -> int:
    return sum(entry.size for entry in entries)
