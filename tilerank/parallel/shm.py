"""Collectives among the ranks of one host, in shared memory.

The memory is an anonymous memfd of the host's first rank, passed by descriptor. It has no name that could clash or be
left behind, and /dev/shm does not limit its size. Its protocol is compiled code (kernels/csrc/shm/shm_segment.h).
"""

import copy
import fcntl
import mmap
import os
import struct
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from tilerank.kernels.contract import Contract
from tilerank.kernels.errors import KernelError
from tilerank.kernels.ops import ADD_RMS_NORM

from .errors import GroupError
from .group import RecordableGroup, as_bytes, checked_columns, checked_root, checked_sum_dtype
from .watch import Reason, Watch

T = TypeVar("T")

MAGIC = 0x314D48534B4E5254  # as in shm_segment.h
HEADER = struct.Struct("<QIIQ")  # magic, ranks, lanes, bytes of a slot
BROKEN = 64  # offset of the word that aborts all waits
LINE = 256
WAITED = 160  # offset within a line: nanoseconds that its lane has waited
PAGE = 4096
SLOT = 256 << 10  # bytes per lane and buffer: small enough to stay in cache, larger tensors pass in pieces
SPIN_PAUSES = 4000  # about 100 us

_MEMBER = "segment rank:int pauses:int timeout_ms:int"  # the last arguments of all
_ALL_REDUCE = Contract(f"shm_all_reduce: x[n]:f32|bf16 {_MEMBER}")
_ADD_RMS_NORM = Contract(
    "shm_add_rms_norm: x[m, d]:f32|bf16 residual[m, d]:x weight[d]:x eps:float post_weight[d]?:x scale[1]?:x "
    f"zero_centered:bool whole:bool {_MEMBER} -> apart out[m, d]:x"
)
_ALL_GATHER = Contract(f"shm_all_gather: x[n]:u8 ranks:size {_MEMBER} -> out[ranks, n]:u8")
_GATHER_COLUMNS = Contract(f"shm_gather_columns: x[m, w]:f32 starts[_]:i64 n:size {_MEMBER} -> out[m, n]:f32")
_BROADCAST = Contract(f"shm_broadcast: x[n]:u8 root:int {_MEMBER}")


def segment_size(ranks: int, lanes: int, slot: int) -> int:
    """Return the bytes of the memory that `ranks` ranks share. The kernel allocates each page when it is first used."""
    return PAGE + ranks * _control_size(lanes) + ranks * 2 * lanes * slot


