"""Chooses the replica of a request: the one that has cached most of its prompt, unless that one is too busy."""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise

BLOCK_TOKENS = 32
"""Prompts are compared in blocks of this many tokens."""
MAX_EXTRA_LOAD = 4
"""Requests that a replica may have beyond those of the least busy one and still be chosen for its cache."""
MAX_BLOCKS = 1 << 16
"""Blocks to remember for each replica: 2 million tokens, more than most caches hold."""


def choose_replica(loads: Sequence[int], seen: Sequence[int], blocks: int) -> int:
    """Return the index of the replica for a prompt of `blocks` whole blocks.

    loads: incomplete requests of each replica. seen: how many blocks of the prompt, from its beginning, each replica
    has seen. The replica that has seen most is chosen if that is at least half of the prompt and its load exceeds the
    lowest one by at most MAX_EXTRA_LOAD; otherwise the least busy replica.
    """
    least_busy = min(range(len(loads)), key=loads.__getitem__)
    best = max(range(len(loads)), key=lambda replica: (seen[replica], -loads[replica]))
    use_cache = 0 < blocks <= 2 * seen[best] and loads[best] <= loads[least_busy] + MAX_EXTRA_LOAD
    return best if use_cache else least_busy


def block_hashes(keys: Sequence[int]) -> list[int]:
    """Return a hash for each whole block of a prompt's keys, which covers all keys up to the end of the block."""
    found = [0]
    for start, end in pairwise(range(0, len(keys) + 1, BLOCK_TOKENS)):
        found.append(hash((found[-1], *keys[start:end])))
    return found[1:]


class SeenPrompts:
    """Block hashes of the prompts that a replica got, the last MAX_BLOCKS of them."""

    def __init__(self) -> None:
        self._hashes: OrderedDict[int, None] = OrderedDict()

    def matching(self, hashes: Sequence[int]) -> int:
        """Return how many of `hashes`, from the first one on, this replica has seen."""
        return next((i for i, block in enumerate(hashes) if block not in self._hashes), len(hashes))

    def add(self, hashes: Sequence[int]) -> None:
        for block in reversed(hashes):  # so that the end of a prompt is evicted first
            self._hashes[block] = None
            self._hashes.move_to_end(block)
        while len(self._hashes) > MAX_BLOCKS:
            self._hashes.popitem(last=False)
