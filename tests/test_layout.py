"""Rules of the code that no linter checks: imports between rooms, places of modules, sizes of files and folders."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
HOUSE = ROOT / "tilerank"
ROOMS = ["kernels", "parallel", "loader", "runtime", "launch"]  # each may import itself and those before it
PY = sorted(path for room in ROOMS for path in (HOUSE / room).rglob("*.py"))
JS = sorted((HOUSE / "runtime" / "server" / "web" / "static").glob("*.js"))
CPP = sorted(path for pattern in ("*.cpp", "*.h") for path in (HOUSE / "kernels" / "csrc").rglob(pattern))
MAX_LINES = 400
MAX_FILES = 30  # in a folder
SOURCES = {".py", ".pyi", ".cpp", ".h", ".json", ".txt", ".md"}


def room_of(path: Path) -> str:
    return path.relative_to(HOUSE).parts[0]


def imports(path: Path) -> list[tuple[int, str, int, ast.AST]]:
    """Return (line, module, level, node) of every import statement in a file, including those inside functions."""
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
                    wrong.append(f"{where} imports {module}, a later room")
            elif level == 0 and module in ROOMS:
                wrong.append(f"{where} imports {module} without its package")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("room", ROOMS)
def test_files_and_folders_of_a_room_import_each_other_in_no_circle(room: str) -> None:
    """Imports inside functions and for type checking count as well. A file beside folders counts as one of them."""
    files = {str(path.relative_to(HOUSE)): path for path in PY if room_of(path) == room}
    edges = {name: {target for target in imported_files(path) if target in files} for name, path in files.items()}
    assert not circles(edges)
    for level in range(2, max(name.count("/") for name in files) + 1):
        assert not circles(by_folder(edges, level)), level


def by_folder(edges: dict[str, set[str]], level: int) -> dict[str, set[str]]:
    """Merge the files that lie in the same folder `level` folders deep, and drop the arrows inside of it."""
    merged: dict[str, set[str]] = {}
    for name, targets in edges.items():
        folder = "/".join(name.split("/")[:level])
        merged.setdefault(folder, set()).update("/".join(target.split("/")[:level]) for target in targets)
    return {folder: targets - {folder} for folder, targets in merged.items()}


def circles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Return the sets of nodes that reach each other."""
    reachable = {name: closure(name, edges) for name in edges}
    found = {
        frozenset({name} | {other for other in reachable[name] if name in reachable[other]})
        for name in edges
        if name in reachable[name]
    }
    return [sorted(circle) for circle in found]


FLOORS = ["protocol", "media", "step", "models", "rank", "lead", "server"]  # each may import itself and those before it


