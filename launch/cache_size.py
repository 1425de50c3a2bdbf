"""How many tokens the KV cache holds: as many as --mem-fraction-static leaves room for beside the weights."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .plan_text import size
from .start import whole_number

if TYPE_CHECKING:
    from tilerank.parallel.group import Group

    from .cgroup import Limits
    from .plan import NodeShare

DEFAULT_FRACTION = 0.8


def add_arguments(parser: argparse._ActionsContainer, *option: str, low: int = 1) -> None:
    """`option`: further names of --max-total-tokens, of at least `low`."""
    parser.add_argument(
        "--mem-fraction-static",
        type=_fraction,
        default=DEFAULT_FRACTION,
        metavar="F",
        help="share of each node's memory, and of the control group's limit, that weights and KV cache may take "
        f"together (default: {DEFAULT_FRACTION})",
    )
    parser.add_argument(
        "--max-total-tokens",
        *option,
        type=whole_number(low),
        metavar="N",
        help="tokens in the KV cache, of all requests together (default: as many as there is room for)",
    )


def _fraction(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share of the memory, above 0 and at most 1")
    return value


@dataclass(frozen=True)
class CacheSize:
    """`tokens` of the KV cache, and the arithmetic behind it."""

    tokens: int
    reason: str


@dataclass(frozen=True)
class Demand:
    """What the ranks of a host hold, in bytes. `form`: what their weights are held as."""

    form: str
    weights: int
    cache_per_token: int
    overhead: int


def largest(
    demand: Demand,
    nodes: Sequence[NodeShare],
    limits: Limits,
    fraction: float,
    *,
    replicas: int,
    requests: int,
    context: int,
) -> CacheSize:
    """The most tokens that fit everywhere, in whole pages; 0 where there is no room for one.

    `fraction` is of all memory of a node, and of the part of the control group's limit for each of the host's
    `replicas`; neither is taken beyond what is free.
    No more than `requests` requests of `context` tokens run at a time.
    """
    from tilerank.kernels.attention import KV_BLOCK

    found = [CacheSize(requests * context, f"{requests} requests of {context:,} tokens, no more run at a time")]
    for node in nodes:
        if node.cache_per_token:
            held = Demand(demand.form, node.weights, math.ceil(node.cache_per_token), node.overhead)
            found += _limits(f"node {node.node}", held, node.total, node.free, fraction)
    group, available = limits.memory_limit, limits.memory_available
    if group is not None and available is not None and demand.cache_per_token:
        found += _limits("the control group", demand, group // replicas, available, fraction)
    tightest = min(found, key=lambda limit: limit.tokens)
    return CacheSize(max(0, tightest.tokens // KV_BLOCK * KV_BLOCK), tightest.reason)


def _limits(where: str, held: Demand, total: int, free: int, fraction: float) -> Iterator[CacheSize]:
    weights, each = f"{size(held.weights)} of {held.form} weights", f"at {size(held.cache_per_token)} a token"
    share = int(fraction * total)
    yield CacheSize(
        (share - held.weights) // held.cache_per_token,
        f"{where}: --mem-fraction-static {fraction:g} of {size(total)} is {size(share)}, less {weights}, {each}",
    )
    yield CacheSize(
        (free - held.weights - held.overhead) // held.cache_per_token,
        f"{where}: {size(free)} free, less {weights} and {size(held.overhead)} for the processes, {each}",
    )


def agreed(group: Group, tokens: int | None) -> int:
    """What all hosts have room for. Every rank calls this; one of each host says the `tokens` of its host."""
    import torch

    said = torch.tensor([torch.iinfo(torch.int64).max if tokens is None else tokens])
    return int(group.all_gather(said).min())
