"""Contracts: what a line accepts, its sentences, and that it agrees with C++ and with the reference."""

import importlib
import inspect
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from tilerank import kernels
from tilerank.kernels import check, core
from tilerank.kernels.contract import Contract
from tilerank.kernels.errors import KernelError

MODULES = [
    importlib.import_module(f"tilerank.kernels.{path.stem}")
    for path in sorted(Path(kernels.__file__).parent.glob("*.py"))
    if path.stem != "__init__"
]
CONTRACTS = [value for module in MODULES for value in vars(module).values() if isinstance(value, Contract)]
needs_compiled = pytest.mark.skipif(core.kernel("silu") < 0, reason="needs the compiled core")


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines stand for no compiled kernel: only what Python makes of them counts."""
    monkeypatch.setattr(core, "kernel", lambda *_: -1)


@pytest.fixture
def slow(parsed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contracts are checked without the compiled core."""
    monkeypatch.setattr(core, "contract", lambda *_: None)


@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda contract: contract.name)
def test_a_reference_has_the_arguments_of_its_contract(contract: Contract) -> None:
    if contract.reference is not None:
        assert list(inspect.signature(contract.reference).parameters) == contract.arguments


@needs_compiled
def test_a_core_of_other_sources_is_refused() -> None:
    core.kernel("silu", "const Tensor& x, const Tensor& out")
    with pytest.raises(
        KernelError,
        match=r"^silu: expected a kernel compiled with \(const Tensor& x, float eps, const Tensor& y\), found "
        r"\(Team& team, const Tensor& x, const Tensor& out\): the compiled core is of other sources than the Python "
        r"code, build it again$",
    ):
        Contract("silu: x[..., d]:f32|bf16 eps:float -> y[..., d]:x")


TENSORS = [
    torch.zeros(3, 4),
    torch.zeros(3, 4, dtype=torch.bfloat16),
    torch.zeros(3, 4, dtype=torch.int8),
    torch.zeros(3, 4, dtype=torch.complex64),
    torch.zeros(4, 3).T,
    torch.zeros(3, 8)[:, ::2],
    torch.zeros(8, 1)[::2].T,
    torch.zeros(3, 0),
    torch.zeros(1),
    torch.zeros(()),
]
SHAPES = [
    "[3, 4]",
    "[_, 4]",
    "[3, m]",
    "[m, m]",
    "[m + 1, m]",
    "[n - 1, 2 * n]",
    "[m]",
    "[]",
    "[..., m]",
    "[..., 4]",
    "",
]
LINES = [
    f"any: {line.format(shape=shape)}"
    for shape in SHAPES
    for line in (
        "x{shape}:f32|bf16",
        "y[...]:f32 x{shape}:y",
        "x{shape}?:i8 n:size",
        "y[..., 4]:f32 x{shape}:dtype dtype:f32",
    )
]


@needs_compiled
@pytest.mark.usefixtures("parsed")
@pytest.mark.parametrize("line", [line for line in LINES if "x:" not in line])
def test_the_compiled_check_accepts_what_the_full_check_accepts(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def sentence(contract: Contract, x: Tensor | None, number: int) -> str:
        given = {"x": x, "y": torch.zeros(3, 4), "n": number, "dtype": torch.float32}
        try:
            contract.check(*(given[name] for name in contract.arguments))
        except KernelError as error:
            return str(error)
        return ""

    fast = Contract(line)
    monkeypatch.setattr(core, "contract", lambda *_: None)
    full = Contract(line)
    for x in (*TENSORS, None):
        for number in (3, 4):
            assert sentence(fast, x, number) == sentence(full, x, number), x


@needs_compiled
@pytest.mark.usefixtures("parsed")
def test_right_arguments_pass_without_the_full_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "tensor", None)
    contract = Contract("any: x[..., d]:f32|bf16 y[..., d + 1]:x z[_, n]?:i32 n:size eps:float")
    x, y = torch.zeros(2, 3, 4), torch.zeros(2, 3, 5)
    contract.check(x, y, None, 7, 0.5)
    contract.check(x, y, torch.zeros(9, 7, dtype=torch.int32), 7, 0.5)
    contract.check(x[:, :, :0], y[:, :, :1], torch.zeros(0, 0, dtype=torch.int32), 0, 0.5)
    contract.check(x)


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize(
    ("line", "arguments", "sentence"),
    [
        ("x[m, d]:f32", (torch.zeros(3),), r"x: expected shape \[any, any\], found \[3\]"),
        ("x[m, d]:f32", ([1.0],), "x: expected a tensor, found list"),
        ("x[m, d]:f32", (None,), "x: expected a tensor, found NoneType"),
        ("x[m, d]:f32 y[d]:x", (torch.zeros(3, 4), torch.zeros(3)), r"y: expected shape \[4\], found \[3\]"),
        (
            "y[2 * d + 1]:i64|i32 x[m, d]:f32",
            (torch.zeros(3), torch.zeros(3, 4)),
            "y: expected dtype int64 or int32, found",
        ),
        (
            "x[..., d]:f32 y[..., 1]:x",
            (torch.zeros(2, 3, 4), torch.zeros(2, 1)),
            r"y: expected shape \[2, 3, 1\], found",
        ),
        ("x[0, d]:f32 y[d]:x", (torch.zeros(0, 0), torch.zeros(1)), r"y: expected shape \[0\], found \[1\]"),
        ("x[m]:f32", (torch.zeros(3, 2)[:, 0],), "x: expected a contiguous last dimension, found stride 2"),
        ("x[m]:f32", (torch.zeros(3, device="meta"),), "x: expected a CPU tensor, found one on meta"),
        ("dtype:f32|bf16", (torch.int8,), "dtype: expected float32 or bfloat16, found int8"),
        (
            "x[cache.width]:cache.dtypes cache.k",
            (torch.zeros(3), SimpleNamespace(width=4, dtypes=(torch.float32, torch.int8), k=None)),
            r"x: expected shape \[4\], found \[3\]",
        ),
    ],
)
def test_sentences_name_the_kernel_and_the_operand(line: str, arguments: tuple[object, ...], sentence: str) -> None:
    with pytest.raises(KernelError, match=f"^any: {sentence}"):
        Contract(f"any: {line}").check(*arguments)
