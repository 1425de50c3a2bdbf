"""`tilerank doctor`: what this machine offers, what is wrong with it, and what to do about it.

It must work where everything else fails: without the compiled core, without torch, in a container that refuses half of
the system calls. The exit status is non-zero only for problems that prevent running.
"""

import argparse
import dataclasses
import importlib.util
import json
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import LaunchError
from ..host.binding import huge_pages, memory_policy_refusal
from ..host.cpulist import format_cpulist, read_int
from ..host.kept_rates import rung_texts
from ..host.neighbours import neighbour_notes, pinned_by_others
from ..host.placement import auto_ranks, place
from ..host.topology import Topology, read_topology
from ..text import count
from ..version import installed_version, own_version

REQUIRED = (
    "torch",
    "safetensors",
    "tokenizers",
    "sentencepiece",
    "protobuf",
    "llguidance",
    "jinja2",
    "msgspec",
    "starlette",
    "uvicorn",
    "pydantic",
    "prometheus-client",
    "numpy",
    "h11",
    "httpcore2",
    "python-multipart",
    "huggingface_hub",
    "pyyaml",
    "shtab",
    "tqdm",
)
OPTIONAL = ("pillow", "av", "transformers", "mpi4py")


@dataclass(frozen=True)
class Finding:
    """A problem. `level` is "error" if nothing runs until it is fixed, otherwise "warning"."""

    level: str
    what: str
    advice: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument(
        "--machine",
        type=Path,
        metavar="FILE.yaml",
        help="measure the rates of this machine, in some minutes, and write them to a file for `plan --machine`",
    )


def run(args: argparse.Namespace) -> int:
    """Print the report; return 1 if something prevents running, else 0. With --machine, write the file instead."""
    if args.machine is not None:
        return _describe(args.machine)
    report, findings = examine()
    if args.json:
        print(json.dumps({**report, "findings": [dataclasses.asdict(finding) for finding in findings]}))
    else:
        print("\n".join([*_text(report), "", *_findings_text(findings)]))
    return int(any(finding.level == "error" for finding in findings))


def _describe(path: Path) -> int:
    """Measure this machine and write its file."""
    from ..bench.harness import is_writable
    from ..bench.machine import measure_machine
    from ..planning.prediction.machine import write_machine

    if not is_writable(path):
        raise LaunchError(f"--machine: expected a file in a writable directory, found {path}")
    machine = measure_machine(read_topology())
    write_machine(path, machine)
    print(f"{path}: {machine.name}, {machine.read_gbs * machine.nodes:.1f} GB/s")
    return 0


def examine(root: Path = Path("/")) -> tuple[dict[str, Any], list[Finding]]:
    """Return the whole report, ready for JSON, and the problems. `root` holds sys and proc."""
    report: dict[str, Any] = {
        "versions": {
            "tilerank": own_version(),
            "python": platform.python_version(),
            "kernel": platform.release(),
        }
    }
    findings: list[Finding] = []
    try:
        topology = read_topology(root)
    except LaunchError as error:
        findings.append(Finding("error", str(error), "widen the cpuset of this container or job"))
    else:
        report.update(_machine(topology, root))
        findings += machine_findings(topology, root, report["memory_policy_refusal"])
    report["libraries"] = {name: installed_version(name) for name in (*REQUIRED, *OPTIONAL)}
    findings += library_findings(report["libraries"])
    report["isa"], isa_findings = _isa() if report["libraries"]["torch"] else ([], [])  # the kernels need torch
    report["rungs"] = rung_texts() if report["isa"] else []
    report["mpi"] = _mpi()
    return report, findings + isa_findings + mpi_findings(report["mpi"])


def _machine(topology: Topology, root: Path) -> dict[str, Any]:
    placement = place(topology, auto_ranks(topology))
    limits = dataclasses.asdict(topology.limits)
    nodes = []
    for node in topology.nodes:
        cores = [core for core in topology.cores if core.node == node.id]
        described = dataclasses.asdict(node) | {"cpus": format_cpulist(node.cpus), "cores": len(cores)}
        nodes.append(described | {"distances": list(node.distances.values())})
    return {
        "packages": len(topology.packages),
        "nodes_per_package": topology.nodes_per_package,
        "cores": len(topology.cores),
        "threads_per_core": max(len(core.threads) for core in topology.cores),
        "nodes": nodes,
        "offline_cpus": format_cpulist(topology.offline),
        "isolated_cpus": format_cpulist(topology.isolated),
        "allowed_cpus": format_cpulist(topology.allowed_cpus),
        "allowed_memory_nodes": format_cpulist(topology.allowed_mems),
        "inherited_cpus": format_cpulist(topology.inherited_cpus),
        "cgroup": limits | {name: limits[name] and format_cpulist(limits[name]) for name in ("cpus", "mems")},
        "memory_policy_refusal": memory_policy_refusal(),
        "huge_pages": dataclasses.asdict(huge_pages(root)),
        "auto_placement": [rank.reason for rank in placement.ranks],
        "notes": [*placement.notes, *neighbour_notes(topology, placement, pinned_by_others(root))],
    }