def _control_size(lanes: int) -> int:
    return -(-lanes * LINE // PAGE) * PAGE


def create_segment(ranks: int, lanes: int) -> int:
    """Return the descriptor of a new segment with its header written."""
    fd = os.memfd_create("tilerank", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, segment_size(ranks, lanes, SLOT))
        # Sealed: a process that truncated it would cause bus errors in the others.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        os.pwrite(fd, HEADER.pack(MAGIC, ranks, lanes, SLOT), 0)
    except OSError:
        os.close(fd)
        raise
    return fd


class ShmGroup(RecordableGroup):
    """The ranks of one host. Takes over the descriptor `fd` of their segment.

    `rank`: of this process within the segment. `names`: the ranks of the segment as errors name them.
    `spin`: a wait spins before it sleeps; use it only where every thread has a core of its own.
    """

    def __init__(
        self, fd: int, rank: int, names: tuple[int, ...], watch: Watch, timeout_s: float, *, spin: bool
    ) -> None:
        self.rank = rank
        self.size = len(names)
        self._names = names
        self._watch = watch
        with open(fd, "r+b", buffering=0) as file:
            size = os.fstat(fd).st_size
            if size < PAGE:
                raise GroupError(f"the shared memory of this host's ranks has {size} bytes, expected at least {PAGE}")
            self._map = mmap.mmap(file.fileno(), size)
        magic, ranks, lanes, slot = HEADER.unpack_from(self._map)
        if magic != MAGIC or ranks != self.size or size != segment_size(ranks, lanes, slot):
            raise GroupError(f"the shared memory of this host's ranks is for {ranks} ranks, expected {self.size}")
        self._broken = memoryview(self._map)[BROKEN : BROKEN + 4].cast("I")
        line = PAGE + rank * _control_size(lanes)  # of the first lane, which takes part in every collective
        self._waited_ns = memoryview(self._map)[line + WAITED : line + WAITED + 8].cast("Q")
        self._segment: Tensor | None = torch.frombuffer(self._map, dtype=torch.uint8)
        self._waits = (SPIN_PAUSES if spin else 0, max(int(timeout_s * 1000), 1))  # pauses, timeout_ms
        self._slot = slot
        # A page is placed on the node that touches it first, so each rank touches its own.
        for start, length in (
            (PAGE + rank * _control_size(lanes), _control_size(lanes)),
            (PAGE + ranks * _control_size(lanes) + rank * 2 * lanes * slot, 2 * lanes * slot),
        ):
            self._segment[start : start + length : PAGE] = 0
        watch.on_failure(self._give_up)

    @property
    def waited_s(self) -> float:
        return self._waited_ns[0] / 1e9

    def all_reduce(self, x: Tensor) -> Tensor:
        checked_sum_dtype(x)
        out = x.contiguous()
        self._run("all_reduce", _ALL_REDUCE, out.view(-1))
        return out

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
        ADD_RMS_NORM.check(x, residual, weight, eps, post_weight, scale)
        if not (x.stride(1) == 1 and residual.is_contiguous() and x.shape[1] * x.element_size() <= self._slot):
            return super().add_rms_norm(
                x, residual, weight, eps, post_weight=post_weight, scale=scale, zero_centered=zero_centered
            )
        norms = eps, post_weight, scale, zero_centered
        return self._run("all_reduce", _ADD_RMS_NORM, x, residual, weight, *norms, whole)[0]

    def all_gather(self, x: Tensor) -> Tensor:
        (out,) = self._run("all_gather", _ALL_GATHER, as_bytes(x), self.size)
        return out.view(x.dtype).view(self.size, *x.shape)

    def gather_columns(self, x: Tensor, starts: Tensor, n: int) -> Tensor:
        checked_columns(x, starts, self.size)
        return self._run("gather_columns", _GATHER_COLUMNS, x.contiguous(), starts, n)[0]

    def broadcast(self, x: Tensor, root: int = 0) -> Tensor:
        checked_root(root, self.size)
        out = x.contiguous()
        self._run("broadcast", _BROADCAST, as_bytes(out), root)
        return out

    def replay(self, run: Callable[[], object]) -> None:
        self._guarded("a recorded step", run)

    def barrier(self) -> None:
        self._run("barrier", _ALL_GATHER, torch.empty(0, dtype=torch.uint8), self.size)

    def with_deadline(self, timeout_s: float) -> "ShmGroup":
        """Return the same group with another deadline."""
        other = copy.copy(self)
        other._waits = (self._waits[0], max(int(timeout_s * 1000), 1))
        return other

    def close(self) -> None:
        self._segment = None

    def _run(self, doing: str, contract: Contract, *arguments: object) -> tuple[Tensor, ...]:
        return self._guarded(doing, lambda: contract.run(*arguments, self._segment, self.rank, *self._waits))

    def _guarded(self, doing: str, run: Callable[[], T]) -> T:
        if self._segment is None:
            raise GroupError(f"{doing} in a group that was closed")
        try:
            return run()
        except KernelError as error:
            if self._broken[0] == 0:
                raise
            raise self._lost(doing) from error

    def _lost(self, doing: str) -> GroupError:
        """Return the error for a broken segment. The first rank of this host that noticed recorded which rank is
        lost."""
        reason, local = divmod(self._broken[0], 1 << 16)
        if local:
            self._watch.fail(self._names[local - 1], Reason(reason))
        else:
            self._watch.await_failure()
        return self._watch.error(doing)

    def _give_up(self, rank: int, reason: Reason) -> None:
        """Abort all waits in the segment, on all ranks of the host. A rank of another host has no number here."""
        if self._broken[0] == 0:
            local = self._names.index(rank) + 1 if rank in self._names else 0
            self._broken[0] = reason << 16 | local
