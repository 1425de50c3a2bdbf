"""Collectives of a group of ranks: one interface over shared memory, gloo and MPI.

Every transport sums in rank order with fp32 accumulation and rounds once. All ranks therefore get the same bits, and
the result does not depend on the transport.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tilerank.kernels import ops

from .errors import GroupError
from .watch import Reason, Watch

CHUNK = 4 << 20  # bytes per rank in one exchange of a large sum; bounds temporary memory

Step = tuple[str, int, Tensor]  # "send" or "receive", the peer, its bytes


class Group(ABC):
    """The collectives of `size` ranks. All ranks call the same ones in the same order with the same shapes and dtypes.

    Every wait has a deadline and watches the peers. GroupError names the lost rank; every later call then fails, too.
    """

    rank: int
    size: int

    @property
    @abstractmethod
    def waited_s(self) -> float:
        """Return the seconds that this rank has waited for others in collectives so far. gloo and MPI count the time of
        the transfer as well."""

    @abstractmethod
    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of fp32 or bf16 `x` over the ranks, same bits on all. A contiguous `x` is overwritten."""

    def add_rms_norm(
        self,
        x: Tensor,
        residual: Tensor,
        weight: Tensor,
        eps: float,
        *,
        post_weight: Tensor | None = None,
        scale: Tensor | None = None,
        zero_centered: bool = False,
        whole: bool = False,
    ) -> Tensor:
        """Return ops.add_rms_norm of the sum of `x` over the ranks, same bits on all. `x` may be overwritten.

        Each rank may update only those rows of `residual` that it needs for its part of this call; the other rows
        become stale, unless the call asks for the `whole` residual. The next call with these shapes needs the same
        rows.
        """
        total = self.all_reduce(x)
        return ops.add_rms_norm(
            total, residual, weight, eps, post_weight=post_weight, scale=scale, zero_centered=zero_centered
        )

    @abstractmethod
    def all_gather(self, x: Tensor) -> Tensor:
        """Return `[size, *x.shape]`, the `x` of every rank. Any dtype."""

    def gather_columns(self, x: Tensor, starts: Tensor, n: int) -> Tensor:
        """Return [m, n] fp32: columns starts[r] to starts[r + 1] are the first columns of the `x` [m, w] of rank r.

        starts: [size + 1] int64 from 0 to n, steps of at most w. `w` is the same on all ranks.
        """
        return ops.join_columns(self.all_gather(checked_columns(x, starts, self.size)), starts, n)

    @abstractmethod
    def broadcast(self, x: Tensor, root: int = 0) -> Tensor:
        """Return the `x` of rank `root`. Any dtype. A contiguous `x` is overwritten and returned."""

    @abstractmethod
    def barrier(self) -> None:
        """Return once every rank has called."""

    @abstractmethod
    def close(self) -> None:
        """Release the transport; no collective may follow."""


class RecordableGroup(Group):
    """A group whose collectives can be part of a recorded step (kernels/graph.py): each is a kernel, or a cut between
    two parts of the recording."""

    @abstractmethod
    def replay(self, run: Callable[[], object]) -> None:
        """Call `run`, which replays recorded collectives. Raises GroupError where they would."""


class SingleGroup(RecordableGroup):
    """A group of one."""

    rank = 0
    size = 1
    waited_s = 0.0

    def all_reduce(self, x: Tensor) -> Tensor:
        return checked_sum_dtype(x)

    def all_gather(self, x: Tensor) -> Tensor:
        return x.unsqueeze(0)

    def gather_columns(self, x: Tensor, starts: Tensor, n: int) -> Tensor:
        return checked_columns(x, starts, self.size)[:, :n]

    def broadcast(self, x: Tensor, root: int = 0) -> Tensor:
        checked_root(root, self.size)
        return x

    def replay(self, run: Callable[[], object]) -> None:
        run()

    def barrier(self) -> None:
        return

    def close(self) -> None:
        return


