"""Slots for the states of sequences, of models whose layers keep states instead of keys and values.

Only rank 0 keeps the pool. A running sequence has a slot, which every step overwrites. A snapshot is a copy of such a
slot at the end of a full page of the tree (pages.py): a prompt that begins with the same tokens starts from it.
Snapshots take the slots that no sequence needs; the least recently used one is dropped first.

The number of slots follows from the number of cached tokens (protocol/sizes.py), so that it is the same on every rank.
"""

from collections import OrderedDict
from collections.abc import Hashable


class StatePool:
    """All slots, numbered from 0 to `slots` - 1. Snapshots are named by the page at whose end they were taken.

    copies: (from, to), slots to copy in this order before the next step; the engine sends and clears it.
    """

    def __init__(self, slots: int) -> None:
        self.total = slots
        self.copies: list[tuple[int, int]] = []
        self._free = list(range(slots - 1, -1, -1))  # taken from the end, lowest number first
        self._snapshots: OrderedDict[Hashable, int] = OrderedDict()  # least recently used first

    def __contains__(self, page: Hashable) -> bool:
        """Return whether there is a snapshot at the end of this page."""
        return page in self._snapshots

    @property
    def snapshots(self) -> int:
        """The number of snapshots."""
        return len(self._snapshots)

    @property
    def available(self) -> int:
        """The number of slots that no sequence has; snapshots are in some of them."""
        return len(self._free) + len(self._snapshots)

    def take(self, page: Hashable | None) -> int:
        """Return a slot for a sequence that continues the snapshot of `page`, or that begins if this is None.

        The caller has checked `available`.
        """
        source = None
        if page is not None:
            self._snapshots.move_to_end(page)
            source = self._snapshots[page]
        slot = self._empty_slot()
        if source is not None and source != slot:  # the snapshot itself may have been the only one to drop
            self.copies.append((source, slot))
        return slot

    def release(self, slot: int) -> None:
        """Take back the slot of a sequence."""
        self._free.append(slot)

    def snapshot(self, page: Hashable, slot: int, replaced: Hashable | None = None) -> None:
        """Keep the states that are in `slot` now as the snapshot of `page`.

        replaced: a page whose snapshot makes room for this one, if it still has one. Does nothing if `page` has a
        snapshot, or if all slots belong to sequences.
        """
        if page in self._snapshots:
            self._snapshots.move_to_end(page)
            return
        if replaced is not None:
            self.drop(replaced)
        if self.available:
            self._snapshots[page] = target = self._empty_slot()
            self.copies.append((slot, target))

    def drop(self, page: Hashable) -> None:
        """Drop the snapshot of `page`, if there is one."""
        if page in self._snapshots:
            self._free.append(self._snapshots.pop(page))

    def _empty_slot(self) -> int:
        return self._free.pop() if self._free else self._snapshots.popitem(last=False)[1]
