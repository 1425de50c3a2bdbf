"""Other servers on this machine whose threads are pinned to the same cores.

Nothing but a cpuset or --cores keeps two servers apart: each pins a thread to every core that it may use. Processes of
other containers cannot be seen.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from .cpulist import format_cpulist, parse_cpulist, read_fields, read_text
from .placement import Placement
from .topology import Topology

_COMMAND_WORDS = 4  # python -P -m tilerank


def pinned_by_others(root: Path = Path("/")) -> dict[int, set[int]]:
    """Return, by process id, the CPUs to which each other process of tilerank has pinned threads."""
    found = {}
    for process in (root / "proc").glob("[0-9]*"):
        words = (read_text(process / "cmdline") or "").split("\0")[:_COMMAND_WORDS]
        if "tilerank" not in (Path(word).name for word in words) or process.name == str(os.getpid()):
            continue
        masks = [parse_cpulist(read_fields(status).get("Cpus_allowed_list", "")) for status in _threads(process)]
        pinned = {mask[0] for mask in masks if len(mask) == 1}
        if pinned:
            found[int(process.name)] = pinned
    return found


def _threads(process: Path) -> list[Path]:
    """Return the status files of a process's threads; none if it has ended."""
    try:
        return [thread / "status" for thread in (process / "task").iterdir()]
    except OSError:
        return []


def neighbour_notes(topology: Topology, placement: Placement, pinned: Mapping[int, set[int]]) -> tuple[str, ...]:
    """Return a sentence if others have pinned threads to cores of these ranks. pinned: see `pinned_by_others`."""
    own = {cpu for rank in placement.ranks for cpu in rank.cores}
    cores = {cpu for core in topology.cores if own & set(core.threads) for cpu in core.threads}
    shared = {pid: cpus & cores for pid, cpus in pinned.items() if cpus & cores}
    if not shared or len(topology.allowed_cpus) == 1:  # on the only CPU, all threads are pinned
        return ()
    return (
        f"threads of another tilerank (processes {', '.join(map(str, sorted(shared)))}) are pinned to CPUs "
        f"{format_cpulist(set().union(*shared.values()))}, whose cores these ranks use, too: each slows the other; "
        "--cores or a cpuset keeps them apart",
    )
