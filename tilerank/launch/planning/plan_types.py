"""The records of a plan: cuts of dimensions, the memory of ranks and nodes, and the reason if it does not fit."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property

from tilerank.parallel.shard import Span
from tilerank.runtime.protocol.sizes import most_tokens, num_states, num_window_tokens
from tilerank.runtime.protocol.speculative import Speculative

from ..host.placement import RankPlacement
from ..text import count, size

RANK_OVERHEAD = 300 << 20
"""Bytes of a rank beside weights and cache: interpreter, libraries, activations, the block that is being loaded."""


@dataclass(frozen=True)
class Dimension:
    """A dimension that is cut: `total` items in units of `unit`, and each rank's part.

    waste: the largest part relative to an equal one, minus 1.
    """

    name: str
    total: int
    unit: int
    spans: tuple[Span, ...]
    waste: float

    @property
    def units(self) -> int:
        return -(-self.total // self.unit)


@dataclass(frozen=True)
class Attention:
    """The strategy by which heads are cut. waste: what the slowest rank reads beyond a perfect cut, as a fraction.

    other_waste: the same with the other strategy; None where that is impossible.
    """

    strategy: str
    waste: float
    other_waste: float | None


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """Bytes that ranks hold. Those of several ranks add up; times a share, they are the part on one memory node."""

    weights: float = 0
    cache_per_token: float = 0
    """In layers without a window."""
    window_per_token: float = 0
    """In layers with a window; 0 for models without."""
    state: float = 0
    """One state of a sequence; 0 for models without."""
    media: float = 0
    """The limit for encoded pictures, videos and sound."""
    speech: float = 0
    """The limit for sequences that speak."""
    overhead: float = 0
    """Processes: see RANK_OVERHEAD."""

    def __add__(self, other: MemoryUse) -> MemoryUse:
        return MemoryUse(**{name: getattr(self, name) + getattr(other, name) for name in _KINDS})

    def __mul__(self, share: float) -> MemoryUse:
        return MemoryUse(**{name: getattr(self, name) * share for name in _KINDS})

    @property
    def fixed(self) -> float:
        """Bytes that do not depend on the size of the KV cache, those of processes aside."""
        return self.weights + self.media + self.speech

    @property
    def caches(self) -> bool:
        """Whether more cached tokens take more bytes."""
        return self.cache_per_token + self.window_per_token > 0

    def kv_bytes(self, tokens: int, window: int) -> float:
        """Return the bytes of the keys and values of a cache of so many tokens. window: as in Plan."""
        return self.cache_per_token * tokens + self.window_per_token * num_window_tokens(tokens, window)

    def cache_bytes(self, tokens: int, window: int) -> float:
        """Return the bytes of a cache of so many tokens, with its states."""
        states = self.state * num_states(tokens) if self.state else 0
        return self.kv_bytes(tokens, window) + states

    def need(self, tokens: int, window: int) -> float:
        """Return the bytes of a cache of so many tokens, and all else."""
        return self.fixed + self.cache_bytes(tokens, window) + self.overhead

    def tokens(self, nbytes: float, window: int) -> int:
        """Return how many cached tokens fit into `nbytes`, with all that belongs to them."""
        return most_tokens(nbytes, lambda tokens: self.cache_bytes(tokens, window))


_KINDS = tuple(field.name for field in fields(MemoryUse))


@dataclass(frozen=True)
class RankShare(MemoryUse):
    """The placement of one rank, and its memory.

    encoder: bytes of the weights that encode media, a part of `weights`. speaker, draft_model: the same of those that
    speak, and of a model that drafts.
    """

    placement: RankPlacement
    encoder: int = 0
    speaker: int = 0
    draft_model: int = 0


@dataclass(frozen=True)
class NodeShare(MemoryUse):
    """The memory of ranks on one memory node.

    ranks: those that run near the node. total: the node's memory, divided by the number of replicas that share it.
    free: includes page cache that can be dropped.
    """

    node: int
    ranks: tuple[int, ...]
    total: int
    free: int


@dataclass(frozen=True)
class Plan:
    """The cut of one replica of a model over `tp` ranks, and the memory of those on this host.

    expected_tokens: cached tokens that a step reads, for the cost rule of heads. cached_tokens: size of the KV cache.
    cache_reason: the limit that this size follows from; None if the command line gave the size. states: how many states
    of sequences there is room for, 0 for models without. window: that of the layers that have one, 0 if none has.
    context_length: the longest sequence. speculative: which drafts are made.
    """

    model: str
    model_type: str
    num_layers: int
    parameters: int
    dtype: str
    """The dtype of activations, and of weights unless `quantization` is int8, int4 or fp8."""
    quantization: str | None
    activation_bits: int
    """Bits of the activations that projections multiply, to which they are rounded if `dtype` has more."""
    kv_cache_dtype: str
    tp: int
    expected_tokens: int
    cached_tokens: int
    cache_reason: str | None
    states: int
    window: int
    context_length: int
    speculative: Speculative
    dimensions: tuple[Dimension, ...]
    splits_contexts: bool | None
    """Whether every rank reads a part of a context for the heads of all; None where ranks cannot."""
    attention: Attention | None
    ranks: tuple[RankShare, ...]
    nodes: tuple[NodeShare, ...]
    group_available: int | None
    """Bytes that the control group may still allocate; None where it has no limit."""
    notes: tuple[str, ...]
    remedy: str | None = None
    """The option with which a model that is refused would fit, if one alone suffices."""

    @property
    def form(self) -> str:
        """The format of the weights."""
        return self.quantization or self.dtype

    @property
    def bits_per_weight(self) -> float:
        """Bits that all ranks hold for each of the model's own weights: scales, copies and padding included."""
        own = self.memory.weights - sum(rank.draft_model for rank in self.ranks)
        return 8 * own * self.tp / len(self.ranks) / self.parameters

    @cached_property
    def memory(self) -> MemoryUse:
        """The memory of all ranks of this host."""
        return sum(self.ranks, MemoryUse())

    @property
    def need(self) -> float:
        """Bytes that all ranks of this host need together."""
        return self.memory.need(self.cached_tokens, self.window)

    @property
    def window_tokens(self) -> int:
        """Tokens that layers with a window have room for."""
        return num_window_tokens(self.cached_tokens, self.window)

    @property
    def free(self) -> int:
        return sum(node.free for node in self.nodes)

    @property
    def available(self) -> int:
        """Bytes that this host has for the ranks: its free memory, or less if the control group allows less."""
        return self.free if self.group_available is None else min(self.free, self.group_available)

    @property
    def token_room(self) -> int:
        """Cached tokens that fit beside the weights on every node and within the control group, with their states."""
        shares: list[tuple[MemoryUse, int]] = [(node, node.free) for node in self.nodes if node.caches]
        if self.group_available is not None and self.memory.caches:
            shares.append((self.memory, self.group_available))
        rooms = [held.tokens(free - held.fixed - held.overhead, self.window) for held, free in shares]
        return max(0, min(rooms, default=0))

    def refusal(self) -> str | None:
        """Return why this cannot be loaded, in one sentence with numbers; None if it can."""
        remedy = "" if self.remedy is None else f"; it fits with {self.remedy}"
        if self.need <= self.available:
            if self.cache_reason is None or self.cached_tokens:
                return None
            return (
                f"{self.model}: no room for a KV cache: {self.cache_reason}; a size given by --max-total-tokens is "
                f"held against the host's memory as a whole{remedy}"
            )
        memory = self.memory
        kv_bytes = memory.kv_bytes(self.cached_tokens, self.window)
        cache = f"{size(kv_bytes)} of KV cache for {self.cached_tokens:,} tokens, "
        return (
            f"{self.model}: not enough memory for {count(len(self.ranks), 'rank')}: "
            f"{size(memory.weights)} of {self.form} weights, "
            f"{cache if self.cached_tokens else ''}"
            f"{f'{size(memory.state * self.states)} for {self.states:,} states, ' if self.states else ''}"
            f"{f'{size(memory.media)} for media, ' if memory.media else ''}"
            f"{f'{size(memory.speech)} for speech, ' if memory.speech else ''}"
            f"{size(memory.overhead)} for the processes, "
            f"{size(self.need)} together, but "
            f"{'this host has' if self.available == self.free else 'the control group allows'} {size(self.available)}"
            f"{remedy}"
        )


