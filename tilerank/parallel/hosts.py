"""Which ranks share a host, the address at which a rank is reached by the others, and collectives over hosts."""

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
    """What a rank tells the others about itself when it joins."""

    rank: int
    size: int
    host: str
    address: str
    lanes: int  # threads of its kernels, 0 without the compiled core


def host_id() -> str:
    """Equal for processes that can share memory and unix sockets: the same kernel, IPC and network namespace.

    Network namespaces tell two containers, or two test hosts, on one machine apart; abstract sockets do not cross them.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return "/".join([boot, str(Path("/proc/self/ns/ipc").readlink()), str(Path("/proc/self/ns/net").readlink())])


def hosts_of(seats: Sequence[Seat]) -> Hosts:
    """Ranks by host; hosts in the order of their lowest rank. Launchers may deal ranks to hosts in any order."""
    hosts: dict[str, list[int]] = {}
    for seat in seats:
        hosts.setdefault(seat.host, []).append(seat.rank)
    return tuple(tuple(ranks) for ranks in hosts.values())


def route_to(host: str, port: int) -> str:
    """The local address from which packets to `host` leave; nothing is sent."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise GroupError(f"there is no route to {host}: {error.strerror or error}") from error


def address_of(rank: int, seats: Sequence[Seat], hosts: Hosts) -> str:
    """The address of this rank that all other hosts can reach: loopback when there are none.

    The store's host (rank 0's, or torchrun's agent beside it) may know itself by a loopback name; seen from there the
    route to another host tells.
    """
    if len(hosts) == 1:
        return "127.0.0.1"
    if rank in hosts[0]:
        return route_to(seats[hosts[1][0]].address, 9)
    return seats[rank].address


class HostGroup:
    """Ranks on several hosts: shared memory inside each, `between` the first ranks ("leaders") of the hosts.

    A sum must not tell how the ranks are spread, so the leaders exchange what every rank contributed and add up in
    rank order. That costs as many times the bytes between hosts as a host has ranks, against sums per host; in exchange
    it takes one trip, where passing a running sum from host to host would take as many as there are hosts.

    `between` is None on ranks that lead no host. `late_s`: the deadline of a rank that waits for its leader, longer
    than what the leader itself allows the others.
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
        out = x.contiguous()
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
        """A lost rank is lost to what was asked for, not to one of the steps it takes."""
        try:
            yield
        except GroupError:
            self._watch.check(what)
            raise

    def _lead(self, act: Callable[..., object], *tensors: Tensor) -> None:
        """What the leaders do among themselves: `act(between, *tensors)`. In a recorded step it is a cut, while what
        happens inside a host, and all that ranks do which lead none, is kernels."""
        if (between := self._between) is not None:
            between_launches(lambda *now: act(between, *now), *tensors)

    def _sum(self, between: Group, here: Tensor, out: Tensor) -> None:
        sum_in_rank_order(self._exchange(between, here), out)

    def _gather(self, between: Group, here: Tensor, everyone: Tensor) -> None:
        everyone.copy_(self._exchange(between, here))

    def _exchange(self, between: Group, here: Tensor) -> Tensor:
        """`[size, *x.shape]` in rank order, from the `x` of this host's ranks."""
        padded = torch.zeros((self._most, *here.shape[1:]), dtype=here.dtype)
        padded[: len(here)] = here
        return between.all_gather(padded).flatten(0, 1)[self._order]
