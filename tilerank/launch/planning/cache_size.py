"""The size of the KV cache: as many tokens as --mem-fraction-static leaves beside weights and encoded media, with the
states of sequences that belong to them (runtime/lead/states.py)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tilerank.runtime.protocol.sizes import TOKENS_PER_STATE

from ..host.cgroup import CgroupLimits
from ..text import size
from .plan_types import MemoryUse, NodeShare

if TYPE_CHECKING:
    from tilerank.parallel.group import Group


@dataclass(frozen=True)
class CacheSize:
    """The size of the KV cache in tokens, and the limit that it follows from, as a sentence."""

    tokens: int
    reason: str


def largest(
    form: str,
    memory: MemoryUse,
    nodes: Sequence[NodeShare],
    limits: CgroupLimits,
    fraction: float,
    *,
    replicas: int,
    requests: int,
    context: int,
    window: int,
) -> CacheSize:
    """Return the largest cache that fits everywhere, in whole pages; 0 tokens if there is no room for a page.

    form: the format of the weights, for the sentence. memory, nodes: what all ranks of this host hold, and where.
    Weights, encoded media and caches may take `fraction` of a node's memory, and of each replica's part of the control
    group's limit, and no more than is free. More than `requests` requests of `context` tokens never run at a time.
    window: as in Plan.
    """
    from tilerank.kernels.kv_pages import PAGE_TOKENS

    found = [CacheSize(requests * context, f"{requests} requests of {context:,} tokens, no more run at a time")]
    for node in nodes:
        if node.caches:
            held = replace(
                node,
                cache_per_token=math.ceil(node.cache_per_token),
                window_per_token=math.ceil(node.window_per_token),
                state=math.ceil(node.state),
            )
            found += _limits(f"node {node.node}", form, held, node.total, node.free, fraction, window)
    group, available = limits.memory_limit, limits.memory_available
    if group is not None and available is not None and memory.caches:
        found += _limits("the control group", form, memory, group // replicas, available, fraction, window)
    tightest = min(found, key=lambda limit: limit.tokens)
    return CacheSize(max(0, tightest.tokens // PAGE_TOKENS * PAGE_TOKENS), tightest.reason)


def _limits(
    where: str, form: str, held: MemoryUse, total: int, free: int, fraction: float, window: int
) -> Iterator[CacheSize]:
    weights, each = f"{size(held.weights)} of {form} weights", f"at {size(held.cache_per_token)} a token"
    if held.window_per_token:
        each += f" and {size(held.window_per_token)} for each that layers with a window have room for"
    if held.state:
        each += f" and {size(held.state)} for the states of every {TOKENS_PER_STATE:,} tokens"
    if held.media:
        weights += f", {size(held.media)} for media"
    if held.speech:
        weights += f", {size(held.speech)} for speech"
    share = int(fraction * total)
    yield CacheSize(
        held.tokens(share - held.fixed, window),
        f"{where}: --mem-fraction-static {fraction:g} of {size(total)} is {size(share)}, less {weights}, {each}",
    )
    yield CacheSize(
        held.tokens(free - held.fixed - held.overhead, window),
        f"{where}: {size(free)} free, less {weights} and {size(held.overhead)} for the processes, {each}",
    )


def agreed(group: Group, tokens: int | None) -> int:
    """Return the smallest `tokens` of all hosts. All ranks call this; one rank of each host gives a number."""
    import torch

    room = torch.tensor([torch.iinfo(torch.int64).max if tokens is None else tokens])
    return int(group.all_gather(room).min())
