"""How ranks add up: one face over shared memory, gloo and MPI.

Whatever carries the bytes, a sum is taken in rank order with fp32 accumulation and rounded once, so that every rank
holds the same bits and so that the transport cannot be told from the result.
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

CHUNK = 4 << 20  # bytes a rank contributes to one exchange of a large sum, so that temporary memory stays bounded


Step = tuple[str, int, Tensor]  # "send" or "receive", the peer, its bytes


class Group(Protocol):
    """The collectives of `size` ranks; all call the same ones in the same order with the same shapes and dtypes.

    Every wait has a deadline and looks at the peers: GroupError names the lost rank, and the group stays broken.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def waited_s(self) -> float:
        """Seconds that this rank has waited for others in collectives so far; with what their bytes took on the way,
        where the transport does not tell that apart."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum of fp32 or bf16 `x` over the ranks, same bits on all. A contiguous `x` is overwritten and returned."""

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
        """ops.add_rms_norm of the sum of `x` over the ranks, same bits on all; `x` may be overwritten.

        Of `residual`, each rank keeps up the rows that it needs for its part in this call; the others become stale, but
        for a call that wants it `whole`. The next call with these shapes needs the same rows.
        """

    def all_gather(self, x: Tensor) -> Tensor:
        """`[size, *x.shape]` with the `x` of every rank, any dtype."""

    def gather_columns(self, x: Tensor, starts: Tensor, n: int) -> Tensor:
        """[m, n] of which columns starts[r] to starts[r + 1] are the first ones of the `x` [m, w] of rank r, fp32.

        starts: [size + 1] int64 from 0 to n, steps of at most w. `w` is the same on all ranks.
        """

    def broadcast(self, x: Tensor, root: int = 0) -> Tensor:
        """The `x` of rank `root`, any dtype. A contiguous `x` is overwritten and returned."""

    def barrier(self) -> None:
        """Return once every rank has called."""

    def close(self) -> None:
        """Let go of the transport; no collective may follow."""


@runtime_checkable
class RecordableGroup(Group, Protocol):
    """A group whose collectives are kernels, or cuts between them, so that they can be part of a recorded step
    (kernels/graph.py)."""

    def replay(self, run: Callable[[], object]) -> None:
        """Call `run`, which repeats what was recorded. Raises as the recorded collectives do: GroupError."""


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
    """Every rank sends what it has to every other one, and each adds up for itself; a subclass moves the bytes.

    Not the transport's own all_reduce: gloo's accumulates bf16 in bf16, and no two agree on the order. Not its ring
    either: a receive from each peer by itself tells which rank it is that does not answer.

    `names` are the ranks to speak of in errors where the group is a part of a larger one (the leaders of the hosts).
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
        # Starting with the next rank spreads the load: not all of them send to rank 0 first.
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
        """Send to and receive from peers, all at once; return when everything is done. GroupError names the culprit."""
        raise NotImplementedError


class GlooGroup(PairwiseGroup):
    """Over TCP, through gloo. `address` is the local address to bind and to be reached at."""

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
        gloo: Any = ProcessGroupGloo  # its stubs lack what is used here
        options = gloo._Options()
        options._timeout = datetime.timedelta(seconds=timeout_s)
        options._threads = 1
        # Given by address: left to itself gloo resolves the host's name, which is often a loopback address.
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
        """gloo tells a closed connection from a timeout only in its text; who was lost first is known to the watch."""
        if "Timed out" in str(error):
            self._stuck(peer)
        elif not self._watch.await_failure():
            logger.debug("gloo: %s", _first_line(error))
            self._watch.fail(self._names[peer], Reason.GONE)
        return self._watch.error(doing)


def sum_in_rank_order(parts: Tensor, out: Tensor) -> None:
    """out[n] = parts[0] + parts[1] + ... of `parts[ranks, n]`, in fp32, rounded once: what every transport computes."""
    total = parts[0].to(torch.float32, copy=True)
    for part in parts[1:]:
        total += part
    out.copy_(total)


def as_bytes(x: Tensor) -> Tensor:
    """The bytes of `x`, flat; a view where `x` is contiguous."""
    return x.contiguous().reshape(-1).view(torch.uint8)


def checked_sum_dtype(x: Tensor) -> Tensor:
    if x.dtype not in (torch.float32, torch.bfloat16):
        raise GroupError(f"all_reduce sums float32 and bfloat16, the tensor is {x.dtype}")
    return x


def checked_columns(x: Tensor, starts: Tensor, size: int) -> Tensor:
    if x.dtype != torch.float32 or x.ndim != 2 or starts.shape != (size + 1,):
        raise GroupError(
            f"gather_columns takes float32 rows and {size + 1} starts, found {x.dtype} of shape {list(x.shape)} "
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
        with contextlib.suppress(RuntimeError):  # already broken: there is nobody left to tell
            backend.shutdown()
    backends.clear()
