"""The contract of a kernel: one line that says its operands, their sizes and their dtypes.

    rms_norm: x[..., d]:f32|bf16 weight[d]:x eps:float zero_centered:bool -> out[..., d]:x

The line begins with the name in errors, which is also that of the compiled kernel but for a final "_". Operands follow
in the order of the arguments of a call; C++ declares its parameters in the same order, under the same names
(csrc/core/entry.h). Outputs, which a call allocates and returns, stand behind "->".

    x[m, d]             a CPU tensor with a contiguous last dimension. A name stands for the same size wherever it is;
                        sizes are also numbers, "_" (any size), and sums, products and quotients such as s + 1
    x[..., d]           the same after any dimensions, which are those of every "..." of the line
    x                   a tensor of any dtype and layout, such as a part of a cache that was checked when it was made
    bias[n]?            an operand that may be None
    :f32|bf16           one of these dtypes
    :x                  the dtype of the operand x
    eps:float           a number for the kernel: float, int or bool. An int is a size, too
    n:size, dtype:f32   a size or dtype for the line alone, which the kernel does not get
    cache.k             an attribute of the argument `cache`, or of an attribute of it; C++ names it cache_k. In sizes
                        and dtypes, too
    w:weight            a packed weight of the format `layout`; C++ gets its tensors as fields of one struct
    -> apart out[m, d]  an output whose rows are apart (`core.empty_rows`)
    -> out[m, d]?       an output that is None if it would be empty, such as working memory
"""

import ast
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from operator import attrgetter

import torch
from torch import Tensor

from . import check, core
from .errors import KernelError
from .weight import Layout

_DTYPES = {
    "f32": torch.float32,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "f64": torch.float64,
    "i64": torch.int64,
    "i32": torch.int32,
    "i8": torch.int8,
    "u8": torch.uint8,
}
_NUMBERS = {"int": "i", "bool": "i", "float": "f", "size": "s", "weight": "w"}
_PARAMETERS = {"int": "int64_t", "bool": "bool", "float": "float"}
_OPERATORS: dict[type[ast.operator], str] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.FloorDiv: "/"}

_OPERAND = re.compile(r"(apart )?([\w.]+)(\[[^]]*\])?(\?)?(?::([\w.|]+))?(?: |$)")

Size = tuple[tuple[str, int | str], ...]
"""A size in postfix notation: ("#", number), ("$", name), or an operator on the two values before it. Empty: any."""


@dataclass(frozen=True)
class _Operand:
    name: str
    kind: str  # t: tensor, w: weight, o: output, a: output with rows apart, i: int or bool, f: float, s: size, d: dtype
    type: str = ""
    optional: bool = False
    leading: bool = False  # dimensions before the sizes
    sizes: tuple[Size, ...] | None = None  # None: not checked

    @property
    def argument(self) -> str:
        return self.name.split(".")[0]

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """The dtypes that the line names; none if it names an operand or nothing."""
        names = self.type.split("|")
        return tuple(_DTYPES[name] for name in names) if names[0] in _DTYPES else ()

    def value(self, arguments: dict[str, object]) -> object:
        found = arguments[self.argument]
        return found if self.name == self.argument else attrgetter(self.name.partition(".")[2])(found)


