"""Boots this Python and the launch package in a virtual machine with several NUMA nodes, and returns its output.

No distribution is installed in it. The initial RAM disk holds busybox, the Python that runs the tests at the same path
as here, the libraries of both, and this folder. The kernel comes from Debian's package, without installing it. Software
emulation (TCG) is enough, because nothing here measures time, and it works in any container.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent
CACHE = REPOSITORY / "build/numa"  # the kernel, 8 MB
KERNEL_PACKAGE = "linux-image-cloud-amd64"
PROGRAMS = {"qemu-system-x86_64": "qemu-system-x86", "cpio": "cpio", "busybox": "busybox-static"}
# Parts of the standard library that are large or need large libraries, and that no code in the machine imports.
LEFT_OUT = re.compile(r"(site-packages|dist-packages|test|idlelib|tkinter|ensurepip|lib2to3|config-[^/]*|pydoc_data)/")
LEFT_OUT_MODULES = re.compile(r"_(ssl|hashlib|sqlite3|tkinter|curses|dbm|gdbm|test|ctypes_test|xx)|readline|xx")


def missing() -> str | None:
    """Return what is missing and cannot be fetched, with the names of the Debian packages, or None."""
    packages = [package for program, package in PROGRAMS.items() if not shutil.which(program)]
    if packages:
        return f"not installed: {', '.join(packages)} (apt-get install them)"
    try:
        kernel()
    except RuntimeError as error:
        return str(error)
    return None


def boot(
    directory: Path, machine: Sequence[str], checks: str, *, append: str = "", timeout: int = 300
) -> dict[str, Any]:
    """Boot with qemu's arguments `machine`; return the object that the file `checks` of this folder printed.

    RuntimeError with the end of the console if the checks did not finish.
    """
    initrd = build(directory)
    command = [
        *("qemu-system-x86_64", "-accel", "tcg,thread=multi", "-nodefaults", "-no-reboot"),
        *("-display", "none", "-serial", "stdio", "-kernel", str(kernel()), "-initrd", str(initrd)),
        *("-append", f"console=ttyS0 panic=-1 quiet {append} -- {checks}"),
        *machine,
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired as error:
        console = (error.stdout or b"").decode(errors="replace")
        raise RuntimeError(f"the virtual machine did not end within {timeout} s:\n{console[-4000:]}") from None
    finally:
        initrd.unlink()
    answer = re.search(r"^ANSWER (.*)$", done.stdout, re.MULTILINE)
    if not answer or not re.search(r"^RC=0\s*$", done.stdout, re.MULTILINE):
        raise RuntimeError(f"the checks failed in the virtual machine:\n{done.stdout[-4000:]}{done.stderr[-2000:]}")
    return dict(json.loads(answer[1]))


def kernel() -> Path:
    """Return the newest Debian cloud kernel: installed, fetched earlier, or fetched now."""
    if not _kernels():
        if not shutil.which("apt-get"):
            raise RuntimeError(
                f"no kernel of the package {KERNEL_PACKAGE} in /boot or {CACHE}, and no apt-get to fetch it"
            )
        CACHE.mkdir(parents=True, exist_ok=True)
        depends = _run(["apt-cache", "depends", KERNEL_PACKAGE])
        package = re.search(r"Depends: (linux-image-\S+)", depends)
        if not package:
            raise RuntimeError(f"apt has no package {KERNEL_PACKAGE}; run apt-get update")
        _run(["apt-get", "download", package[1]], CACHE)
        for archive in CACHE.glob("*.deb"):
            _run(["dpkg-deb", "-x", archive.name, "unpacked"], CACHE)
            archive.unlink()
        for image in (CACHE / "unpacked/boot").glob("vmlinuz-*"):
            image.rename(CACHE / image.name)
        shutil.rmtree(CACHE / "unpacked")
    return _kernels()[-1]


def _kernels() -> list[Path]:
    return sorted([*Path("/boot").glob("vmlinuz-*-cloud-amd64"), *CACHE.glob("vmlinuz-*-cloud-amd64")])


def build(directory: Path) -> Path:
    """Write the initial RAM disk, about 70 MB. It is uncompressed, since emulated code would have to unpack it."""
    root = directory / "root"
    python = Path(sys.executable).resolve()
    library = Path(sysconfig.get_path("stdlib"))
    modules = [path for path in library.rglob("*") if _wanted(path.relative_to(library))]
    busybox = Path(str(shutil.which("busybox")))
    _copy(root, "/", [python, *modules])
    _copy(root, "/", _libraries([python, busybox, *(path for path in modules if path.suffix == ".so")]))
    _copy(root, "/bin", [busybox])
    _copy(root, "/", [HERE / "init"], flat=True)
    _copy(root, "/tests/numa", HERE.glob("*.py"), flat=True)
    package = REPOSITORY / "tilerank"
    errors = ("runtime/protocol", "loader", "parallel", "kernels")  # launch.errors names their exceptions
    for module in [
        *package.glob("launch/*.py"),
        *package.glob("launch/commands/*.py"),
        *package.glob("launch/host/*.py"),
        *(package / folder / f"{name}.py" for folder in errors for name in ("__init__", "errors")),
        package / "runtime" / "__init__.py",
        package / "__init__.py",
    ]:
        _copy(root, f"/{module.parent.relative_to(REPOSITORY)}", [module], flat=True)
    (root / "init").chmod(0o755)
    environ = {"PYTHON": str(python), "PYTHONHOME": sys.base_prefix, "PYTHONPATH": "/"}
    (root / "environment").write_text("".join(f"export {k}={shlex.quote(v)}\n" for k, v in environ.items()))
    for name in ("proc", "sys", "dev", "tmp"):
        (root / name).mkdir()
    initrd = directory / "initrd"
    with initrd.open("wb") as out:
        names = "\n".join(str(path.relative_to(root)) for path in sorted(root.rglob("*")))
        cpio = ["cpio", "-o", "-H", "newc", "-R", "0:0", "--quiet"]
        subprocess.run(cpio, cwd=root, input=names.encode(), stdout=out, check=True)
    shutil.rmtree(root)
    return initrd


def _wanted(path: Path) -> bool:
    if path.suffix not in (".py", ".pyc", ".so") or ".opt-" in path.name or LEFT_OUT.match(str(path)):
        return False
    return not (path.suffix == ".so" and LEFT_OUT_MODULES.match(path.name))


def _libraries(binaries: Iterable[Path]) -> list[Path]:
    """Return the shared libraries, loader included, that the binaries need."""
    ldd = subprocess.run(["ldd", *map(str, binaries)], capture_output=True, text=True)
    return [Path(name) for name in sorted(set(re.findall(r"(?:=> |^\s+)(/\S+) \(0x", ldd.stdout, re.MULTILINE)))]


def _copy(root: Path, to: str, paths: Iterable[Path], *, flat: bool = False) -> None:
    for path in paths:
        target = root / to.lstrip("/") / (path.name if flat or to == "/bin" else str(path).lstrip("/"))
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists():
            shutil.copy2(path, target)


def _run(command: list[str], directory: Path | None = None) -> str:
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"})
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command)} failed: {done.stderr.strip()}")
    return done.stdout
