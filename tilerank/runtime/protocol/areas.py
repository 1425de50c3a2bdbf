"""The areas of the memory through which prefill ranks give what they have computed of a prompt to decode ranks."""

from enum import IntEnum


class Area(IntEnum):
    """An area has slots of one size, each for a page of the cache, or for the states of a sequence."""

    PAGES = 0
    WINDOW_PAGES = 1
    STATES = 2
    SOURCE_PAGES = 3
