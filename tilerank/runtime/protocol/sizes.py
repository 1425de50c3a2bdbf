"""Sizes on which plans, ranks and rank 0 agree. Imports no torch, because plans use it."""

from bisect import bisect_right
from collections.abc import Callable

HTTP_PROCESS_BYTES = 1 << 30
"""The most bytes of the HTTP process, whatever clients send, for a model that reads text (server/http/memory.py). Media
have bounds of their own beside it."""

MAX_RUNNING = 256
"""The most sequences that run at once."""

PREFILL_CHUNK = 2048
"""Prompt tokens of a step. It bounds the memory of activations, and the time that running sequences wait."""

KEPT_ROWS = PREFILL_CHUNK + 2 * MAX_RUNNING
"""Hidden states that a draft head keeps: those of a step, and further ones for rows of padding."""

KV_DIR_BYTES = 64 << 30
"""The most bytes of the pages that are kept in files (rank/page_files.py) by default, on all ranks together."""

CHUNK_FRAMES, CONTEXT_FRAMES = 300, 25
"""Frames of a chunk of speech, and the frames before it that are decoded for it."""

TOKENS_PER_STATE = 2048
"""There is a slot for every so many tokens of the cache. In Qwen3.5-9B the states of a sequence take as much memory as
the keys and values of 1,570 tokens."""
MIN_STATES = 8
"""The fewest slots, so that small caches also serve a few requests at once."""
STATE_DRAFTS = 7
"""The most drafts of a sequence in a step of a model with states. In Qwen3.5-9B, what states need to take in so many
is a tenth of a slot."""

TOKENS_PER_WINDOW_TOKEN = 8
"""Layers with a window have room for one token in so many of the cache. Requests as long as so many windows then use
all of both; more requests that are shorter, or fewer that are longer, leave a part of one of them unused."""
MIN_WINDOWS = 8
"""The fewest windows that such layers have room for, so that small caches also serve a few requests at once."""
WINDOW_MARGIN = 64
"""A sequence holds fewer tokens than this beside its window, in the pages in which the window begins and ends."""


def num_states(tokens: int) -> int:
    """Return the number of slots beside a cache of `tokens` tokens."""
    return max(MIN_STATES, -(-tokens // TOKENS_PER_STATE)) if tokens else 0


def num_window_tokens(tokens: int, window: int) -> int:
    """Return how many tokens layers with this window have room for, beside a cache of `tokens` tokens. No window: 0.

    Never more than the cache has, or than the most sequences that run at once can use.
    """
    if not window:
        return 0
    windows = [count * (window + WINDOW_MARGIN) + PREFILL_CHUNK for count in (MIN_WINDOWS, MAX_RUNNING)]
    return min(max(tokens // TOKENS_PER_WINDOW_TOKEN, windows[0]), windows[1], tokens)


def tokens_for(sequences: int, length: int, *, states: bool, window: int) -> int:
    """Return the tokens of a cache in which so many sequences of `length` tokens run at once.

    states: whether layers have states. window: the tokens that layers with a window read, 0 without such layers.
    """
    tokens = sequences * length
    if states and num_states(tokens) < sequences:
        tokens = sequences * TOKENS_PER_STATE
    in_windows = sequences * min(length, window + WINDOW_MARGIN) + PREFILL_CHUNK
    if window and num_window_tokens(tokens, window) < min(tokens, in_windows):
        tokens = in_windows * TOKENS_PER_WINDOW_TOKEN
    return tokens


def most_tokens(nbytes: float, cache_bytes: Callable[[int], float]) -> int:
    """Return the largest number of tokens whose cache fits in `nbytes`.

    cache_bytes: returns the bytes of a cache of so many tokens, with all that belongs to it.
    """
    return bisect_right(range(1, 1 << 40), nbytes, key=cache_bytes)
