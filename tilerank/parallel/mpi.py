"""Collectives over MPI, for clusters where only MPI drives the network well.

A blocking wait in MPI keeps a core busy, so this polls with pauses. Ranks of one host still use shared memory.
"""

import time
from collections.abc import Sequence
from typing import Any

import mpi4py

from .errors import GroupError
from .group import PairwiseGroup, Step
from .watch import Watch

# Set before MPI is imported: MpiJob initialises and finalises, because finalising hangs once a rank is lost.
mpi4py.rc.initialize = False
mpi4py.rc.finalize = False

SHORT_S = 200e-6  # a wait polls without pauses for this long


class MpiJob:
    """The membership of this process in the MPI job. All ranks enter and leave it together, even those that never use
    it."""

    def __init__(self, rank: int, size: int) -> None:
        self.mpi = _library()
        if self.mpi.Is_finalized():
            raise GroupError("MPI was finalised in this process before its collectives were requested")
        if not self.mpi.Is_initialized():
            self.mpi.Init()
        world = self.mpi.COMM_WORLD
        if (world.rank, world.size) != (rank, size):
            believed = f"rank {world.rank} of {world.size}"
            self.mpi.Finalize()  # it would leave its shared memory behind
            raise GroupError(
                f"MPI reports {believed}, but the launcher says rank {rank} of {size}: "
                "does mpirun belong to another MPI library than the one that mpi4py loads?"
            )

    def close(self) -> None:
        """Finalise MPI, which waits for all ranks. Not to be called once a rank is lost: the process then just ends."""
        if not self.mpi.Is_finalized():
            self.mpi.Finalize()


class MpiGroup(PairwiseGroup):
    """A group over MPI among the ranks `names`, in which this one is number `rank`."""

    def __init__(self, job: MpiJob, rank: int, timeout_s: float, watch: Watch, names: Sequence[int]) -> None:
        super().__init__(rank, len(names), timeout_s, watch, names)
        self._mpi = job.mpi
        world = self._mpi.COMM_WORLD
        self._comm = world.Create_group(world.group.Incl(list(names)))

    def close(self) -> None:
        self._comm = None

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
