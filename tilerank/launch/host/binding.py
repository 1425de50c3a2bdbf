"""Applies a placement to this process (affinity and memory policy), and reports where pages really are.

Call `bind` before any large allocation, best before torch is imported: memory that the allocator already owns stays
where it was first touched. Both settings survive fork and exec. The memory policy is *preferred*: with a strict policy
the kernel kills the process when the node is full, even if other nodes have room. The system calls are made through
ctypes, so that libnuma is not needed. Where they are refused, as by the default seccomp profile of containers, pinned
threads that touch their memory first have the same effect.
"""

import ctypes
import errno
import os
import platform
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..errors import LaunchError
from .cpulist import format_cpulist, read_int, read_text
from .placement import RankPlacement
from .topology import Topology

_SYSCALLS = {"x86_64": {"set_mempolicy": 238, "get_mempolicy": 239, "move_pages": 279}}
_DEFAULT, _PREFERRED, _BIND, _PREFERRED_MANY = 0, 1, 2, 5  # <linux/mempolicy.h>
_MASK_BITS = 1024  # nodes in a mask, the most that x86 Linux can be built with
_Mask = ctypes.c_ulong * (_MASK_BITS // 64)
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Binding:
    """The binding that the kernel accepted. `policy`: "preferred", "bind", or "first touch" if no policy is set."""

    cpus: tuple[int, ...]
    policy: str
    mem_nodes: tuple[int, ...]
    notes: tuple[str, ...]  # sentences to log as warnings


@dataclass(frozen=True)
class HugePages:
    """Transparent huge page mode ("always", "madvise", "never"; None if unknown) and the reserved 2 MiB pages."""

    transparent: str | None
    reserved: int
    reserved_free: int


def bind(placement: RankPlacement, *, strict: bool = False) -> Binding:
    """Bind the calling thread, and all that it starts from now on, to the cores and memory of `placement`.

    `strict` forbids memory of other nodes: the kernel kills the process when its own are full. LaunchError if the
    kernel allows none of the cores.
    """
    notes: list[str] = []
    cpus = _set_affinity(placement, notes) if placement.affinity else tuple(sorted(os.sched_getaffinity(0)))
    policy = _set_policy(placement.mem_nodes, strict, notes) if placement.mem_nodes else "first touch"
    return Binding(cpus, policy, placement.mem_nodes if policy != "first touch" else (), tuple(notes))


def _set_affinity(placement: RankPlacement, notes: list[str]) -> tuple[int, ...]:
    wanted = format_cpulist(placement.affinity)
    try:
        os.sched_setaffinity(0, placement.affinity)
    except PermissionError:
        notes.append(f"binding to CPUs {wanted} is not permitted here; the scheduler places rank {placement.rank}")
    except OSError as error:  # EINVAL: the cpuset allows none of them
        raise LaunchError(f"rank {placement.rank} cannot run on CPUs {wanted}: {error.strerror}") from None
    effective = tuple(sorted(os.sched_getaffinity(0)))
    if not notes and effective != placement.affinity:
        got = format_cpulist(effective)
        notes.append(f"rank {placement.rank} asked for CPUs {wanted}, but the kernel allows only {got} of them")
    return effective


def _set_policy(nodes: tuple[int, ...], strict: bool, notes: list[str]) -> str:
    """Set the memory policy and return the name of the policy in force."""
    name = format_cpulist(nodes)
    mode = _BIND if strict else _PREFERRED if len(nodes) == 1 else _PREFERRED_MANY
    error = _set_mempolicy(mode, nodes)
    if not error:
        return "bind" if strict else "preferred"
    if strict:
        raise LaunchError(f"memory cannot be bound strictly to node {name}: {os.strerror(error)}")
    if mode == _PREFERRED_MANY and error == errno.EINVAL:
        return "first touch"  # before Linux 5.15; pinned workers touch their own part first, so memory is local anyway
    why = os.strerror(error) + (", as in a container without CAP_SYS_NICE" if error == errno.EPERM else "")
    notes.append(
        f"memory policy for node {name} is refused ({why}): "
        "pages go to the node of the pinned thread that touches them first"
    )
    return "first touch"


def inherited_notes(topology: Topology, placement: RankPlacement, environ: Mapping[str, str]) -> list[str]:
    """Return notes about settings of a foreign launcher and what becomes of them. Call before `bind`."""
    notes = []
    mask, allowed = set(topology.inherited_cpus), set(topology.allowed_cpus)
    if (allowed - set(topology.isolated)) - mask and mask != set(placement.affinity):
        done = (
            f"it runs on {format_cpulist(placement.affinity)}" if placement.affinity else "that is kept (--cores none)"
        )
        notes.append(
            f"rank {placement.rank} was started bound to CPUs {format_cpulist(mask)}, {len(mask)} of the {len(allowed)}"
            f" allowed, as mpirun and srun do by default; {done}"
        )
    threads = environ.get("OMP_NUM_THREADS")
    if threads is not None and threads != str(placement.threads):
        by = " by torchrun" if "TORCHELASTIC_RUN_ID" in environ else ""
        notes.append(
            f"OMP_NUM_THREADS={threads} was set{by} and is ignored: "
            f"rank {placement.rank} runs {placement.threads} threads of its own"
        )
    return notes


def memory_policy_refusal() -> str | None:
    """Return why memory policies cannot be set here, or None if they can. Only sets the current policy again."""
    mode, mask = ctypes.c_int(), _Mask()
    error = _syscall("get_mempolicy", ctypes.byref(mode), mask, ctypes.c_ulong(_MASK_BITS), None, ctypes.c_ulong(0))
    if not error:
        nodes = tuple(i for i in range(_MASK_BITS) if mask[i // 64] >> (i % 64) & 1)
        error = _set_mempolicy(mode.value, nodes)
    return os.strerror(error) if error else None


def page_nodes(address: int, length: int, *, samples: int | None = None) -> list[int | None]:
    """Return the NUMA node of each 4 KiB page in [address, address+length), None for a page that is not resident.

    With `samples`, only that many evenly spread pages are checked. OSError if the kernel refuses (seccomp).
    """
    first, last = address // _PAGE, (address + length + _PAGE - 1) // _PAGE
    count = last - first if samples is None else min(samples, last - first)
    if count <= 0:
        return []
    pages = (ctypes.c_void_p * count)(*((first + (last - first) * i // count) * _PAGE for i in range(count)))
    status = (ctypes.c_int * count)()
    error = _syscall("move_pages", 0, ctypes.c_ulong(count), pages, None, status, 0)
    if error:
        raise OSError(error, f"move_pages: {os.strerror(error)}")
    return [node if node >= 0 else None for node in status]


def local_share(address: int, length: int, nodes: tuple[int, ...], *, samples: int = 4096) -> float | None:
    """Return the fraction of a range's resident pages that is on `nodes`; None if none is resident or on refusal."""
    try:
        where = Counter(page_nodes(address, length, samples=samples))
    except OSError:
        return None
    resident = sum(n for node, n in where.items() if node is not None)
    return sum(where[node] for node in nodes) / resident if resident else None


def local_memory(nodes: tuple[int, ...], root: Path = Path("/")) -> float | None:
    """Return the fraction of this process's anonymous memory and memory files, all that it has allocated and touched,
    that is on `nodes`. None if `nodes` is empty, or if the kernel does not report it."""
    on: Counter[int] = Counter()
    for mapping in (read_text(root / "proc/self/numa_maps") or "").splitlines():
        words = dict(word.split("=", 1) for word in mapping.split() if "=" in word)
        if words.get("file", "/memfd:").startswith("/memfd:"):
            page_kib = int(words.get("kernelpagesize_kB", 4))
            on.update({int(word[1:]): int(n) * page_kib for word, n in words.items() if re.fullmatch("N[0-9]+", word)})
    return sum(on[node] for node in nodes) / on.total() if nodes and on else None


def huge_pages(root: Path = Path("/")) -> HugePages:
    """Return the huge pages that the kernel offers."""
    text = read_text(root / "sys/kernel/mm/transparent_hugepage/enabled") or ""
    chosen = text[text.index("[") + 1 : text.index("]")] if "[" in text and "]" in text else None
    pool = root / "sys/kernel/mm/hugepages/hugepages-2048kB"
    return HugePages(chosen, read_int(pool / "nr_hugepages") or 0, read_int(pool / "free_hugepages") or 0)


def _set_mempolicy(mode: int, nodes: tuple[int, ...]) -> int:
    mask = _Mask()
    for node in nodes:
        mask[node // 64] |= 1 << (node % 64)
    # The kernel uses one bit less than the given number.
    return _syscall("set_mempolicy", mode, mask if nodes else None, ctypes.c_ulong(_MASK_BITS + 1 if nodes else 0))


def _syscall(name: str, *arguments: object) -> int:
    """Run a system call that libc has no wrapper for; return 0 or its errno."""
    number = _SYSCALLS.get(platform.machine(), {}).get(name)
    if number is None:
        return errno.ENOSYS
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    return ctypes.get_errno() if libc.syscall(ctypes.c_long(number), *arguments) < 0 else 0