def test_floors_of_the_runtime_import_only_floors_before_them() -> None:
    runtime = HOUSE / "runtime"
    assert {path.name for path in runtime.iterdir() if path.name != "__pycache__"} == {"__init__.py", *FLOORS}
    wrong = [
        f"{path.relative_to(ROOT)} imports {target}"
        for floor in FLOORS
        for path in (runtime / floor).rglob("*.py")
        for target in imported_files(path)
        if target.startswith("runtime/") and FLOORS.index(target.split("/")[1]) > FLOORS.index(floor)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("floor", ["protocol", "media"])
def test_floors_of_messages_and_media_import_no_torch(floor: str) -> None:
    """Imported in a fresh interpreter, so that what their own imports bring counts as well."""
    modules = [f"tilerank.runtime.{floor}.{path.stem}" for path in (HOUSE / "runtime" / floor).glob("*.py")]
    imports = "\n".join(f"import {module}" for module in modules)
    subprocess.run([sys.executable, "-c", f"import sys\n{imports}\nassert 'torch' not in sys.modules"], check=True)


def imported_files(path: Path) -> set[str]:
    """Return the files of its own room that a file imports, relative to the package."""
    found = set()
    for _, module, level, node in imports(path):
        if level == 0:
            continue
        folder = path.parents[level - 1].joinpath(*module.split(".")) if module else path.parents[level - 1]
        for alias in node.names if isinstance(node, ast.ImportFrom) else ():
            modules = (folder / f"{alias.name}.py", folder / alias.name / "__init__.py")
            owners = (folder.with_suffix(".py"), folder / "__init__.py")
            found |= {str(module.relative_to(HOUSE)) for module in modules if module.exists()} or {
                str(owner.relative_to(HOUSE)) for owner in owners if owner.exists()
            }
    return found


def closure(name: str, edges: dict[str, set[str]]) -> set[str]:
    """Return all files that can be reached from `name` over one or more imports."""
    reached: set[str] = set()
    todo = [name]
    while todo:
        for target in edges[todo.pop()] - reached:
            reached.add(target)
            todo.append(target)
    return reached


def test_every_folder_of_python_is_a_package_that_says_what_it_is() -> None:
    for folder in {path.parent for path in PY} | {HOUSE}:
        assert ast.get_docstring(ast.parse((folder / "__init__.py").read_text())), folder


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
    allowed = {"tilerank/kernels/core.py"}  # TILERANK_ISA
    wrong = [
        str(path.relative_to(ROOT))
        for path in PY
        if room_of(path) != "launch"
        and str(path.relative_to(ROOT)) not in allowed
        and re.search(r"os\.environ|os\.getenv|sys\.argv", path.read_text())
    ]
    assert not wrong, wrong


@pytest.mark.parametrize("path", PY + CPP + JS, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_can_be_read_in_one_sitting(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MAX_LINES


def test_folders_can_be_surveyed() -> None:
    sizes = {
        str(folder.relative_to(ROOT)): sum(path.is_file() and path.suffix in SOURCES for path in folder.iterdir())
        for top in (HOUSE, ROOT / "tests")
        for folder in (top, *(path for path in top.rglob("*") if path.is_dir()))
    }
    assert not {folder: size for folder, size in sizes.items() if size > MAX_FILES}


def test_targets_of_make_name_tests_that_exist() -> None:
    # pytest-xdist runs nothing at all when one of the paths given to it is missing.
    command = ["make", "--dry-run", "test-amx", "test-sanitize"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    named = set(re.findall(r"\btests/\S+\.py\b", printed))
    assert len(named) > 4
    assert not sorted(path for path in named if not (ROOT / path).exists())


def test_no_fast_math_or_native_flags() -> None:
    assert not re.search(r"-Ofast|-march=|[\"']-ffast-math", (ROOT / "setup.py").read_text())


KERNELS = HOUSE / "kernels"
HELPERS = {"__init__.py", "weight_formats.py"}  # what references share, and the arithmetic of weight formats
FACES = sorted(path.name for path in (KERNELS / "reference").glob("*.py") if path.name not in HELPERS)


def test_every_file_that_launches_kernels_has_a_reference() -> None:
    """Weight formats compute in plain torch themselves."""
    launching = {path.name for path in KERNELS.glob("*.py") if "from .contract import Contract" in path.read_text()}
    assert launching == set(FACES)


@pytest.mark.parametrize("file", FACES)
def test_every_kernel_face_has_a_reference_with_the_same_parameters(file: str) -> None:
    faces, references = functions(KERNELS / file), functions(KERNELS / "reference" / file)
    public = {name: parameters for name, parameters in faces.items() if not name.startswith("_")}
    assert public
    assert public == {name: references.get(name) for name in public}


def functions(path: Path) -> dict[str, list[str]]:
    """Return the top-level functions of a file with the names and defaults of their parameters."""
    found = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
                argument.annotation = None
            found[node.name] = ast.unparse(node.args).split(", ")
    return found


def test_every_launch_has_a_path_in_plain_torch() -> None:
    """A function that uses a contract without a reference first checks for the reference rung, or for a weight made for
    plain torch.
    """
    wrong = []
    for path in sorted(KERNELS.rglob("*.py")):
        tree = ast.parse(path.read_text())
        without = []
        for assignment in (node for node in tree.body if isinstance(node, ast.Assign)):
            calls = [
                call
                for call in ast.walk(assignment)
                if isinstance(call, ast.Call) and ast.unparse(call.func) == "Contract"
            ]
            without += [ast.unparse(assignment.targets[0]) for call in calls if len(call.args) == 1]
        for node in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
            source = ast.unparse(node)
            checks = re.search(r"core\.isa\(\) == 'reference'|\.is_plain", source)
            if without and re.search(rf"\b({'|'.join(without)})\b", source) and not checks:
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not wrong, wrong


def test_headers_for_target_regions_end_in_inl() -> None:
    """Headers that are compiled once per rung end in -inl.h, and no other header is included inside a target region:
    its inline functions would be compiled for that rung, and the linker might use them on every rung.
    """
    inside: dict[str, set[str]] = {}
    outside: dict[str, set[str]] = {}
    for path in CPP:
        text = path.read_text()
        opener = {".cpp": '#include "simd/foreach_isa.h"', ".h": "TR_REGION_BEGIN(TR_TARGET"}[path.suffix]
        begin = 0 if path.name.endswith("-inl.h") else text.find(opener) + 1 or len(text)
        for include in re.finditer(r'^#include (?:"(.*)"|<.*>)', text, re.M):
            into = inside if include.start() >= begin else outside
            into.setdefault(include[1] or include[0], set()).add(path.name)
    inline = {str(path.relative_to(KERNELS / "csrc")) for path in CPP if path.name.endswith("-inl.h")}
    assert inside.keys() == inline, {name: inside.get(name) for name in inside.keys() ^ inline}
    assert not outside.keys() & inline
    per_rung = {path.name for path in CPP if re.search(r"^namespace tilerank::TR_RUNG", path.read_text(), re.M)}
    assert {name for name in per_rung if not name.endswith((".cpp", "-inl.h"))} == set()


def test_types_of_compiled_files_have_names_of_their_own() -> None:
    """All kernels of a rung share a namespace. If two files define a type of the same name, the linker silently merges
    their member functions (the one definition rule).
    """
    owners: dict[str, set[str]] = {}
    for path in sorted((HOUSE / "kernels" / "csrc").rglob("*.cpp")):
        for name in re.findall(r"^(?:struct|class) (\w+)\b[^;]*$", path.read_text(), re.M):
            owners.setdefault(name, set()).add(path.name)
    assert len(owners) > 20
    assert {name: files for name, files in owners.items() if len(files) > 1} == {}
