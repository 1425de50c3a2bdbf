"""Collectives over MPI, for clusters whose fabric only their MPI drives well.

An MPI that waits burns its core, so this polls with pauses. The data plane inside a host stays shared memory.
"""

import time
from collections.abc import Sequence
from typing import Any

import mpi4py

from .errors import GroupError
from .group import PairwiseGroup, Step
from .watch import Watch

# Before MPI is imported: initialising and finalising are ours, since finalising hangs once a rank is lost.
mpi4py.rc.initialize = False
mpi4py.rc.finalize = False

SHORT_S = 200e-6  # a wait polls without a pause this long


class MpiGroup(PairwiseGroup):
    """Over MPI, among `names`: ranks of a job of `size` as the launcher counts them, `rank` being one of them."""

    def __init__(self, rank: int, size: int, timeout_s: float, watch: Watch, names: Sequence[int]) -> None:
        super().__init__(names.index(rank), len(names), timeout_s, watch, names)
        self._mpi = _library()
        self._ours = not self._mpi.Is_initialized()
        if self._mpi.Is_finalized():
            raise GroupError("MPI was finalised in this process before its collectives were asked for")
        if self._ours:
            self._mpi.Init()
        world = self._mpi.COMM_WORLD
        if (world.rank, world.size) != (rank, size):
            raise GroupError(
                f"MPI believes that this is rank {world.rank} of {world.size}, the launcher says {rank} of {size}: "
                "is mpirun of another MPI than the one that mpi4py loads?"
            )
        self._comm = world.Create_group(world.group.Incl(list(names)))

    def close(self) -> None:
        """Leaves MPI, together with the others; if one is lost, without it, since finalising waits for all."""
        if self._comm is None:
            return
        self._comm = None
        if self._ours and self._watch.failed is None:
            self._mpi.Finalize()

    def _transfer(self, steps: Sequence[Step], doing: str) -> None:
        if self._comm is None:
            raise GroupError(f"{doing} in a group that was closed")
        requests = []
        for kind, peer, buffer in steps:
            start = self._comm.Isend if kind == "send" else self._comm.Irecv
            requests.append(start([buffer, self._mpi.BYTE], peer, 0))
        begun = time.monotonic()
        while not self._mpi.Request.Testall(requests):
            self._watch.check(doing)
            waited = time.monotonic() - begun
            if waited > self._timeout_s:
                late = next(step[1] for step, request in zip(steps, requests, strict=True) if not request.Test())
                self._stuck(late)
            time.sleep(0 if waited < SHORT_S else 50e-6)


def _library() -> Any:
    try:
        from mpi4py import MPI
    except RuntimeError as error:
        raise GroupError(f"mpi4py finds no MPI library: {str(error).splitlines()[-1].strip()}") from error
    return MPI
