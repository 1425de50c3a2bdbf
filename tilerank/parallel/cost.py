"""What a layer reads and computes: figures that layers report of themselves, for plans, benchmarks and metrics.

No torch, so that a command can use these figures before it starts ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Work:
    """Bytes to read from memory, and operations (a product and a sum are two) by the type of their operands.

    Each operand type has a peak rate of its own, and so have `updated` bytes, which are read and written in place: a
    byte of memory counts twice there.
    """

    nbytes: float = 0.0
    bf16: float = 0.0
    int8: float = 0.0
    fp32: float = 0.0
    updated: float = 0.0

    @property
    def flops(self) -> float:
        return self.bf16 + self.int8 + self.fp32

    def __add__(self, other: Work) -> Work:
        return Work(
            self.nbytes + other.nbytes,
            self.bf16 + other.bf16,
            self.int8 + other.int8,
            self.fp32 + other.fp32,
            self.updated + other.updated,
        )

    def __mul__(self, times: float) -> Work:
        return Work(self.nbytes * times, self.bf16 * times, self.int8 * times, self.fp32 * times, self.updated * times)


@dataclass(frozen=True)
class ExpertBytes:
    """Weights of experts: `nbytes` of all experts together, of which one token chooses the fraction `share`."""

    nbytes: int
    share: float

    def chosen_by(self, tokens: int) -> float:
        """Expected number of bytes read, if each token chooses uniformly and independently."""
        return self.nbytes * (1 - (1 - self.share) ** tokens)


@dataclass(frozen=True)
class Products:
    """Products of each token with the weights of one format (`Layout.format`).

    read: bytes of weights that every step reads. token: operations for each token. of_experts: the weights are those of
    experts, whose bytes are not in `read`.
    """

    format: str
    read: int
    token: Work
    of_experts: bool = False


@dataclass(frozen=True)
class Cost:
    """What a step reads and computes in one or more layers, on one rank.

    read: bytes of weights that every step reads. experts: weights of which a step reads the chosen experts alone, one
    entry for each share. token: operations for each token. pair: operations for each pair of a query and a key that it
    sees. products: the parts of `read` and `token` that are products with packed weights, by their format.
    elementwise: bytes that norms, rotations and other kernels between products read and write for each token, most of
    them in caches.
    """

    read: int = 0
    experts: tuple[ExpertBytes, ...] = ()
    token: Work = Work()
    pair: Work = Work()
    products: tuple[Products, ...] = field(default=(), compare=False)
    elementwise: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return self._plus(other, 1)

    def __sub__(self, other: Cost) -> Cost:
        return self._plus(other, -1)

    def _plus(self, other: Cost, sign: int) -> Cost:
        experts = {part.share: part.nbytes for part in self.experts}
        for part in other.experts:
            experts[part.share] = experts.get(part.share, 0) + sign * part.nbytes
        return Cost(
            self.read + sign * other.read,
            tuple(ExpertBytes(nbytes, share) for share, nbytes in experts.items() if nbytes),
            self.token + other.token * sign,
            self.pair + other.pair * sign,
            _sum_of_products(self.products, other.products, sign),
            self.elementwise + sign * other.elementwise,
        )

    @staticmethod
    def total(costs: Iterable[Cost]) -> Cost:
        return sum(costs, start=Cost())

    def work(self, tokens: int, pairs: float) -> Work:
        """Operations of `tokens` tokens that see `pairs` keys together, and the bytes of the experts they choose."""
        chosen = sum(part.chosen_by(tokens) for part in self.experts)
        return self.token * tokens + self.pair * pairs + Work(chosen)


def _sum_of_products(some: Iterable[Products], others: Iterable[Products], sign: int) -> tuple[Products, ...]:
    """Add, or with sign -1 subtract, products by their format."""
    found = {(part.format, part.of_experts): part for part in some}
    for part in others:
        key = part.format, part.of_experts
        before = found.get(key, Products(part.format, 0, Work(), part.of_experts))
        found[key] = replace(before, read=before.read + sign * part.read, token=before.token + part.token * sign)
    return tuple(part for part in found.values() if part.read or part.token.flops)


OPERATIONS_PER_BYTE = 100
"""Operations that a rank computes in the time of reading a byte: between servers with AMX and those with AVX-512."""

COLLECTIVE_BYTES = 1 << 20
"""Bytes that a rank reads in the time of a collective of few bytes in shared memory, about 5 us at 200 GB/s."""


def context_split_pays(whole: Work, part: Work, exchanged: int) -> bool:
    """Return whether ranks that all hold a context attend to it faster if each reads a part for the heads of all.

    whole, part: what the slowest rank reads and computes of it for its own heads, and of a part for all heads.
    exchanged: bytes of queries and results that every rank then reads, in three collectives. The figures above are the
    same everywhere, because all ranks have to decide alike.
    """

    def bytes_of(work: Work) -> float:
        return max(work.nbytes, work.flops / OPERATIONS_PER_BYTE)

    return bytes_of(part) + exchanged + 3 * COLLECTIVE_BYTES < bytes_of(whole)