def machine_findings(topology: Topology, root: Path, policy_refusal: str | None) -> list[Finding]:
    """Return the problems of the machine or of the container around this process."""
    found: list[tuple[str, str]] = []
    several = sum(1 for node in topology.nodes if node.memory_total) > 1
    if len(topology.packages) > 1 and len({core.node for core in topology.cores}) == 1:
        found.append((
            f"{len(topology.packages)} packages but one NUMA node: memory is interleaved over the packages",
            "switch node interleaving off (NUMA on) in the firmware",
        ))  # fmt: skip
    for node in topology.nodes:
        if node.cpus and not node.memory_total:
            found.append((f"node {node.id} has cores but no memory", "install memory in the slots of that node"))
        elif set(node.cpus) & set(topology.allowed_cpus) and node.id not in topology.allowed_mems:
            nearest = topology.nearest_memory(node.id)
            found.append((
                f"CPUs of node {node.id} are allowed but its memory is not; node {nearest} is used instead",
                "let cpuset.mems follow cpuset.cpus (Kubernetes: topology manager policy single-numa-node)",
            ))  # fmt: skip
    quota, threads = topology.limits.cpu_quota, len(topology.usable_cores())
    if quota is not None and quota < threads:
        found.append((
            f"the cgroup allows {quota:g} CPUs at a time on {threads} cores: ranks run unpinned and with fewer threads",
            "give whole CPUs (Kubernetes: integer requests equal to limits, static CPU manager) and no quota",
        ))  # fmt: skip
    if policy_refusal and several:
        found.append((
            f"memory policies are refused ({policy_refusal}): pages go where they are first touched",
            "add the capability SYS_NICE to the container; without it, first touch by pinned threads is equivalent",
        ))  # fmt: skip
    if huge_pages(root).transparent == "never":
        found.append((
            "transparent huge pages are off: reading the weights misses the TLB",
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        ))  # fmt: skip
    if several and read_int(root / "proc/sys/kernel/numa_balancing"):
        found.append((
            "automatic NUMA balancing is on: it unmaps pages of bound ranks to sample them",
            "sysctl kernel.numa_balancing=0",
        ))  # fmt: skip
    return [Finding("warning", what, advice) for what, advice in found]


def library_findings(versions: dict[str, str | None]) -> list[Finding]:
    missing = [name for name in REQUIRED if versions[name] is None]
    return [Finding("error", f"the library {name} is not installed", f"pip install {name}") for name in missing]


def _isa() -> tuple[list[dict[str, Any]], list[Finding]]:
    """Return the rungs of the ISA ladder, best first, and the reasons why the best ones are unavailable."""
    try:
        from tilerank.kernels import core
        from tilerank.kernels.errors import KernelError
    except (ImportError, OSError) as error:  # OSError: a library that torch loads itself
        what = f"the kernels cannot be imported ({error})"
        return [], [Finding("error", what, "repair the Python environment: pip install tilerank in a fresh one")]
    try:
        rungs = core.isa_report()
    except KernelError as error:
        return [], [Finding("error", str(error), "unset TILERANK_ISA or name a usable rung")]
    report = [dataclasses.asdict(rung) for rung in rungs]
    if importlib.util.find_spec("tilerank.kernels._C") is None:
        advice = "pip install . in the source tree builds it; g++ and Python.h (Debian: g++, python3-dev) are needed"
        return report, [Finding("warning", "the compiled core is missing: kernels run in plain torch, slowly", advice)]
    if not any(rung.usable for rung in rungs if rung.name != "reference"):
        what = f"no compiled rung is usable, kernels run in plain torch, slowly: {rungs[-2].reason}"
        return report, [Finding("warning", what, "run on a CPU with AVX2 or newer")]
    return report, []


def _mpi() -> dict[str, Any]:
    """Return the launchers on PATH with their versions, and the MPI library that mpi4py would load."""
    launchers = {}
    for name in ("mpirun", "mpiexec"):
        path = shutil.which(name)
        if path:
            launchers[name] = {"path": path, "version": mpi_name(_output([path, "--version"]))}
    library = None
    if importlib.util.find_spec("mpi4py"):
        # In a separate process: loading the library may abort, and must not initialise MPI here.
        code = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version())"
        library = mpi_name(_output([sys.executable, "-c", code]))
    return {"launchers": launchers, "mpi4py": installed_version("mpi4py"), "mpi4py_library": library}


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, errors="replace")
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return done.stdout or done.stderr.strip().rpartition("\n")[2]


def mpi_name(text: str) -> str:
    """Return "Open MPI 5.0.11" or the like from the version text of a launcher or library, else its first line."""
    kinds = {"Open MPI": "Open MPI|OpenRTE|PRRTE", "Intel MPI": r"Intel\(R\) MPI", "MPICH": "MPICH|HYDRA"}
    version = re.search(r"\d+\.\d+(\.\d+)*", text)
    for kind, pattern in kinds.items():
        if version and re.search(pattern, text):
            return f"{kind} {version[0]}"
    return text.strip().partition("\n")[0]