@dataclass(frozen=True)
class ReplicaPlans:
    """The plans of all replicas of a model on this host, which share its memory. `reason`: why there are this many, if
    the command line left that open. `roles`: of the groups of each replica, which have a plan each, one after the
    other; empty for replicas of one group."""

    plans: tuple[Plan, ...]
    reason: str | None = None
    roles: tuple[str, ...] = ()

    @property
    def dp(self) -> int:
        return len(self.plans) // max(len(self.roles), 1)

    @property
    def names(self) -> tuple[str, ...]:
        """The groups of all replicas, in the order of the plans; empty for replicas of one group."""
        ends = [f" of replica {number}" if self.dp > 1 else "" for number in range(self.dp)]
        return tuple(role + end for end in ends for role in self.roles)

    @property
    def need(self) -> float:
        """Bytes of all ranks of all replicas."""
        return sum(plan.need for plan in self.plans)

    @property
    def available(self) -> int:
        """Bytes that this host has for all replicas together."""
        return self.plans[0].available

    def node_need(self, index: int) -> float:
        """Bytes that all replicas put on node number `index` of `nodes`."""
        return sum(plan.nodes[index].need(plan.cached_tokens, plan.window) for plan in self.plans)

    def refusal(self) -> str | None:
        """Return why this cannot be loaded, in one sentence; None if it can."""
        for plan in self.plans:
            if (refusal := plan.refusal()) is not None:
                return refusal
        if self.need <= self.available:
            return None
        whose = count(self.dp, "replica")
        if self.roles:
            whose = " and ".join(self.roles) + (f" of {whose}" if self.dp > 1 else "")
        return (
            f"{self.plans[0].model}: not enough memory for {whose}: {size(self.need)} needed, "
            f"{size(self.available)} available"
        )
