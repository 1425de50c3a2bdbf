"""AMX tiles: their emulation (csrc/simd/amx_emulated-inl.h) against the arithmetic that Intel's manual specifies,
written out in numpy. On a CPU with AMX the instructions have to give the same numbers."""

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.kernels.test_threads import CSRC
from tilerank.kernels import core

FLAGS = ["-std=c++20", "-O2", "-ffp-contract=off", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror"]
AMX, AVX512_BF16 = core.isa_report()[:2]

Shape = tuple[int, int]  # rows, bytes per row


class Tiles:
    """The functions of amx_test.cpp; each raises ValueError with the sentence of the Error that it caught."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))

    def __getattr__(self, name: str) -> Callable[..., None]:
        def call(*arguments: object) -> None:
            message = ctypes.create_string_buffer(512)
            passed = [
                argument.ctypes.data_as(ctypes.c_void_p) if isinstance(argument, np.ndarray) else argument
                for argument in arguments
            ]
            if getattr(self._library, name)(*passed, message):
                raise ValueError(message.value.decode())

        return call


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], Tiles]:
    """Compiles the tiles, emulated or not; skips where the CPU cannot run them."""

    @cache
    def build(emulate: bool) -> Tiles:
        if not emulate and (AMX.emulated or not AMX.usable):
            pytest.skip(AMX.reason or "this build of the core emulates AMX")
        if not AVX512_BF16.usable:
            pytest.skip(AVX512_BF16.reason)
        if not shutil.which("g++"):
            pytest.skip("no g++")
        folder, library = Path(__file__).parent, tmp_path_factory.mktemp("amx") / "tiles.so"
        flags = [*FLAGS, *(["-DTR_EMULATE_AMX"] if emulate else []), f"-I{CSRC}", f"-I{folder}"]
        subprocess.run(["g++", *flags, str(folder / "amx_test.cpp"), "-o", str(library)], check=True)
        return Tiles(library)

    return build


@pytest.fixture(params=["emulated", "instructions"])
def tiles(request: pytest.FixtureRequest, build: Callable[[bool], Tiles]) -> Tiles:
    return build(request.param == "emulated")


@pytest.fixture
def emulated(build: Callable[[bool], Tiles]) -> Tiles:
    """The emulation alone: on misuse the CPU ends the process with a signal."""
    return build(True)


def config(*shapes: Shape, palette: int = 1, start_row: int = 0) -> NDArray[np.uint8]:
    """The 64 bytes of ldtilecfg's operand: palette, start row, 14 reserved, 16 words of bytes, 16 bytes of rows."""
    operand = np.zeros(64, np.uint8)
    operand[:2] = palette, start_row
    for tile, (rows, row_bytes) in enumerate(shapes):
        operand[16 + 2 * tile : 18 + 2 * tile] = row_bytes & 0xFF, row_bytes >> 8
        operand[48 + tile] = rows
    return operand


def bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The bits of values that bfloat16 can hold."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    assert not (bits & 0xFFFF).any()
    return (bits >> 16).astype(np.uint16)


def spread(values: NDArray[np.generic], stride: int) -> NDArray[np.uint8]:
    """Rows so many bytes apart; 0xaa between them."""
    rows = np.ascontiguousarray(values).view(np.uint8).reshape(len(values), -1)
    memory = np.full((len(rows), stride), 0xAA, np.uint8)
    memory[:, : rows.shape[1]] = rows
    return memory


def pairs(b: NDArray[np.generic], group: int) -> NDArray[np.generic]:
    """B as the products read it: `group` consecutive rows of a column lie side by side."""
    k, n = b.shape
    return np.ascontiguousarray(b.reshape(k // group, group, n).transpose(0, 2, 1)).reshape(k // group, n * group)


def random_bf16(generator: np.random.Generator, *shape: int) -> NDArray[np.float32]:
    """Values of 8 significant bits between 2^-15 and 2^8: the order in which they are summed shows in the result."""
    whole = generator.integers(-255, 256, shape)
    return np.ldexp(whole.astype(np.float32), generator.integers(-15, 1, shape)).astype(np.float32)


def product_as_specified(c: NDArray[np.float32], a: NDArray[np.float32], b: NDArray[np.float32]) -> NDArray[np.float32]:
    """C + A @ B: fp32 sums of the even and of the odd k, each in order, from zero; then C + (even + odd).

    A product of two bf16 is exact in fp32, so a fused product and sum rounds once, as the sum here does.
    """
    even, odd = np.zeros_like(c), np.zeros_like(c)
    for k in range(0, a.shape[1], 2):
        even = even + a[:, k, None] * b[k]
        odd = odd + a[:, k + 1, None] * b[k + 1]
    return c + (even + odd)


SHAPES = [(16, 32, 16), (1, 2, 1), (7, 10, 5), (16, 2, 16), (3, 32, 16), (16, 32, 3)]


@pytest.mark.parametrize(("m", "k", "n"), SHAPES)
def test_bf16_product_has_the_specified_bits(tiles: Tiles, m: int, k: int, n: int) -> None:
    generator = np.random.default_rng(m * k + n)
    c = np.ldexp(generator.standard_normal((m, n)), 4).astype(np.float32)
    a, b = random_bf16(generator, m, k), random_bf16(generator, k, n)
    memory, stride = spread(c, 80), 80
    shapes = config((m, 4 * n), (m, 2 * k), (k // 2, 4 * n))
    tiles.multiply(
        shapes, 0, memory, spread(bf16(a), stride), spread(pairs(bf16(b), 2), stride), ctypes.c_int64(stride)
    )
    found = np.ascontiguousarray(memory[:, : 4 * n]).view(np.float32)
    expected = product_as_specified(c, a, b)
    np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))
    assert (memory[:, 4 * n :] == 0xAA).all(), "bytes between the rows are not written"
    if (m, k, n) == (16, 32, 16):
        assert (expected != c + sum(a[:, i, None] * b[i] for i in range(k))).any(), "another order has other bits"


@pytest.mark.parametrize(("m", "k", "n"), [(16, 64, 16), (1, 4, 1), (7, 20, 5), (16, 64, 3)])
def test_int8_product_is_exact_modulo_two_to_the_32nd(tiles: Tiles, m: int, k: int, n: int) -> None:
    generator = np.random.default_rng(m * k + n)
    c = generator.integers(-(2**31), 2**31, (m, n)).astype(np.int32)
    a, b = generator.integers(-128, 128, (m, k)).astype(np.int8), generator.integers(0, 256, (k, n)).astype(np.uint8)
    a[0], b[:, 0] = -128, 255
    memory, stride = spread(c, 64), 64
    shapes = config((m, 4 * n), (m, k), (k // 4, 4 * n))
    tiles.multiply(shapes, 1, memory, spread(a, stride), spread(pairs(b, 4), stride), ctypes.c_int64(stride))
    found = np.ascontiguousarray(memory[:, : 4 * n]).view(np.int32)
    expected = (c.astype(np.int64) + a.astype(np.int64) @ b.astype(np.int64)).astype(np.int32)
    np.testing.assert_array_equal(found, expected)


def test_blocks_are_whole_tiles(tiles: Tiles) -> None:
    generator = np.random.default_rng(0)
    a, b = random_bf16(generator, 16, 32), random_bf16(generator, 32, 16)
    c = np.full((16, 16), np.nan, np.float32)
    tiles.multiply_blocks(config(*[(16, 64)] * 4), c, bf16(a), pairs(bf16(b), 2))
    once = product_as_specified(np.zeros_like(c), a, b)
    np.testing.assert_array_equal(c, product_as_specified(once, a, b))


TINY = 2.0**-133  # a subnormal, in bfloat16 as well


@pytest.mark.parametrize(
    ("c", "a", "b", "expected"),
    [
        pytest.param(1.0, (2.0, 3.0), (4.0, 5.0), 24.0, id="sum"),
        pytest.param(0.0, (TINY, 0.0), (2.0**100, 0.0), 0.0, id="subnormal-a"),
        pytest.param(0.0, (0.0, 2.0**100), (0.0, TINY), 0.0, id="subnormal-b"),
        pytest.param(TINY, (0.0, 0.0), (0.0, 0.0), 0.0, id="subnormal-c"),
        pytest.param(0.0, (2.0**-70, 0.0), (2.0**-70, 0.0), 0.0, id="subnormal-product"),
        pytest.param(0.0, (2.0**-63, 2.0**-63), (1.5 * 2.0**-63, -(2.0**-63)), 0.0, id="subnormal-sum"),
        pytest.param(2.0**-126, (2.0**-63, 0.0), (2.0**-63, 0.0), 2.0**-125, id="smallest-normals"),
        pytest.param(2.0**24, (1.0, 0.0), (1.0, 0.0), 2.0**24, id="tie-to-even-below"),
        pytest.param(2.0**24 + 2, (1.0, 0.0), (1.0, 0.0), 2.0**24 + 4, id="tie-to-even-above"),
        pytest.param(0.0, (2.0**127, 2.0**127), (1.0, 1.0), np.inf, id="overflow"),
        pytest.param(0.0, (np.inf, 0.0), (1.0, 0.0), np.inf, id="infinity"),
        pytest.param(0.0, (np.inf, np.inf), (1.0, -1.0), np.nan, id="infinities"),
        pytest.param(0.0, (np.inf, 0.0), (0.0, 0.0), np.nan, id="infinity-times-zero"),
        pytest.param(0.0, (np.nan, 0.0), (1.0, 0.0), np.nan, id="nan"),
    ],
)
def test_special_values(
    tiles: Tiles, c: float, a: tuple[float, float], b: tuple[float, float], expected: float
) -> None:
    memory = np.full((1, 1), c, np.float32)
    left, right = (bf16(np.array([pair], np.float32)) for pair in (a, b))
    tiles.multiply(config((1, 4), (1, 4), (1, 4)), 0, memory, left, right, ctypes.c_int64(4))
    np.testing.assert_array_equal(memory[0, 0], np.float32(expected))
    assert np.float32(TINY) * np.float32(1) != 0, "the caller's arithmetic keeps its subnormals"


@pytest.mark.parametrize(
    ("c", "a", "b"),
    [
        pytest.param((16, 64), (15, 64), (16, 64), id="rows-of-a"),
        pytest.param((16, 64), (16, 60), (16, 64), id="columns-of-a"),
        pytest.param((16, 64), (16, 64), (16, 60), id="columns-of-b"),
        pytest.param((16, 62), (16, 64), (16, 62), id="half-a-sum"),
    ],
)
@pytest.mark.parametrize("int8", [0, 1])
def test_a_product_of_shapes_that_do_not_fit_is_a_fault(
    emulated: Tiles, int8: int, c: Shape, a: Shape, b: Shape
) -> None:
    memory = np.zeros((16, 64), np.uint8)
    with pytest.raises(ValueError, match=rf"shapes that do not fit: C tile 0 \({c[0]} rows of {c[1]} bytes"):
        emulated.multiply(config(c, a, b), int8, memory, memory, memory, ctypes.c_int64(64))
    assert not memory.any()


def test_tiles_that_are_not_configured_are_a_fault(emulated: Tiles) -> None:
    memory = np.zeros((16, 64), np.uint8)
    whole = (16, 64)
    with pytest.raises(ValueError, match="outside the scope of Tiles"):
        emulated.use_without_configuration()
    with pytest.raises(ValueError, match="outside the scope of Tiles"):
        emulated.use_after_release(config(whole), memory)
    with pytest.raises(ValueError, match=r"tile 2 \(0 rows of 0 bytes\) is not configured"):
        emulated.multiply(config(whole, whole), 0, memory, memory, memory, ctypes.c_int64(64))
    with pytest.raises(ValueError, match="shapes that do not fit"):
        emulated.multiply_tile_by_itself(config(whole, whole))
    with pytest.raises(ValueError, match=r"tile 1 \(8 rows of 64 bytes\) is loaded or stored as a block"):
        emulated.multiply_blocks(config(whole, (8, 64), whole, whole), memory, memory, memory)


@pytest.mark.parametrize(
    "operand",
    [
        pytest.param(config((16, 64), palette=2), id="palette"),
        pytest.param(config((16, 64), start_row=1), id="start-row"),
        pytest.param(config((17, 64)), id="rows"),
        pytest.param(config((16, 65)), id="bytes"),
        pytest.param(config((16, 0)), id="rows-without-bytes"),
        pytest.param(config((0, 64)), id="bytes-without-rows"),
        pytest.param(config(*[(16, 64)] * 9), id="ninth-tile"),
    ],
)
def test_a_configuration_that_ldtilecfg_refuses_is_a_fault(emulated: Tiles, operand: NDArray[np.uint8]) -> None:
    emulated.configure(config(*[(16, 64)] * 8))
    with pytest.raises(ValueError, match="a configuration that the hardware refuses"):
        emulated.configure(operand)
