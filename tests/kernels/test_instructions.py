"""The compiled core, disassembled: no function has instructions that a CPU of its rung may lack, no micro-kernel calls
another function."""

import re
import shutil
import subprocess

import pytest

RUNG = re.compile(r"tilerank::(avx2|avx512|avx512_bf16|amx)::")
MASKS = r"%k[0-7]|zmm"
UPPER_REGISTERS = r"%[xy]mm(1[6-9]|2\d|3[01])"
EVEX = rf"{MASKS}|{UPPER_REGISTERS}|vmovdq[au](8|16|32|64)\b|vpternlog|vpdp|vrndscale|vscalef"
BF16 = r"^vdpbf16ps|^vcvtne2?ps2bf16"
VBMI = r"^vpermb|^vperm[it]2b|^vpmultishiftqb"
TILES = r"^tile|^tdp"
# VBMI2, BITALG, VPOPCNTDQ, IFMA, CD, GFNI, FP16: no rung requires them.
NO_RUNG = (
    r"^vp(compress|expand)[bw]|^vpsh[lr]d|^vpopcnt|^vpshufbitqmb|^vpmadd52|^vpconflict|^vplzcnt|^vgf2p8"
    r"|^v(add|sub|mul|div|f\w+)[ps]h\b"
)
LACKS = {
    "no rung": rf"^v|{MASKS}|{TILES}",
    "avx2": rf"{EVEX}|{BF16}|{TILES}|{NO_RUNG}",
    "avx512": rf"{BF16}|{VBMI}|{TILES}|{NO_RUNG}",
    "avx512_bf16": rf"{TILES}|{NO_RUNG}",
    "amx": NO_RUNG,
}
# Instructions that show that the disassembly was read and contains code of the rung.
HAS = {"no rung": "^mov", "avx2": "%ymm", "avx512": "zmm", "avx512_bf16": "^vdpbf16ps", "amx": "^tdpbf16ps"}


@pytest.fixture(scope="module")
def instructions() -> dict[str, list[tuple[str, str]]]:
    """The instructions of every rung, each after the function that contains it."""
    compiled = pytest.importorskip("tilerank.kernels._C", reason="no compiled core", exc_type=ImportError)
    if not shutil.which("objdump"):
        pytest.skip("no objdump (Debian package binutils)")
    disassembly = subprocess.run(
        ["objdump", "-d", "-C", "--no-show-raw-insn", str(compiled.__file__)],
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, list[tuple[str, str]]] = {rung: [] for rung in LACKS}
    function, rung = "", "no rung"
    for line in disassembly.stdout.splitlines():
        if line.endswith(">:"):
            function = line.split(" ", 1)[1]
            name = RUNG.search(function)
            rung = name[1] if name else "no rung"
        elif "\t" in line:
            found[rung].append((function, line.split("\t", 1)[1].strip()))
    if not found["avx2"]:
        pytest.skip("the core is stripped of its symbols")
    return found


@pytest.mark.parametrize("rung", LACKS)
def test_a_rung_has_no_instruction_that_its_cpus_may_lack(
    instructions: dict[str, list[tuple[str, str]]], rung: str
) -> None:
    has, lacks = re.compile(HAS[rung]), re.compile(LACKS[rung])
    assert any(has.search(text) for _, text in instructions[rung])
    wrong = [(function, text) for function, text in instructions[rung] if lacks.search(text)]
    assert wrong[:5] == []


MICRO_KERNELS = {"multiply_int8_step", "multiply_panel", "multiply_piece", "add_k_block_apart", "product_block"}
"""The functions of the vector rungs in which sums stay in registers; some are inline with AVX2."""


@pytest.mark.parametrize("rung", ["avx2", "avx512", "avx512_bf16"])
def test_a_micro_kernel_calls_nothing(instructions: dict[str, list[tuple[str, str]]], rung: str) -> None:
    """A call in a micro-kernel moves its sums through memory, which is much slower with equal results."""
    seen = set()
    for function, text in instructions[rung]:
        name = re.search(r"::(\w+)<", function)
        if name and name[1] in MICRO_KERNELS and "lambda" not in function:
            seen.add(name[1])
            assert not text.startswith("call"), function
    assert seen >= {"multiply_int8_step", "multiply_panel"}
