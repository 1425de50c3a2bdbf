"""The state of an engine, which rank 0 reports to the HTTP process."""

import msgspec


class EngineState(msgspec.Struct, array_like=True, tag=3):
    """The state of an engine. Each kind of cache sets the fields that are about it. tag: as of server/link/messages.py.

    cache_tokens: capacity of the KV cache in tokens. cache_used: fraction of its pages that running requests use.
    running, waiting: numbers of requests. preemptions, prompt_tokens (computed), generated_tokens: totals since the
    start. state_slots: slots for states of sequences, 0 for models without; a running request has one. snapshots: slots
    that keep the states at the end of a common beginning of prompts. queried_tokens, hit_tokens: totals since the start
    of the prompt tokens that were looked for in the cache and found there.

    source_pages, source_pages_used: pages for keys and values of encodings, 0 for models without cross-attention, and
    how many of them running requests use.

    window_pages, window_pages_used: pages of layers with a window, 0 for models without, and how many of them running
    requests have reserved.

    kv_dir_capacity, kv_dir_bytes: the most bytes of the files in which rank 0 keeps pages, 0 without such files, and
    how many they have. kv_dir_written, kv_dir_read, kv_dir_refused: totals since the start of the pages that rank 0 has
    written, has read, and could not write or found damaged.

    speaking: requests that speak or wait for it. speech_frames, speech_samples: totals since the start. talker_pages,
    talker_pages_used: pages of the talker's cache, 0 for models that do not speak, and how many of them are in use.

    transfer_slots, transfer_slots_used: slots through which prefill ranks give pages, 0 elsewhere, and how many of them
    requests have pinned, of the kind of which most are. given_pages: total since the start. least_given: the fewest
    tokens of a prompt of which prefill ranks give anything. taken_pages, taken_bytes, missed_prompts: totals of decode
    ranks: the pages that they have taken, their bytes with all heads, and the prompts of which a page was gone.

    drafted_tokens, accepted_tokens: totals since the start of the tokens that were drafted and checked, and of those
    that were right.
    """

    context_length: int
    cache_tokens: int
    cache_used: float = 0.0
    running: int = 0
    waiting: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    state_slots: int = 0
    snapshots: int = 0
    source_pages: int = 0
    source_pages_used: int = 0
    queried_tokens: int = 0
    hit_tokens: int = 0
    speaking: int = 0
    speech_frames: int = 0
    speech_samples: int = 0
    talker_pages: int = 0
    talker_pages_used: int = 0
    window_pages: int = 0
    window_pages_used: int = 0
    kv_dir_capacity: int = 0
    kv_dir_bytes: int = 0
    kv_dir_written: int = 0
    kv_dir_read: int = 0
    kv_dir_refused: int = 0
    transfer_slots: int = 0
    transfer_slots_used: int = 0
    given_pages: int = 0
    least_given: int = 0
    taken_pages: int = 0
    taken_bytes: int = 0
    missed_prompts: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    def __add__(self, other: "EngineState") -> "EngineState":
        """Return the state of two engines taken as one: sums, and the shorter context length."""
        both = {name: getattr(self, name) + getattr(other, name) for name in self.__struct_fields__}
        used = self.cache_used * self.cache_tokens + other.cache_used * other.cache_tokens
        both["context_length"] = min(self.context_length, other.context_length)
        both["cache_used"] = used / both["cache_tokens"] if both["cache_tokens"] else 0.0
        return EngineState(**both)