class PairwiseGroup(Group):
    """Every rank sends its data to every other rank and sums by itself; a subclass moves the bytes.

    The transport's own all_reduce is not used: gloo's accumulates bf16 in bf16, and each transport sums in an order of
    its own. A ring is not used either: with one receive per peer, a timeout shows which rank does not answer.

    `names`: the ranks as errors name them, where the group is a part of a larger one (the leaders of the hosts).
    """

    def __init__(self, rank: int, size: int, timeout_s: float, watch: Watch, names: Sequence[int]) -> None:
        self.rank = rank
        self.size = size
        self._timeout_s = timeout_s
        self._watch = watch
        self._waited_s = 0.0
        self._names = tuple(names)
        self._step = 0

    @property
    def waited_s(self) -> float:
        return self._waited_s

    def all_reduce(self, x: Tensor) -> Tensor:
        checked_sum_dtype(x)
        out = x.contiguous()
        flat = out.view(-1)
        step = CHUNK // x.element_size()
        for start in range(0, flat.numel(), step):
            part = flat[start : start + step]
            parts = torch.empty((self.size, part.numel()), dtype=x.dtype)
            self._exchange(as_bytes(part), as_bytes(parts).view(self.size, -1), "all_reduce")
            sum_in_rank_order(parts, part)
        return out

    def all_gather(self, x: Tensor) -> Tensor:
        out = torch.empty((self.size, *x.shape), dtype=x.dtype)
        if x.numel():
            self._exchange(as_bytes(x), as_bytes(out).view(self.size, -1), "all_gather")
        return out

    def broadcast(self, x: Tensor, root: int = 0) -> Tensor:
        checked_root(root, self.size)
        out = x.contiguous()
        flat = as_bytes(out)
        if flat.numel():
            others = [peer for peer in range(self.size) if peer != root]
            steps = [("send", peer, flat) for peer in others] if self.rank == root else [("receive", root, flat)]
            self._move(steps, "broadcast")
        return out

    def barrier(self) -> None:
        token = torch.zeros(1, dtype=torch.uint8)
        self._exchange(token, torch.empty((self.size, 1), dtype=torch.uint8), "barrier")

    def _exchange(self, mine: Tensor, everyone: Tensor, doing: str) -> None:
        """Fill row r of `everyone` with what rank r passed as `mine`."""
        everyone[self.rank].copy_(mine)
        # Starting with the next rank spreads the load: otherwise all ranks would send to rank 0 first.
        order = [(self.rank + distance) % self.size for distance in range(1, self.size)]
        steps = [("receive", peer, everyone[peer]) for peer in order] + [("send", peer, mine) for peer in order]
        self._move(steps, doing)

    def _move(self, steps: Sequence[Step], doing: str) -> None:
        self._watch.check(doing)
        self._step += 1
        began = time.monotonic()
        self._transfer(steps, doing)
        self._waited_s += time.monotonic() - began

    def _stuck(self, peer: int) -> None:
        self._watch.fail(self._names[peer], Reason.STUCK, self._step)

    @abstractmethod
    def _transfer(self, steps: Sequence[Step], doing: str) -> None:
        """Run all sends and receives at once and return when they are done. GroupError names the rank at fault."""


def sum_in_rank_order(parts: Tensor, out: Tensor) -> None:
    """out[n] = parts[0] + parts[1] + ... of `parts[ranks, n]`, in fp32, rounded once. Every transport computes this."""
    total = parts[0].to(torch.float32, copy=True)
    for part in parts[1:]:
        total += part
    out.copy_(total)


def as_bytes(x: Tensor) -> Tensor:
    """Return the bytes of `x`, flat; a view if `x` is contiguous."""
    return x.contiguous().reshape(-1).view(torch.uint8)


def checked_sum_dtype(x: Tensor) -> Tensor:
    if x.dtype not in (torch.float32, torch.bfloat16):
        raise GroupError(f"all_reduce sums float32 and bfloat16; the tensor is {x.dtype}")
    return x


def checked_columns(x: Tensor, starts: Tensor, size: int) -> Tensor:
    if x.dtype != torch.float32 or x.ndim != 2 or starts.shape != (size + 1,):
        raise GroupError(
            f"gather_columns takes float32 rows and {size + 1} starts; found {x.dtype} of shape {list(x.shape)} "
            f"and starts of shape {list(starts.shape)}"
        )
    return x


def checked_root(root: int, size: int) -> None:
    if not 0 <= root < size:
        raise GroupError(f"broadcast from rank {root} in a group of {size}")
