"""Which ranks share a host, the address of a rank for the others, and collectives over several hosts."""

import contextlib
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tilerank.kernels import core, ops
from tilerank.kernels.graph import between_launches

from .errors import GroupError
from .group import CHUNK, Group, SingleGroup, checked_columns, checked_root, checked_sum_dtype, sum_in_rank_order
from .shm import ShmGroup
from .watch import Watch

Hosts = tuple[tuple[int, ...], ...]  # the ranks of each host, both in ascending order


@dataclass(frozen=True)
class Seat:
    """What a rank publishes about itself when it joins."""

    rank: int
    size: int
    host: str
    address: str
    lanes: int  # threads of its kernels, 0 without the compiled core


def host_id() -> str:
    """Return a string that is equal for processes that can share memory and unix sockets.

    It names the kernel, the IPC namespace and the network namespace. The network namespace separates two containers, or
    two test hosts, on one machine: abstract sockets do not cross it.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return "/".join([boot, str(Path("/proc/self/ns/ipc").readlink()), str(Path("/proc/self/ns/net").readlink())])


def hosts_of(seats: Sequence[Seat]) -> Hosts:
    """Group ranks by host, hosts in the order of their lowest rank. Launchers may assign ranks to hosts in any
    order."""
    hosts: dict[str, list[int]] = {}
    for seat in seats:
        hosts.setdefault(seat.host, []).append(seat.rank)
    return tuple(tuple(ranks) for ranks in hosts.values())


def route_to(host: str, port: int) -> str:
    """Return the local address from which packets to `host` leave. Sends nothing."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise GroupError(f"there is no route to {host}: {error.strerror or error}") from error


def address_of(rank: int, seats: Sequence[Seat], hosts: Hosts) -> str:
    """Return the address of this rank that all other hosts can reach: loopback if there are no other hosts.

    The host of the store (rank 0's, or torchrun's agent beside it) may resolve its own name to a loopback address, so
    ranks on that host take the route to another host instead.
    """
    if len(hosts) == 1:
        return "127.0.0.1"
    if rank in hosts[0]:
        return route_to(seats[hosts[1][0]].address, 9)
    return seats[rank].address


class HostGroup:
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
        inside: ShmGroup | SingleGroup,
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
        with self._doing("all_gather"):
            here = self._inside.all_gather(x)
            everyone = core.empty((self.size, *x.shape), x.dtype)
            self._lead(self._gather, here, everyone)
            return self._after.broadcast(everyone)

    def gather_columns(self, x: Tensor, starts: Tensor, n: int) -> Tensor:
        return ops.join_columns(self.all_gather(checked_columns(x, starts, self.size)), starts, n)

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
