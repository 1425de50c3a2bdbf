"""A machine in a YAML file: what it has, how fast it is, and what share of that speed the kernels reach."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from math import inf, log
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta, Struct

from ...errors import LaunchError

T = TypeVar("T")
_DATA = Path(__file__).parent
MAX_FILE_BYTES = 1 << 20

Count = Annotated[int, Meta(ge=1, le=1 << 16)]
Rate = Annotated[float, Meta(gt=0, le=1e9)]
Point = tuple[Annotated[float, Meta(gt=0, le=1e9)], Annotated[float, Meta(gt=0, le=10)]]


class Exchange(Struct, frozen=True, forbid_unknown_fields=True):
    """A sum over the ranks takes latency_us, and as long as reading its operand at `gbs`."""

    latency_us: Rate
    gbs: Rate


class Shares(Struct, frozen=True, forbid_unknown_fields=True):
    """The shares of the machine's limit that kernels reach.

    source: where the figures come from. products: by the format of weights (`Layout.format`), and "attention" by the
    dtype of the cache: points of (balance, share of the limit), in order of balance. The balance of a kernel is the
    time of its operations over the time of its bytes, both at the peaks: below 1, reading limits it. elementwise_gbs:
    what kernels between products read and write, most of it in caches, of a core. step_us, sequence_us: outside of
    kernels, for a step and for each of its sequences. layer_us: of starting kernels, for a layer.
    """

    source: str
    products: dict[str, list[Point]]
    attention: dict[str, list[Point]]
    elementwise_gbs: Rate
    step_us: Annotated[float, Meta(ge=0, le=1e6)]
    sequence_us: Annotated[float, Meta(ge=0, le=1e6)]
    layer_us: Annotated[float, Meta(ge=0, le=1e6)]


class Machine(Struct, frozen=True, forbid_unknown_fields=True):
    """A machine of `hosts` equal hosts, with `nodes` equal NUMA nodes each.

    source: where the figures come from. cores, memory_gib, read_gbs, update_gbs and the rates of products, by the type
    of their operands: of a node. update_gbs: reading and writing in place, both counted. between_nodes, between_hosts:
    sums over the ranks of a host, and of several. shares: those of this machine, or the name of a table of the package.
    """

    name: str
    source: str
    nodes: Count
    cores: Count
    memory_gib: Rate
    read_gbs: Rate
    update_gbs: Rate
    bf16_tflops: Rate
    int8_tops: Rate
    shares: Shares | str
    fp32_tflops: Rate | None = None
    hosts: Count = 1
    between_nodes: Exchange | None = None
    between_hosts: Exchange | None = None


def machine_names() -> list[str]:
    """Return the names of the machines that the package describes."""
    return sorted(path.stem for path in (_DATA / "machines").glob("*.yaml"))


def read_machine(name: str) -> Machine:
    """Return the machine of this name, or that in the file `name`. Raises LaunchError."""
    path = _DATA / "machines" / f"{name}.yaml" if name in machine_names() else Path(name)
    machine = _read(path, Machine, f"--machine {name}")
    for what, exchange, several in (
        ("between_nodes", machine.between_nodes, machine.nodes > 1),
        ("between_hosts", machine.between_hosts, machine.hosts > 1),
    ):
        if several and exchange is None:
            raise LaunchError(f"--machine {name}: expected {what}, because there are several of them, found none")
    return machine


def shares_of(machine: Machine) -> Shares:
    """Return the shares of a machine. Raises LaunchError."""
    shares = machine.shares
    if isinstance(shares, str):
        tables = sorted(path.stem for path in (_DATA / "shares").glob("*.yaml"))
        if shares not in tables:
            raise LaunchError(
                f"{machine.name}: shares: expected a table or one of {', '.join(tables)}, found {shares!r}"
            )
        shares = _read(_DATA / "shares" / f"{shares}.yaml", Shares, f"shares {shares}")
    for kind in ("products", "attention"):
        for format, points in getattr(shares, kind).items():
            balances = [balance for balance, _ in points]
            if not points or balances != sorted(set(balances)):
                raise LaunchError(f"{machine.name}: shares: {kind}: {format}: expected points in order of balance")
    return shares


def share_at(points: Sequence[Point], balance: float) -> float:
    """Return the share at a balance: linear in its logarithm between two points, and outside that of the nearest."""
    right = bisect_left([known for known, _ in points], balance)
    if right in (0, len(points)):
        return points[min(right, len(points) - 1)][1]
    (low, low_share), (high, high_share) = points[right - 1 : right + 1]
    return low_share + (high_share - low_share) * log(balance / low) / log(high / low)


def balance_of(compute_s: float, memory_s: float) -> float:
    """Return the balance of work, as in Shares."""
    return compute_s / memory_s if memory_s else inf


def write_machine(path: Path, machine: Machine) -> None:
    """Write the file of a machine. Raises LaunchError."""
    try:
        path.write_bytes(msgspec.yaml.encode(machine))
    except OSError as e:
        raise LaunchError(f"--machine: {path} cannot be written: {e.strerror}") from e


def _read(path: Path, kind: type[T], what: str) -> T:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as e:
        raise LaunchError(f"{what}: expected a file or one of {', '.join(machine_names())}, found: {e.strerror}") from e
    if len(data) > MAX_FILE_BYTES:
        raise LaunchError(f"{what}: expected at most {MAX_FILE_BYTES} bytes, found more")
    try:
        return msgspec.yaml.decode(data, type=kind)
    except msgspec.DecodeError as e:
        raise LaunchError(f"{what}: expected the fields of docs/prediction.md, found: {e}") from e
