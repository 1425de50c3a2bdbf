"""Builds the compiled core, tilerank.kernels._C; everything else is in pyproject.toml."""

import hashlib
import os
import sysconfig
from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension, build_ext, naive_recompile
from setuptools import setup

CSRC = Path("tilerank/kernels/csrc")
RUNGS = ["amx", "avx512_bf16", "avx512", "avx2"]

# No contraction: code that GCC copies must round alike in every copy, or equal rows would differ; fma is written out.
# No -march and no -ffast-math: instruction sets are chosen per function at run time (target regions), and linking with
# fast-math would switch the whole process to flush-to-zero.
FLAGS = ["-O3", "-fno-math-errno", "-ffp-contract=off", "-Wall", "-Wextra"]

# TILERANK_WERROR=1: for developers. A compiler that is newer than the code may have new warnings.
WARNINGS = ["-Werror"] if os.environ.get("TILERANK_WERROR") == "1" else []


def needs_recompile(obj: str, src: str) -> bool:
    """A header or this file changed, too: objects that disagree about a class would still link."""
    return any(naive_recompile(obj, str(path)) for path in (src, *CSRC.rglob("*.h"), Path(__file__)))


# TILERANK_SANITIZE=address,undefined: a core that checks itself, for `make test-sanitize`.
SANITIZE = os.environ.get("TILERANK_SANITIZE")
LINK = []
if SANITIZE:
    LINK = [f"-fsanitize={SANITIZE}"]
    # -O1 loses track of what is initialised, hence no such warning. Registers are allocated by function; by loop, among
    # so many checks, their allocation took a third of the time.
    FLAGS += [*LINK, "-fno-sanitize-recover=all", "-O1", "-fira-region=one", "-g1"]
    FLAGS += ["-Wno-maybe-uninitialized", "-Wno-uninitialized"]
    # ASan inserts calls, which compile faster, into functions with more than 400 accesses, which are the unrolled ones.
    # With calls in all functions, a test of products took four times as long.
    FLAGS += ["--param=asan-instrumentation-with-call-threshold=400"]

# TILERANK_EMULATE_AMX=1: a core whose amx rung runs on emulated tiles, on CPUs without AMX, for `make test-amx`. Its
# sources compile in two thirds of the time that -O3 takes.
EMULATION = ["-DTR_EMULATE_AMX", "-O1"] if os.environ.get("TILERANK_EMULATE_AMX") == "1" else []

# TILERANK_NEWEST_RUNG=avx2: a core without kernels for the newer rungs, for tests on a CPU that lacks these. It
# compiles in a third of the time.
if newest := os.environ.get("TILERANK_NEWEST_RUNG"):
    FLAGS += [f"-DTR_LEFT_OUT={RUNGS.index(newest)}"]


class BuildCore(build_ext):
    """Compiles only what has changed since the last build with the same flags, in which every build finds its objects.

    Emulated tiles concern the files of `core` and those with tiles. The other objects are those that users get.
    """

    def finalize_options(self) -> None:
        self.build_temp = self.build_temp or "build/objects"  # pip would give a directory that it removes
        super().finalize_options()

    def build_extension(self, ext: Pybind11Extension) -> None:
        emulated = [src for src in ext.sources if EMULATION and ("/core/" in src or src.endswith("_amx.cpp"))]
        ext.extra_objects = self.compiler.compile(
            emulated,
            output_dir=self._objects(EMULATION),
            include_dirs=ext.include_dirs,
            extra_postargs=[*ext.extra_compile_args, *EMULATION],
        )
        ext.sources, ext.depends = [src for src in ext.sources if src not in emulated], [*ext.depends, *emulated]
        self.build_temp = self._objects([])
        super().build_extension(ext)

    def _objects(self, flags: list[str]) -> str:
        """Return the directory of the objects that FLAGS and `flags` make."""
        command = " ".join([*self.compiler.compiler_so_cxx, *FLAGS, *flags])
        digest = hashlib.sha256(command.encode()).hexdigest()[:12]
        return str(Path(self.build_temp, f"{sysconfig.get_config_var('SOABI')}-{digest}"))


ParallelCompile(default=0, needs_recompile=needs_recompile).install()
setup(
    ext_modules=[
        Pybind11Extension(
            "tilerank.kernels._C",
            sorted(str(path) for path in CSRC.rglob("*.cpp")),
            depends=sorted(str(path) for path in CSRC.rglob("*.h")),
            include_dirs=[str(CSRC)],
            extra_compile_args=[*FLAGS, *WARNINGS],
            extra_link_args=LINK,
            cxx_std=20,
        )
    ],
    cmdclass={"build_ext": BuildCore},
)
