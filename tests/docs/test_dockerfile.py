"""The steps of Dockerfile in bare root file systems: `pytest -m long tests/docs`. Needs root and debootstrap.

There is no container engine here, so a file system of Debian with its own Python, made by debootstrap, stands for the
base image.
"""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from command import DEMO
from hub import Hub

ROOT = Path(__file__).parents[2]
BASE = "python:3.11-slim-bookworm"  # Debian 12, whose own Python is 3.11
PACKAGES = "ca-certificates,python3,python3-dev,python3-venv"


class Stage:
    """A root file system on which the instructions of one stage are carried out."""

    def __init__(self, base: Path, root: Path) -> None:
        subprocess.run(["cp", "-a", base, root], check=True)  # with device files
        self.root = root
        pip = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
        self.environment = {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "LANG": "C.UTF-8", **pip}
        self.user = "root"

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            ["chroot", f"--userspec={self.user}", self.root, *command],
            env=self.environment,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
        )
        assert done.returncode == 0, (command, done.stdout[-2000:], done.stderr[-2000:])
        return done


def instructions() -> list[list[tuple[str, str]]]:
    """Return the instructions of each stage of Dockerfile: word and rest of the line."""
    text = re.sub(r"\\\n\s*", "", (ROOT / "Dockerfile").read_text())
    found: list[list[tuple[str, str]]] = []
    for line in text.splitlines():
        word, _, rest = line.partition(" ")
        if word == "FROM":
            assert rest.split()[0] == BASE
            found.append([])
        elif word not in ("", "#"):
            found[-1].append((word, rest))
    return found


def base_image(folder: Path) -> Path:
    """Make what the base image has: Debian, and Python with pip as commands in /usr/local/bin."""
    subprocess.run(["debootstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm", folder], check=True)
    subprocess.run(["chroot", folder, "python3", "-m", "venv", "/usr/local"], check=True)
    # How this machine reaches its package indices.
    for path in ("/etc/resolv.conf", "/etc/ssl/certs/ca-certificates.crt", "/etc/pip.conf"):
        if Path(path).exists():
            shutil.copy(path, folder / path[1:])
    if (wheels := Path(os.environ.get("PIP_FIND_LINKS", ""))).is_absolute() and wheels.is_dir():
        shutil.copytree(wheels, folder / wheels.relative_to("/"))
    return folder


def build(stage: Stage, steps: list[tuple[str, str]], built: Stage | None, clone: Path) -> str:
    """Carry out the steps of a stage and return its entry point. built: the stage before."""
    entry = ""
    for word, rest in steps:
        if word == "COPY":
            assert rest == ". /src"
            shutil.copytree(clone, stage.root / "src")
        elif word == "RUN":
            mount, command = re.fullmatch(r"(?:--mount=(\S+) )?(.*)", rest).groups()  # type: ignore[union-attr]
            source = dict(part.split("=") for part in mount.split(",")) if mount else {}
            if source:
                assert built is not None
                shutil.copytree(built.root / source["source"][1:], stage.root / source["target"][1:])
            stage.run("/bin/sh", "-c", command)
            if source:
                shutil.rmtree(stage.root / source["target"][1:])
        elif word == "USER":
            stage.user = rest
        elif word == "ENV":
            stage.environment |= dict([rest.split("=")])
        elif word == "VOLUME":
            # A volume on a folder that the image does not have belongs to root.
            (stage.root / rest[1:]).mkdir(parents=True, exist_ok=True)
        elif word == "ENTRYPOINT":
            entry = rest
        else:
            assert word in ("ARG", "EXPOSE", "HEALTHCHECK"), word
    return entry


@pytest.mark.long
def test_the_steps_of_the_image(tmp_path: Path) -> None:
    if os.getuid() != 0 or shutil.which("debootstrap") is None:
        pytest.skip("needs root and debootstrap (Debian: debootstrap)")
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
    base = base_image(tmp_path / "base")
    first, second = instructions()
    built = Stage(base, tmp_path / "build")
    build(built, first, None, clone)
    image = Stage(base, tmp_path / "image")
    entry = build(image, second, built, clone)
    assert image.user == "tilerank"
    assert not (image.root / "usr/bin/g++").exists() and not (image.root / "src").exists()
    with mounted("proc", image.root / "proc"), mounted("sysfs", image.root / "sys"):
        serve(image, entry, dict(second)["HEALTHCHECK"])


@contextmanager
def mounted(kind: str, folder: Path) -> Iterator[None]:
    subprocess.run(["mount", "-t", kind, kind, folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", folder], check=True)


def serve(image: Stage, entry: str, health: str) -> None:
    """Run the command that Dockerfile names, await the health check, and end it as a container engine does."""
    named = re.search(r"^# docker run .* tilerank (\S+) (.*)$", (ROOT / "Dockerfile").read_text(), re.M)
    assert named is not None
    model, options = named.groups()
    inside = ["chroot", f"--userspec={image.user}", image.root, *json.loads(entry), model, *options.split()]
    with (
        closing(Hub({model: DEMO})) as hub,
        subprocess.Popen(
            inside, env=image.environment | {"HF_ENDPOINT": hub.url}, stderr=subprocess.PIPE, text=True
        ) as server,
    ):
        try:
            assert server.stderr is not None
            said = ""
            while "is served at" not in said:
                line = server.stderr.readline()
                assert line, said
                said += line
            *check, pid = json.loads(health.partition("CMD ")[2])
            assert pid == "1"  # of the server, which here is a process of many
            image.run(*check, str(server.pid))
            server.terminate()
            assert server.wait(60) == 0
        finally:
            server.kill()
