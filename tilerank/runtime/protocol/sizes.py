"""Sizes on which plans, ranks and rank 0 agree. Imports no torch, because plans use it."""

HTTP_PROCESS_BYTES = 1 << 30
"""The most bytes of the HTTP process, whatever clients send, for a model that reads text (server/http/memory.py). Media
have bounds of their own beside it."""

MAX_RUNNING = 256
"""The most sequences that run at once."""

CHUNK_FRAMES, CONTEXT_FRAMES = 300, 25
"""Frames of a chunk of speech, and the frames before it that are decoded for it."""

TOKENS_PER_STATE = 2048
"""There is a slot for every so many tokens of the cache. In Qwen3.5-9B the states of a sequence take as much memory as
the keys and values of 1,570 tokens."""
MIN_STATES = 8
"""The fewest slots, so that small caches also serve a few requests at once."""


def num_states(tokens: int) -> int:
    """Return the number of slots beside a cache of `tokens` tokens."""
    return max(MIN_STATES, -(-tokens // TOKENS_PER_STATE)) if tokens else 0


def most_tokens(nbytes: float, per_token: float, per_state: float) -> int:
    """Return the largest number of tokens that fit in `nbytes` together with their slots, 0 or less if none do.

    per_token, per_state: bytes of a token and of a slot. per_state is 0 for models without states.
    """
    if not per_state:
        return int(nbytes // per_token)
    whole = int(nbytes // (TOKENS_PER_STATE * per_token + per_state))  # slots, each with all of its tokens
    return max(
        min(slots * TOKENS_PER_STATE, int((nbytes - slots * per_state) // per_token))
        for slots in (max(whole, MIN_STATES), max(whole + 1, MIN_STATES))
    )
