"""Collectives of a group of ranks: one interface over shared memory, gloo and MPI.

Every transport sums in rank order with fp32 accumulation and rounds once. All ranks therefore get the same bits, and
the result does not depend on the transport.
"""

import contextlib
import datetime
import logging
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroupGloo, Store

from tilerank.kernels import ops

from .errors import GroupError
from .watch import Reason, Watch

logger = logging.getLogger(__name__)

CHUNK = 4 << 20  # bytes per rank in one exchange of a large sum; bounds temporary memory


Step = tuple[str, int, Tensor]  # "send" or "receive", the peer, its bytes


class Group(Protocol):
    """The collectives of `size` ranks. All ranks call the same ones in the same order with the same shapes and dtypes.

    Every wait has a deadline and watches the peers. GroupError names the lost rank; every later call then fails, too.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def waited_s(self) -> float:
        """Return the seconds that this rank has waited for others in collectives so far. gloo and MPI count the time of
        the transfer as well."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of fp32 or bf16 `x` over the ranks, same bits on all. A contiguous `x` is overwritten."""

    def add_rms_norm(
        self,
        x: Tensor,
        residual: Tensor,
        weight: Tensor,
        eps: float,
        *,
        zero_centered: bool = False,
        whole: bool = False,
    ) -> Tensor:
        """Return ops.add_rms_norm of the sum of `x` over the ranks, same bits on all. `x` may be overwritten.

        Each rank updates only those rows of `residual` that it needs for its part of this call; the other rows become
        stale, unless the call asks for the `whole` residual. The next call with these shapes needs the same rows.
        """

    def all_gather(self, x: Tensor) -> Tensor:
        """Return `[size, *x.shape]`, the `x` of every rank. Any dtype."""

    def gather_columns(self, x: Tensor, starts: Tensor, n: int) -> Tensor:
        """Return [m, n] fp32: columns starts[r] to starts[r + 1] are the first columns of the `x` [m, w] of rank r.

        starts: [size + 1] int64 from 0 to n, steps of at most w. `w` is the same on all ranks.
        """

    def broadcast(self, x: Tensor, root: int = 0) -> Tensor:
        """Return the `x` of rank `root`. Any dtype. A contiguous `x` is overwritten and returned."""

    def barrier(self) -> None:
        """Return once every rank has called."""

    def close(self) -> None:
        """Release the transport; no collective may follow."""


@runtime_checkable
class RecordableGroup(Group, Protocol):
    """A group whose collectives can be part of a recorded step (kernels/graph.py): each is a kernel, or a cut between
    two parts of the recording."""

    def replay(self, run: Callable[[], object]) -> None:
        """Call `run`, which replays recorded collectives. Raises GroupError where they would."""


class SingleGroup:
    """A group of one."""

    rank = 0
    size = 1
    waited_s = 0.0

    def all_reduce(self, x: Tensor) -> Tensor:
        return checked_sum_dtype(x)

    def add_rms_norm(
        self,
        x: Tensor,
        residual: Tensor,
        weight: Tensor,
        eps: float,
        *,
        zero_centered: bool = False,
        whole: bool = False,
    ) -> Tensor:
        return ops.add_rms_norm(self.all_reduce(x), residual, weight, eps, zero_centered=zero_centered)

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


class PairwiseGroup:
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
        self.waited_s = 0.0
        self._names = tuple(names)
        self._step = 0

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

    def add_rms_norm(
        self,
        x: Tensor,
        residual: Tensor,
        weight: Tensor,
        eps: float,
        *,
        zero_centered: bool = False,
        whole: bool = False,
    ) -> Tensor:
        return ops.add_rms_norm(self.all_reduce(x), residual, weight, eps, zero_centered=zero_centered)

    def all_gather(self, x: Tensor) -> Tensor:
        out = torch.empty((self.size, *x.shape), dtype=x.dtype)
        if x.numel():
            self._exchange(as_bytes(x), as_bytes(out).view(self.size, -1), "all_gather")
        return out

    def gather_columns(self, x: Tensor, starts: Tensor, n: int) -> Tensor:
        return ops.join_columns(self.all_gather(checked_columns(x, starts, self.size)), starts, n)

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
        self.waited_s += time.monotonic() - began

    def _stuck(self, peer: int) -> None:
        self._watch.fail(self._names[peer], Reason.STUCK, self._step)

    def _transfer(self, steps: Sequence[Step], doing: str) -> None:
        """Run all sends and receives at once and return when they are done. GroupError names the rank at fault."""
        raise NotImplementedError


class GlooGroup(PairwiseGroup):
    """A group over TCP, through gloo. `address`: the local address to bind, at which the other ranks reach this one."""

    def __init__(
        self,
        store: Store,
        rank: int,
        address: str,
        timeout_s: float,
        watch: Watch,
        names: Sequence[int],
    ) -> None:
        super().__init__(rank, len(names), timeout_s, watch, names)
        gloo: Any = ProcessGroupGloo  # its type stubs lack the members used here
        options = gloo._Options()
        options._timeout = datetime.timedelta(seconds=timeout_s)
        options._threads = 1
        # The address is explicit: by default gloo resolves the host's name, which is often a loopback address.
        options._devices = [gloo.create_device(hostname=address)]
        try:
            backends = [gloo(store, rank, self.size, options)]
        except RuntimeError as error:
            watch.check("connecting gloo")
            raise GroupError(f"rank {names[rank]}: gloo could not connect the ranks: {_first_line(error)}") from error
        self._backends: list[Any] = backends
        # An interpreter that exits while gloo's threads run is aborted.
        self._release = weakref.finalize(self, _release, backends)

    def close(self) -> None:
        self._release()

    def _transfer(self, steps: Sequence[Step], doing: str) -> None:
        if not self._backends:
            raise GroupError(f"{doing} in a group that was closed")
        backend, deadline = self._backends[0], time.monotonic() + self._timeout_s
        current = self.rank
        try:
            works = []
            for kind, current, buffer in steps:
                start = backend.send if kind == "send" else backend.recv
                works.append((current, start([buffer], current, 0)))
            for current, work in works:  # noqa: B007
                work.wait(datetime.timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
        except RuntimeError as error:
            raise self._lost(current, doing, error) from error

    def _lost(self, peer: int, doing: str, error: RuntimeError) -> GroupError:
        """Return the error. gloo distinguishes a timeout only by its text; the watch has the first lost rank."""
        if "Timed out" in str(error):
            self._stuck(peer)
        elif not self._watch.await_failure():
            logger.debug("gloo: %s", _first_line(error))
            self._watch.fail(self._names[peer], Reason.GONE)
        return self._watch.error(doing)


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


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _release(backends: list[Any]) -> None:
    """Dropping the last reference joins gloo's threads."""
    for backend in backends:
        with contextlib.suppress(RuntimeError):  # the group is already broken
            backend.shutdown()
    backends.clear()
