"""`tilerank doctor` on simulated machines, with libraries and launchers missing or mismatched, and on this machine."""

import argparse
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from fake_sysfs import GIB, SNC3, Machine, sockets

from tilerank.kernels import core
from tilerank.launch.commands import doctor
from tilerank.launch.commands.doctor import Finding, examine, library_findings, machine_findings, mpi_findings, mpi_name
from tilerank.launch.host.topology import read_topology


def whats(machine: Machine, root: Path, refusal: str | None = None) -> list[str]:
    return [finding.what for finding in machine_findings(read_topology(machine.write(root)), root, refusal)]


def run_python(code: str, **environ: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name != "TILERANK_ISA"} | environ
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, env=env)


DOCTOR = """
import argparse, sys
from tilerank.launch.commands import doctor
parser = argparse.ArgumentParser()
doctor.add_arguments(parser)
sys.exit(doctor.run(parser.parse_args(["--json"])))
"""


def test_healthy_machine(tmp_path: Path) -> None:
    assert whats(Machine(SNC3, threads=2), tmp_path) == []


def test_report_of_an_snc_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine = Machine(SNC3, threads=2, offline=frozenset({255}), isolated="5")
    machine.cgroup = {"sys/fs/cgroup/memory.max": str(512 * GIB), "sys/fs/cgroup/memory.current": str(2 * GIB)}
    report, _ = examine(machine.write(tmp_path))
    assert (report["packages"], report["nodes_per_package"], report["cores"]) == (2, 3, 256)
    assert report["auto_placement"][2:4] == ["42 cores of node 2", "43 cores of node 3"]
    text = "\n".join(doctor._text(report))
    assert "machine         2 packages x 3 NUMA nodes (SNC), 256 cores with 2 threads each" in text
    assert (
        "node 5          42 cores (CPUs 214-254,470-511), 64.0 GiB, 32.0 GiB free, distances 21 21 21 12 12 10" in text
    )
    assert "memory limit 512.0 GiB, 2.0 GiB used" in text
    assert "note            CPUs 255 are offline and left out\nnote            CPUs 5 are isolated" in text
    assert json.loads(json.dumps(report)) == report


def test_interleaved_memory(tmp_path: Path) -> None:
    root = sockets(2, 4).write(tmp_path)
    node = root / "sys/devices/system/node"
    (node / "online").write_text("0\n")
    (node / "node0/cpulist").write_text("0-7\n")
    found = machine_findings(read_topology(root), root, None)
    assert [f.what for f in found] == ["2 packages but one NUMA node: memory is interleaved over the packages"]


def test_node_without_memory(tmp_path: Path) -> None:
    machine = sockets(2, 4)
    machine.memory = {1: 0}
    assert whats(machine, tmp_path) == ["node 1 has cores but no memory"]


def test_cpuset_without_local_memory_and_quota(tmp_path: Path) -> None:
    machine = sockets(2, 4)
    machine.cgroup = {
        "sys/fs/cgroup/cpuset.cpus.effective": "4-7",
        "sys/fs/cgroup/cpuset.mems.effective": "0",
        "sys/fs/cgroup/cpu.max": "150000 100000",
    }
    assert whats(machine, tmp_path) == [
        "CPUs of node 1 are allowed but its memory is not; node 0 is used instead",
        "the cgroup allows 1.5 CPUs at a time on 4 cores: ranks run unpinned and with fewer threads",
    ]


def test_refused_policy_matters_on_several_nodes_only(tmp_path: Path) -> None:
    expected = "memory policies are refused (Operation not permitted): pages go where they are first touched"
    assert whats(sockets(2, 4), tmp_path / "two", "Operation not permitted") == [expected]
    assert whats(sockets(1, 4), tmp_path / "one", "Operation not permitted") == []


def test_kernel_settings(tmp_path: Path) -> None:
    machine = sockets(2, 4)
    machine.cgroup = {
        "sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]",
        "proc/sys/kernel/numa_balancing": "1",
    }
    assert whats(machine, tmp_path) == [
        "transparent huge pages are off: reading the weights misses the TLB",
        "automatic NUMA balancing is on: it unmaps pages of bound ranks to sample them",
    ]


def test_nothing_allowed_is_an_error(tmp_path: Path) -> None:
    machine = sockets(1, 2)
    machine.cgroup = {"sys/fs/cgroup/cpuset.cpus.effective": "7"}
    report, findings = examine(machine.write(tmp_path))
    assert findings[0].level == "error"
    assert findings[0].what == "no usable CPU: online are 0-1, the cpuset has 7"
    assert "nodes" not in report


def test_missing_library_is_an_error() -> None:
    versions = {**dict.fromkeys(doctor.REQUIRED, "1.0"), "safetensors": None}
    expected = Finding("error", "the library safetensors is not installed", "pip install safetensors")
    assert library_findings(versions) == [expected]


