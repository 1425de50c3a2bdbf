"""ik_llama.cpp as a peer of benchmarks/compare.py: `python run_ik_llama_cpp.py WORKLOAD RESULT`.

Runs without tilerank in a Python environment into which a build of ik_llama.cpp is installed (cmake --install build
--prefix ENVIRONMENT). The docstring of PEERS in benchmarks/compare.py describes WORKLOAD and RESULT. It has no Python
package, so that ik_llama_cpp.cpp measures it, which is compiled with its header: the structs of its interface change.
"""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_name("ik_llama_cpp.cpp")
PREFIX = Path(sys.prefix)


def compiled(scratch: Path) -> Path:
    """Return the program, compiled with the headers and libraries of this environment."""
    program, libraries = scratch / SOURCE.stem, PREFIX / "lib"
    # An old RPATH, unlike RUNPATH, leads to the libraries that libllama needs as well.
    places = [f"-I{PREFIX / 'include'}", f"-L{libraries}", f"-Wl,--disable-new-dtags,-rpath,{libraries}"]
    command = ["g++", "-O2", "-std=c++20", str(SOURCE), *places, "-lllama", "-o", str(program)]
    if subprocess.run(command, check=False).returncode != 0:
        sys.exit(f"g++ cannot compile {SOURCE.name} with {PREFIX / 'include' / 'llama.h'}")
    return program


def version() -> str:
    """Return the version of the installed build, 0.0.N after the number of commits."""
    described = (PREFIX / "lib" / "pkgconfig" / "llama.pc").read_text()
    found = re.search(r"^Version: (\S+)$", described, re.MULTILINE)
    return found[1] if found else "unknown"


def main(workload: dict[str, Any]) -> dict[str, Any]:
    os.sched_setaffinity(0, workload["cores"])  # before the program starts: it inherits it
    start = time.monotonic()
    program = compiled(Path(workload["scratch"]))
    compiled_s = time.monotonic() - start
    numbers: list[int] = []
    for case in workload["cases"]:
        numbers += [case["new_tokens"], len(case["prompts"])]
        for prompt in case["prompts"]:
            numbers += [len(prompt), *prompt]
    command = [str(program), workload["model"], str(len(workload["cores"]))]
    done = subprocess.run(command, input=" ".join(map(str, numbers)), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last_line = (done.stderr.strip().splitlines() or ["no message"])[-1]
        sys.exit(f"{SOURCE.stem} ended with status {done.returncode}: {last_line}")
    load_s, ready_at, *cases = done.stdout.splitlines()
    events = []
    for line in cases:
        words = line.split()
        events.append([[int(words[i]), float(words[i + 1])] for i in range(0, len(words), 2)])
    # The steady clock of C++ is time.monotonic().
    ready = float(ready_at) - compiled_s
    return {"version": version(), "load_s": float(load_s), "ready_at": ready, "events": events}


if __name__ == "__main__":
    workload_file, result_file = map(Path, sys.argv[1:])
    result_file.write_text(json.dumps(main(json.loads(workload_file.read_text()))))
