"""The rules of the house that no linter knows: who may import whom, where things may live, how long files may be."""

import ast
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ["kernels", "parallel", "loader", "runtime", "launch"]  # each sees itself and what stands before it
ENTRY = ROOT / "launch" / "entry" / "__main__.py"  # a package of its own, `tilerank`: what python -m runs
PY = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py") if path != ENTRY)
CPP = sorted(path for pattern in ("*.cpp", "*.h") for path in (ROOT / "kernels" / "csrc").glob(pattern))
MAX_LINES = 450


def room_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0]


def imports(path: Path) -> list[tuple[int, str, int, ast.AST]]:
    """(line, module, level, node) of every import statement in a file, including those inside functions."""
    found: list[tuple[int, str, int, ast.AST]] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name, 0, node) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found.append((node.lineno, node.module or "", node.level, node))
    return found


def test_rooms_import_only_to_their_right() -> None:
    wrong = []
    for path in PY:
        room = room_of(path)
        for line, module, level, _ in imports(path):
            where = f"{path.relative_to(ROOT)}:{line}"
            if level == 0 and module.startswith("tilerank."):
                target = module.split(".")[1]
                if target == room:
                    wrong.append(f"{where} imports its own room absolutely: {module}")
                elif ROOMS.index(target) > ROOMS.index(room):
                    wrong.append(f"{where} imports {module}, which stands to its left")
            elif level == 0 and module in ROOMS:
                wrong.append(f"{where} imports {module} without its package")
    assert not wrong, "\n".join(wrong)


def test_every_folder_of_python_is_a_listed_package() -> None:
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    folders = {path.parent for path in PY}
    found = {"tilerank"} | {"tilerank." + ".".join(folder.relative_to(ROOT).parts) for folder in folders}
    assert found == listed


def test_no_init_files() -> None:
    # `kernels/__init__.py` would shadow the public package `kernels` that transformers looks for.
    assert not [str(path) for room in [*ROOMS, "tests"] for path in (ROOT / room).rglob("__init__.py")]


FORBIDDEN = {
    "pickle": ROOMS,
    "dill": ROOMS,
    "marshal": ROOMS,
    "shelve": ROOMS,
    "multiprocessing": ROOMS,
    "torch.distributed": [room for room in ROOMS if room != "parallel"],
    "mpi4py": [room for room in ROOMS if room not in ("parallel", "launch")],
    "safetensors": [room for room in ROOMS if room != "loader"],
    "signal": [room for room in ROOMS if room != "launch"],
    "subprocess": [room for room in ROOMS if room != "launch"],
}


@pytest.mark.parametrize("module", FORBIDDEN)
def test_modules_stay_in_their_room(module: str) -> None:
    wrong = []
    for path in PY:
        if room_of(path) not in FORBIDDEN[module]:
            continue
        for line, name, level, _ in imports(path):
            if level == 0 and (name == module or name.startswith(module + ".")):
                wrong.append(f"{path.relative_to(ROOT)}:{line}")
    assert not wrong, f"{module} does not belong in {wrong}"


def test_no_code_execution_or_unsafe_loads() -> None:
    calls = re.compile(r"torch\.load\(|(?<![\w.])eval\(|(?<![\w.])exec\(|trust_remote_code|os\.system\(|shell=True")
    wrong = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in PY
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if calls.search(line)
    ]
    assert not wrong, wrong


def test_only_launch_reads_the_environment() -> None:
    allowed = {"kernels/core.py"}  # TILERANK_ISA
    wrong = [
        str(path.relative_to(ROOT))
        for path in PY
        if room_of(path) != "launch"
        and str(path.relative_to(ROOT)) not in allowed
        and re.search(r"os\.environ|os\.getenv|sys\.argv", path.read_text())
    ]
    assert not wrong, wrong


@pytest.mark.parametrize("path", PY + CPP, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_can_be_read_in_one_sitting(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MAX_LINES


def test_no_fast_math_or_native_flags() -> None:
    assert not re.search(r"-Ofast|-march=|[\"']-ffast-math", (ROOT / "setup.py").read_text())


def test_every_kernel_face_has_a_reference() -> None:
    """A kernel exists as a face in ops/linear/attention and as a plain-torch reference of the same name."""
    reference = functions(ROOT / "kernels" / "reference.py") | functions(ROOT / "kernels" / "reference_attention.py")
    faces = {
        name
        for file in ("ops.py", "attention.py", "linear.py")
        for name in functions(ROOT / "kernels" / file)
        if not name.startswith("_")
    }
    assert faces and faces <= reference, f"without reference: {sorted(faces - reference)}"


def functions(path: Path) -> set[str]:
    return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}


def test_types_of_compiled_files_have_names_of_their_own() -> None:
    """All kernels of a rung share a namespace: with the same name in two files the linker takes one's functions for
    both (the one definition rule), and no compiler says so."""
    owners: dict[str, set[str]] = {}
    for path in sorted((ROOT / "kernels" / "csrc").glob("*.cpp")):
        for name in re.findall(r"^(?:struct|class) (\w+)\b[^;]*$", path.read_text(), re.M):
            owners.setdefault(name, set()).add(path.name)
    assert len(owners) > 20
    assert {name: files for name, files in owners.items() if len(files) > 1} == {}