def test_required_are_the_dependencies_of_the_package() -> None:
    pyproject = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    names = [re.split("[<=>]", dependency)[0] for dependency in pyproject["project"]["dependencies"]]
    assert list(doctor.REQUIRED) == names


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("mpirun (Open MPI) 4.1.4\n\nReport bugs to http://www.open-mpi.org", "Open MPI 4.1.4"),
        ("HYDRA build details:\n    Version:                                 5.0.2\n", "MPICH 5.0.2"),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.18 Build 20260101", "Intel MPI 2021.18"),
        ("MPICH Version:      5.0.2\nMPICH Release date: Fri Sep 25", "MPICH 5.0.2"),
        ("RuntimeError: cannot load MPI library", "RuntimeError: cannot load MPI library"),
        ("", ""),
    ],
)
def test_mpi_name(text: str, name: str) -> None:
    assert mpi_name(text) == name


@pytest.mark.parametrize(
    ("launcher", "library", "wrong"),
    [
        ("Open MPI 4.1.4", "MPICH 5.0.2", True),
        ("MPICH 5.0.2", "Open MPI 5.0.11", True),
        ("Intel MPI 2021.18", "MPICH 5.0.2", False),
        ("Open MPI 4.1.4", "Open MPI 4.1.4", False),
        ("Open MPI 4.1.4", None, False),
        ("Open MPI 4.1.4", "RuntimeError: cannot load MPI library", False),
    ],
)
def test_mpi_mismatch(launcher: str, library: str | None, wrong: bool) -> None:
    mpi: dict[str, Any] = {"launchers": {"mpirun": {"path": "/x", "version": launcher}}, "mpi4py_library": library}
    assert bool(mpi_findings(mpi)) == wrong


def test_launchers_on_the_path(tmp_path: Path) -> None:
    mpirun = tmp_path / "mpirun"
    mpirun.write_text("#!/bin/sh\necho 'mpirun (Open MPI) 5.0.11'\n")
    mpirun.chmod(0o755)
    done = run_python(DOCTOR, PATH=f"{tmp_path}")
    found = json.loads(done.stdout)["mpi"]["launchers"]
    assert found == {"mpirun": {"path": str(mpirun), "version": "Open MPI 5.0.11"}}


def test_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    """The tests run here, so nothing may be reported to prevent running."""
    assert doctor.run(argparse.Namespace(json=False, machine=None)) == 0
    out = capsys.readouterr().out
    assert "isa reference" in out
    assert out.count("in use") == 1
    assert "--tp auto" in out


def test_emulated_tiles_are_not_called_amx(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    rungs = [core.Rung("amx", True, "", emulated=True), *(core.Rung(name, True, "") for name in core.ISAS[1:])]
    monkeypatch.setattr(core, "isa_report", lambda: rungs)
    assert doctor.run(argparse.Namespace(json=False, machine=None)) == 0
    assert "isa amx (emulated tiles, for tests) in use" in capsys.readouterr().out
    assert doctor.run(argparse.Namespace(json=True, machine=None)) == 0
    assert [rung["emulated"] for rung in json.loads(capsys.readouterr().out)["isa"]] == [True] + [False] * 4


def test_without_the_compiled_core() -> None:
    done = run_python("import sys; sys.modules['tilerank.kernels._C'] = None" + DOCTOR)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert "the compiled core is missing: kernels run in plain torch, slowly" in [f["what"] for f in report["findings"]]
    assert [rung["name"] for rung in report["isa"] if rung["usable"]] == ["reference"]


def test_without_torch() -> None:
    done = run_python("import sys; sys.modules['torch'] = None" + DOCTOR)
    assert done.returncode == 1, done.stderr
    errors = [f["what"] for f in json.loads(done.stdout)["findings"] if f["level"] == "error"]
    assert len(errors) == 1
    assert errors[0].startswith("the kernels cannot be imported")


def test_wrong_isa_is_an_error() -> None:
    done = run_python(DOCTOR, TILERANK_ISA="sse2")
    assert done.returncode == 1, done.stderr
    errors = [f["what"] for f in json.loads(done.stdout)["findings"] if f["level"] == "error"]
    assert errors == ["TILERANK_ISA: expected one of amx, avx512_bf16, avx512, avx2, reference, found 'sse2'"]


def test_looking_at_the_machine_needs_no_torch() -> None:
    """The supervisor and doctor must start quickly, and even where torch is broken."""
    modules = "from tilerank.launch.commands import doctor; from tilerank.launch.host import binding, placement"
    done = run_python(f"import sys; {modules}; sys.exit('torch' in sys.modules)")
    assert done.returncode == 0, done.stderr