class Contract:
    """A kernel with the contract that `line` says.

    reference: computes the same in plain torch; it gets the arguments by name. Without one, the caller checks for the
    rung "reference". kernel: the name of the compiled kernel, if errors have another one. layout: that of the weights
    of the line; the name of the kernel then ends with its format.
    Raises KernelError if the compiled core was built from other sources.
    """

    def __init__(
        self,
        line: str,
        reference: Callable[..., object] | None = None,
        *,
        kernel: str = "",
        layout: Layout | None = None,
    ) -> None:
        self.name, _, rest = line.partition(": ")
        inputs, _, outputs = rest.partition("-> ")
        shown = [*_parse(inputs, "t"), *_parse(outputs, "o")]
        self._operands = [*_attributes(shown), *shown]
        self.arguments = list(dict.fromkeys(operand.argument for operand in shown if operand.kind not in "oa"))
        self.reference = reference
        tensors = [] if layout is None else [*_parse(layout.tensors, "t")]
        types = _PARAMETERS | ({} if layout is None else {"weight": f"const {layout.record}&"})
        passed = [operand for operand in shown if operand.kind not in "sd"]
        parameters = [f"{types.get(each.type, 'const Tensor&')} {each.name.replace('.', '_')}" for each in passed]
        fields = [" ".join(each.name for each in tensors) for each in passed if each.kind == "w"]
        default = self.name.removesuffix("_") + ("" if layout is None else f"_{layout.format}")
        self.kernel = core.kernel(kernel or default, "; ".join([", ".join(parameters), *fields]))
        self._compiled = core.contract(self.name, self._table(tensors))

    def __call__(self, *arguments: object) -> Tensor:
        """Check the arguments, compute, and return the first output."""
        return self.run(*arguments)[0]

    def run(self, *arguments: object) -> tuple[Tensor, ...]:
        """Check the arguments, compute, and return all outputs.

        Raises KernelError for a tensor that is not as the line says: it names the kernel and the operand, what was
        expected and what was found.
        """
        if core.isa() == "reference":
            self._check(arguments)
            assert self.reference is not None, self.name
            results = self.reference(**dict(zip(self.arguments, arguments, strict=True)))
            return results if isinstance(results, tuple) else (results,)
        assert self._compiled is not None
        outputs = self._compiled.run(self.kernel, arguments)
        if outputs is None:
            self._check(arguments)
            raise KernelError(f"{self.name}: expected arguments that fit the contract")
        return outputs

    def check(self, *arguments: object) -> None:
        """Raise KernelError as a call does. The last arguments may be left out."""
        if self._compiled is None or not self._compiled.fits(arguments):
            self._check(arguments)

    def _check(self, arguments: tuple[object, ...]) -> None:
        given = dict(zip(self.arguments, arguments, strict=False))
        values = {
            each: each.value(given) for each in self._operands if each.kind not in "oa" and each.argument in given
        }
        sizes = {each.name: int(value) for each, value in values.items() if each.kind in "is"}  # type: ignore[call-overload]
        dtypes: dict[str, tuple[torch.dtype, ...]] = {}
        for each, value in values.items():
            if isinstance(value, torch.dtype):
                check.dtype(self.name, each.name, value, each.dtypes or dtypes.get(each.type, (value,)))
            if each.kind == "d":
                dtypes[each.name] = value if isinstance(value, tuple) else (value,)
        leading: torch.Size | None = None
        for _ in range(2):  # sizes that are computed from those of later operands are known in the second round
            for each, value in values.items():
                if each.kind != "t" or (value is None and each.optional):
                    continue
                if not isinstance(value, Tensor):
                    raise KernelError(f"{self.name}: {each.name}: expected a tensor, found {type(value).__name__}")
                shape, accepted = value.shape, each.dtypes or dtypes.get(each.type, (value.dtype,))
                if each.sizes is not None:
                    before = value.shape[: max(value.ndim - len(each.sizes), 0)] if leading is None else leading
                    expected = [_value(size, sizes) for size in each.sizes]
                    shape = (*(before if each.leading else ()), *expected)  # type: ignore[assignment]
                    check.tensor(self.name, each.name, value, shape, accepted)
                    leading = before if each.leading else leading
                    for size, found in zip(reversed(each.sizes), reversed(value.shape), strict=False):
                        if len(size) == 1 and size[0][0] == "$":
                            sizes[str(size[0][1])] = found
                dtypes[each.name] = (value.dtype,)

    def _table(self, tensors: list[_Operand]) -> list[tuple[object, ...]]:
        """Return the operands as csrc/core/contract.h reads them. tensors: those of a weight."""
        operands: list[_Operand] = []
        for each in self._operands:
            parts = [replace(part, name=f"{each.name}.{part.name}") for part in tensors]
            operands += parts if each.kind == "w" else [each]
        names = [each.name for each in operands]
        arguments = {name: number for number, name in enumerate(self.arguments)}
        symbols: dict[int | str, int] = {}

        def steps(size: Size) -> list[tuple[str, int]]:
            return [(op, symbols.setdefault(x, len(symbols)) if op == "$" else int(x)) for op, x in size]

        return [
            (
                each.kind,
                arguments.get(each.argument, -1),
                [sys.intern(name) for name in each.name.split(".")[1:]],
                each.optional,
                core.dtype_bits(each.dtypes),
                names.index(each.type) if each.type in names else -1,
                symbols.setdefault(each.name, len(symbols)) if each.kind in "is" else -1,
                -1 if each.sizes is None else int(each.leading),
                [steps(size) for size in each.sizes or ()],
            )
            for each in operands
        ]


def _parse(text: str, kind: str) -> Iterator[_Operand]:
    """Yield the operands of a part of a line: inputs (kind "t") or outputs (kind "o")."""
    end = 0
    while end < len(text):
        match = _OPERAND.match(text, end)
        if not match:
            raise ValueError(f"contract: expected an operand, found {text[end:]!r}")
        end = match.end()
        apart, name, shape, optional, form = match.groups(default="")
        if kind == "t" and not shape and form:
            yield _Operand(name, _NUMBERS.get(form, "d"), form)
            continue
        texts = [part.strip() for part in shape[1:-1].split(",")] if shape[2:] else []
        leading = texts[:1] == ["..."]
        sizes = tuple(_size(part) for part in texts[leading:]) if shape else None
        yield _Operand(name, "a" if apart else kind, form, bool(optional), leading, sizes)


def _attributes(operands: list[_Operand]) -> list[_Operand]:
    """Return the attributes of arguments that serve as sizes and dtypes."""
    sizes = [str(x) for each in operands for size in each.sizes or () for op, x in size if op == "$"]
    found = dict.fromkeys(sizes, "s") | {each.type: "d" for each in operands}
    return [_Operand(name, kind) for name, kind in found.items() if "." in name]


def _size(text: str) -> Size:
    return () if text == "_" else tuple(_postfix(ast.parse(text, mode="eval").body))


def _postfix(node: ast.expr) -> Iterator[tuple[str, int | str]]:
    if isinstance(node, ast.BinOp):
        yield from _postfix(node.left)
        yield from _postfix(node.right)
        yield _OPERATORS[type(node.op)], 0
    elif isinstance(node, ast.Constant):
        yield "#", int(node.value)  # type: ignore[arg-type]
    else:
        yield "$", ast.unparse(node)


def _value(size: Size, known: dict[str, int]) -> int | None:
    """Return the number that a size stands for, or None if it is not known."""
    stack: list[int] = []
    for op, x in size:
        if op == "#":
            stack.append(int(x))
        elif op == "$":
            if x not in known:
                return None
            stack.append(known[str(x)])
        else:
            right, left = stack.pop(), stack.pop()
            stack.append({"+": left + right, "-": left - right, "*": left * right, "/": left // max(right, 1)}[op])
    return stack[0] if stack else None
