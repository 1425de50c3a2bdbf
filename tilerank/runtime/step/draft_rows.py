"""Chunks with drafted tokens as rows of a decode step.

A chunk with n drafts becomes n + 1 chunks of one token, which share the page tables of their sequence. The keys and
values of all rows are stored before any of them attends, and row j attends to the tokens up to its own, as a decode
step after j accepted drafts would. The bits of its logits are therefore those of that step. Chunks of one sequence have
the same slot for states, by which layers with states find its drafts (kernels/delta.py).
"""

import msgspec

from ..protocol.rank_messages import Chunk, Step


def separate_drafts(step: Step) -> Step:
    """Return a step in which every chunk with drafts is as many chunks as it has tokens, with one token each."""
    if not any(chunk.drafts for chunk in step.chunks):
        return step
    chunks = [one for chunk in step.chunks for one in (_rows(chunk) if chunk.drafts else [chunk])]
    slots = [slot for chunk, slot in zip(step.chunks, step.state_slots, strict=False) for _ in range(1 + chunk.drafts)]
    return msgspec.structs.replace(step, chunks=chunks, state_slots=slots)


def _rows(chunk: Chunk) -> list[Chunk]:
    return [
        Chunk(chunk.sequence, index, [token_id], [], 1, shift=chunk.shift)
        for index, token_id in enumerate(chunk.token_ids, chunk.start)
    ]