def mpi_findings(mpi: dict[str, Any]) -> list[Finding]:
    """Report a launcher and a library of different MPIs: every rank would then be rank 0 of 1."""
    launcher, library = mpi["launchers"].get("mpirun"), mpi["mpi4py_library"]
    known = ("Open MPI", "Intel MPI", "MPICH")
    if not launcher or not library or not library.startswith(known) or not launcher["version"].startswith(known):
        return []
    family = {"Open MPI": "Open MPI", "Intel MPI": "MPICH", "MPICH": "MPICH"}  # Intel's has the ABI and PMI of MPICH
    if len({family[" ".join(name.split()[:-1])] for name in (launcher["version"], library)}) == 1:
        return []
    what = (
        f"mpirun is {launcher['version']} but mpi4py loads {library}: ranks on several hosts would not find each other"
    )
    return [Finding("warning", what, "put the mpirun of that library first on PATH, or set MPI4PY_LIBMPI to the other")]


def _text(report: dict[str, Any]) -> list[str]:
    versions = report["versions"]
    lines = [
        f"tilerank {versions['tilerank'] or 'not installed'}, Python {versions['python']}, Linux {versions['kernel']}"
    ]
    if "nodes" in report:
        lines += _machine_text(report)
    in_use = next((rung["name"] for rung in report["isa"] if rung["usable"]), None)
    for rung in report["isa"]:
        state = "in use" if rung["name"] == in_use else "usable" if rung["usable"] else f"off: {rung['reason']}"
        emulated = " (emulated tiles, for tests)" if rung["emulated"] else ""
        lines.append(_line(f"isa {rung['name']}{emulated}", state))
    lines += [_line("rungs", text) for text in report["rungs"]]
    mpi = report["mpi"]
    found = [f"{entry['path']} ({entry['version']})" for entry in mpi["launchers"].values()]
    lines.append(_line("mpi", ", ".join(found) or "no mpirun or mpiexec on PATH (only needed to start ranks with it)"))
    if mpi["mpi4py_library"]:
        lines.append(_line("mpi4py", f"{mpi['mpi4py']} with {mpi['mpi4py_library']}"))
    libraries = [f"{name} {version or 'missing'}" for name, version in report["libraries"].items()]
    return [*lines, _line("libraries", ", ".join(libraries))]


def _machine_text(report: dict[str, Any]) -> list[str]:
    threads, limits, huge = report["threads_per_core"], report["cgroup"], report["huge_pages"]
    sub_numa = f" x {report['nodes_per_package']} NUMA nodes (SNC)" if report["nodes_per_package"] > 1 else ""
    cores = f"{count(report['cores'], 'core')} with {count(threads, 'thread')} each"
    lines = [_line("machine", f"{count(report['packages'], 'package')}{sub_numa}, {cores}")]
    for node in report["nodes"]:
        memory = (
            f"{_gib(node['memory_total'])}, {_gib(node['memory_free'])} free" if node["memory_total"] else "no memory"
        )
        cpus = f"{count(node['cores'], 'core')} (CPUs {node['cpus']})" if node["cores"] else "no cores"
        lines.append(
            _line(f"node {node['id']}", f"{cpus}, {memory}, distances {' '.join(map(str, node['distances']))}")
        )
    quota = "no CPU quota" if limits["cpu_quota"] is None else f"CPU quota {limits['cpu_quota']:g}"
    memory = "no memory limit"
    if limits["memory_limit"] is not None:
        memory = f"memory limit {_gib(limits['memory_limit'])}, {_gib(limits['memory_usage'])} used"
    refusal = report["memory_policy_refusal"]
    reserved = (
        f"{huge['reserved_free']} of {huge['reserved']} reserved 2 MiB pages free"
        if huge["reserved"]
        else "none reserved"
    )
    lines += [
        _line("allowed", f"CPUs {report['allowed_cpus']}, memory nodes {report['allowed_memory_nodes']}"),
        _line("cgroup", f"{quota}, {memory}"),
        _line("memory policy", f"refused: {refusal}" if refusal else "permitted"),
        _line("huge pages", f"transparent: {huge['transparent'] or 'unknown'}, {reserved}"),
        _line("--tp auto", count(len(report["auto_placement"]), "rank")),
    ]
    lines += [_line(f"  rank {rank}", reason) for rank, reason in enumerate(report["auto_placement"])]
    return lines + [_line("note", note) for note in report["notes"]]


def _findings_text(findings: list[Finding]) -> list[str]:
    if not findings:
        return ["Nothing is wrong."]
    return [f"{finding.level}: {finding.what}\n    do: {finding.advice}" for finding in findings]


def _line(name: str, value: str) -> str:
    return f"{name:<15} {value}"


def _gib(count: int) -> str:
    return f"{count / (1 << 30):.1f} GiB"
