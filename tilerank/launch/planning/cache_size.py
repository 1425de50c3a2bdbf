"""The size of the KV cache: as many tokens as --mem-fraction-static leaves beside weights and encoded media, with the
states of sequences that belong to them (runtime/lead/states.py)."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tilerank.runtime.protocol.prompt import MM_CACHE_BYTES
from tilerank.runtime.protocol.sizes import TOKENS_PER_STATE

from ..host.cgroup import CgroupLimits
from ..options.arguments import whole_number
from ..text import size
from .plan_types import MemoryUse, NodeShare

if TYPE_CHECKING:
    from tilerank.parallel.group import Group

DEFAULT_FRACTION = 0.8


def add_arguments(parser: argparse._ActionsContainer, *option: str, low: int = 1) -> None:
    """Add the options of the cache's size. option: further names of --max-total-tokens; low: its minimum."""
    parser.add_argument(
        "--mem-fraction-static",
        type=_fraction,
        default=DEFAULT_FRACTION,
        metavar="F",
        help="share of each node's memory, and of the control group's limit, that weights, KV cache, states and "
        f"encoded media may take together (default: {DEFAULT_FRACTION})",
    )
    parser.add_argument(
        "--max-total-tokens",
        *option,
        type=whole_number(low),
        metavar="N",
        help="tokens in the KV cache, of all requests together (default: as many as there is room for)",
    )
    parser.add_argument(
        "--mm-cache-gib",
        type=_gib,
        default=MM_CACHE_BYTES / (1 << 30),
        metavar="GIB",
        help="memory for encoded pictures and videos on each rank of a model that takes them, half of it for keys "
        "and values in models with cross-attention; those of one request "
        f"must fit (default: {MM_CACHE_BYTES >> 30})",
    )


def mm_cache_bytes(args: argparse.Namespace) -> int:
    """Return the bytes that encoded media may take on each rank."""
    return int(args.mm_cache_gib * (1 << 30))


def _gib(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1 << 20:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of GiB; expected 0 or more")
    return value


def _fraction(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share of the memory; expected above 0, at most 1")
    return value


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
) -> CacheSize:
    """Return the largest cache that fits everywhere, in whole pages; 0 tokens if there is no room for a page.

    form: the format of the weights, for the sentence. memory, nodes: what all ranks of this host hold, and where.
    Weights, encoded media and caches may take `fraction` of a node's memory, and of each replica's part of the control
    group's limit, and no more than is free. More than `requests` requests of `context` tokens never run at a time.
    """
    from tilerank.kernels.kv_pages import PAGE_TOKENS

    found = [CacheSize(requests * context, f"{requests} requests of {context:,} tokens, no more run at a time")]
    for node in nodes:
        if node.cache_per_token:
            held = replace(node, cache_per_token=math.ceil(node.cache_per_token), state=math.ceil(node.state))
            found += _limits(f"node {node.node}", form, held, node.total, node.free, fraction)
    group, available = limits.memory_limit, limits.memory_available
    if group is not None and available is not None and memory.cache_per_token:
        found += _limits("the control group", form, memory, group // replicas, available, fraction)
    tightest = min(found, key=lambda limit: limit.tokens)
    return CacheSize(max(0, tightest.tokens // PAGE_TOKENS * PAGE_TOKENS), tightest.reason)


def _limits(where: str, form: str, held: MemoryUse, total: int, free: int, fraction: float) -> Iterator[CacheSize]:
    weights, each = f"{size(held.weights)} of {form} weights", f"at {size(held.cache_per_token)} a token"
    if held.state:
        each += f" and {size(held.state)} for the states of every {TOKENS_PER_STATE:,} tokens"
    if held.media:
        weights += f", {size(held.media)} for media"
    if held.speech:
        weights += f", {size(held.speech)} for speech"
    share = int(fraction * total)
    yield CacheSize(
        held.tokens(share - held.fixed),
        f"{where}: --mem-fraction-static {fraction:g} of {size(total)} is {size(share)}, less {weights}, {each}",
    )
    yield CacheSize(
        held.tokens(free - held.fixed - held.overhead),
        f"{where}: {size(free)} free, less {weights} and {size(held.overhead)} for the processes, {each}",
    )


def agreed(group: Group, tokens: int | None) -> int:
    """Return the smallest `tokens` of all hosts. All ranks call this; one rank of each host gives a number."""
    import torch

    room = torch.tensor([torch.iinfo(torch.int64).max if tokens is None else tokens])
    return int(group.all_gather(room).min())
