"""Collectives over several hosts: shared memory inside each, gloo or MPI between them."""

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from tilerank.kernels import core
from tilerank.kernels.graph import between_launches

from .errors import GroupError
from .group import CHUNK, Group, RecordableGroup, checked_root, checked_sum_dtype, sum_in_rank_order
from .hosts import Hosts
from .shm import ShmGroup
from .watch import Watch


class HostGroup(RecordableGroup):
    """Ranks on several hosts: shared memory inside each, `between` the first ranks ("leaders") of the hosts.

    The bits of a sum must not depend on how the ranks are spread over hosts, so the leaders exchange the contribution
    of every rank and sum in rank order. With r ranks per host this sends r times the bytes of exchanging one sum per
    host, but takes a single trip; passing a running sum from host to host would take one trip per host.

    `between` is None on ranks that are not leaders. `late_s`: the deadline of a rank that waits for its leader, longer
    than the deadline that the leader itself applies to its peers.
    """

    def __init__(
        self,
        rank: int,
        hosts: Hosts,
        inside: RecordableGroup,
        between: Group | None,
        watch: Watch,
        late_s: float,
    ) -> None:
        self.rank = rank
        self.size = sum(map(len, hosts))
        self._hosts = hosts
        self._inside = inside
        self._after: Group = inside.with_deadline(late_s) if isinstance(inside, ShmGroup) else inside
        self._between = between
        self._watch = watch
        most = max(map(len, hosts))
        rows = {rank: host * most + place for host, ranks in enumerate(hosts) for place, rank in enumerate(ranks)}
        self._most = most
        self._order = torch.tensor([rows[rank] for rank in range(self.size)])

    @property
    def waited_s(self) -> float:
        return self._inside.waited_s + (self._between.waited_s if self._between else 0.0)

    def all_reduce(self, x: Tensor) -> Tensor:
        checked_sum_dtype(x)
        out = x
        if not x.is_contiguous():  # rows of a step with many of them (core.empty_rows)
            out = core.empty(x.shape, x.dtype)
            between_launches(lambda found, copy: copy.copy_(found), x, out)
        flat = out.view(-1)
        step = CHUNK // x.element_size()
        with self._doing("all_reduce"):
            for start in range(0, flat.numel(), step):
                part = flat[start : start + step]
                self._lead(self._sum, self._inside.all_gather(part), part)
                self._after.broadcast(part)
        return out

    def all_gather(self, x: Tensor) -> Tensor:
        with self._doing("all_gather"):
            here = self._inside.all_gather(x)
            everyone = core.empty((self.size, *x.shape), x.dtype)
            self._lead(self._gather, here, everyone)
            return self._after.broadcast(everyone)

    def broadcast(self, x: Tensor, root: int = 0) -> Tensor:
        checked_root(root, self.size)
        out = x.contiguous()
        home = next(host for host, ranks in enumerate(self._hosts) if root in ranks)
        with self._doing("broadcast"):
            if self.rank in self._hosts[home]:
                self._inside.broadcast(out, self._hosts[home].index(root))
            self._lead(lambda between, out: between.broadcast(out, home), out)
            if self.rank not in self._hosts[home]:
                self._after.broadcast(out)
        return out

    def barrier(self) -> None:
        with self._doing("barrier"):
            self._inside.barrier()
            if self._between is not None:
                self._between.barrier()
            self._after.barrier()

    def replay(self, run: Callable[[], object]) -> None:
        with self._doing("a recorded step"):
            self._inside.replay(run)

    def close(self) -> None:
        self._inside.close()
        self._after.close()
        if self._between is not None:
            self._between.close()

    @contextlib.contextmanager
    def _doing(self, what: str) -> Iterator[None]:
        """Report a lost rank with the collective that the caller asked for, not with one of its steps."""
        try:
            yield
        except GroupError:
            self._watch.check(what)
            raise

    def _lead(self, act: Callable[..., object], *tensors: Tensor) -> None:
        """Run `act(between, *tensors)`, the part of a collective among the leaders.

        In a recorded step this is a cut. The parts inside a host, and all parts of ranks that are not leaders, are
        kernels.
        """
        if (between := self._between) is not None:
            between_launches(lambda *now: act(between, *now), *tensors)

    def _sum(self, between: Group, here: Tensor, out: Tensor) -> None:
        sum_in_rank_order(self._exchange(between, here), out)

    def _gather(self, between: Group, here: Tensor, everyone: Tensor) -> None:
        everyone.copy_(self._exchange(between, here))

    def _exchange(self, between: Group, here: Tensor) -> Tensor:
        """Return `[size, *x.shape]` in rank order, from the `x` of each of this host's ranks."""
        padded = torch.zeros((self._most, *here.shape[1:]), dtype=here.dtype)
        padded[: len(here)] = here
        return between.all_gather(padded).flatten(0, 1)[self._order]
