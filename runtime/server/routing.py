"""Which replica gets a request: the one that has most of its prompt in the cache, unless it has too much to do."""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise

BLOCK = 32
"""Tokens; beginnings of prompts are told apart by as many."""
SLACK = 4
"""Requests that a replica may have more than another, for knowing the prompt."""
MAX_BLOCKS = 1 << 16
"""Of prompts that are remembered for each replica: 2 million tokens, which is more than most caches hold."""


def choose(loads: Sequence[int], known: Sequence[int], blocks: int) -> int:
    """The replica that has seen most of the prompt, if that is half of its `blocks` and its load is at most SLACK above
    the least; else the one with the least load.

    loads: requests that wait for tokens, by replica. known: blocks of the prompt, from its beginning, that it has seen.
    """
    least = min(range(len(loads)), key=loads.__getitem__)
    best = max(range(len(loads)), key=lambda replica: (known[replica], -loads[replica]))
    worth_it = 0 < blocks <= 2 * known[best] and loads[best] <= loads[least] + SLACK
    return best if worth_it else least


def hashes(prompt: Sequence[int]) -> list[int]:
    """One for each whole block, of all tokens up to its end."""
    found = [0]
    for start, end in pairwise(range(0, len(prompt) + 1, BLOCK)):
        found.append(hash((found[-1], *prompt[start:end])))
    return found[1:]


class Seen:
    """The blocks of the prompts that a replica was given lately."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def known(self, blocks: Sequence[int]) -> int:
        """How many of `blocks`, from the first, it has seen."""
        return next((i for i, block in enumerate(blocks) if block not in self._blocks), len(blocks))

    def add(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):  # the end of a prompt is forgotten first
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > MAX_BLOCKS:
            self._blocks.popitem(last=False)
