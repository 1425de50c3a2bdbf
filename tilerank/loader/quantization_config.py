"""The quantisation that a command asks for, and the one that config.json's `quantization_config` describes.

No torch: commands read it before they start ranks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from .errors import ConfigError
from .fields import Fields

Layout = Literal["awq", "gptq", "fp8", "int8", "block_int8"]
Codes = Literal["int8", "int4", "fp8"]

INT4_GROUPS = (32, 64, 128)
DEFAULT_INT4_GROUP = 64

_NEVER = ("embed_tokens",)  # not a projection, also where it is the head as well
_ALL_BUT_HEAD = ("lm_head",)
_MAX_GROUP = 1 << 20
_MAX_BLOCK = 1 << 12
_MAX_PATTERN = 200
_MAX_BRANCHES = 4
_CODES: dict[Layout, Codes] = {"awq": "int4", "gptq": "int4", "fp8": "fp8", "int8": "int8", "block_int8": "int8"}


@dataclass(frozen=True)
class Quantization:
    """The codes to which a command quantises projections. group: for int4, the number of columns that share a scale."""

    codes: Codes
    group: int | None = None

    def __str__(self) -> str:
        return self.codes if self.group is None else f"{self.codes} in groups of {self.group}"


@dataclass(frozen=True)
class QuantizationConfig:
    """The tensors of a quantised checkpoint in place of `X.weight`, for the modules that `converts` names.

    awq: X.qweight, X.qzeros, X.scales, packed along the outputs in AWQ's own order. gptq: the same and X.g_idx, codes
    packed along the inputs. fp8: X.weight (e4m3) and X.weight_scale_inv, one for each block. int8: X.weight and
    X.weight_scale, one for each output. block_int8: X.weight (int8) and X.weight_scale_inv, one for each block.
    """

    layout: Layout
    group: int = 0
    """awq, gptq: columns that share a scale, 0: all."""
    symmetric: bool = False
    """gptq: every zero point is 8."""
    zeros_minus_one: bool = False
    """gptq: zero points are stored less one (its first format, which files without checkpoint_format have)."""
    act_order: bool = False
    """gptq: columns that share a scale lie anywhere (desc_act); X.g_idx says where."""
    block: tuple[int, int] = (0, 0)
    """fp8, block_int8: rows and columns that share a scale."""
    kept: tuple[str, ...] = ()
    """Modules, or parts of their names between dots, that are stored as floats."""
    kept_patterns: tuple[str, ...] = ()
    """The modules that `converts` names, as regular expressions from the start of the name."""
    only: tuple[str, ...] | None = None
    """Ends of the names of the modules that are quantised, if only those are."""
    coded: frozenset[str] | None = field(default=None, repr=False)
    """The modules that the files hold in this layout, whatever the lists above say; None: there are no files."""
    overrides: str | None = None
    """The layout in config.json, if it differs from this one, which is that of the tensors; None if it is the same."""

    @property
    def codes(self) -> Codes:
        return _CODES[self.layout]

    def __str__(self) -> str:
        return f"{self.codes} ({self.layout})"

    def converts(self, module: str) -> bool:
        """Return whether a projection, such as model.layers.0.mlp.up_proj, is quantised."""
        if self.coded is not None:
            return module in self.coded
        if any(f".{name}." in f".{module}." for name in (*_NEVER, *self.kept)):
            return False
        if any(re.match(pattern, module) for pattern in self.kept_patterns):
            return False
        return self.only is None or any(f".{module}".endswith(f".{name}") for name in self.only)


def check_agreement(stored: QuantizationConfig | None, asked: Quantization | None, dtype: str) -> None:
    """Raise ConfigError if a command asks for other codes than the checkpoint has, or for float32 activations."""
    if stored is not None and asked is not None and not _same(stored, asked):
        raise ConfigError(
            f"quantization: expected none, or {stored} as the checkpoint is quantised already, found {asked}"
        )
    if (stored or asked) is not None and dtype == "float32":
        raise ConfigError("dtype: expected bfloat16 with quantised weights, found float32")


def held_codes(stored: QuantizationConfig | None, asked: Quantization | None) -> Codes | None:
    """Return the codes that a model holds its weights in; None: floats."""
    if stored is not None:
        return None if stored.act_order else stored.codes
    return None if asked is None else asked.codes


def _same(stored: QuantizationConfig, asked: Quantization) -> bool:
    return asked.codes == stored.codes and asked.group in (None, stored.group)


def read_quantization(c: Fields) -> QuantizationConfig:
    """Read the object `quantization_config`. Raises ConfigError for what is not supported, naming what is."""
    method = c.text("quant_method")
    readers = {
        "awq": _awq,
        "gptq": _gptq,
        "fp8": _fp8,
        "compressed-tensors": _compressed_tensors,
        "w8a8_int8": _w8a8_int8,
        "blockwise_int8": _blockwise_int8,
        "int8": _blockwise_int8 if c.has("weight_block_size") else _w8a8_int8,
    }
    if method not in readers:
        raise c.fail("quant_method", "one of " + ", ".join(readers))
    return readers[method](c)


def _awq(c: Fields) -> QuantizationConfig:
    _expect(c, "w_bit" if c.has("w_bit") and not c.has("bits") else "bits", 4)
    key = _layout_key(c, "version")
    if c.has(key) and c.text(key).lower() != "gemm":
        raise c.fail(key, "'gemm', the only layout of AWQ that is supported")
    _expect(c, "zero_point", True)
    group = _group(c, "q_group_size" if c.has("q_group_size") and not c.has("group_size") else "group_size")
    return QuantizationConfig("awq", group=group, kept=(*_ALL_BUT_HEAD, *_names(c, "modules_to_not_convert")))


def _gptq(c: Fields) -> QuantizationConfig:
    _expect(c, "bits", 4)
    key = _layout_key(c, "checkpoint_format")
    form = c.text(key) if c.has(key) else "gptq"
    if form not in ("gptq", "gptq_v2"):
        raise c.fail(key, "'gptq' or 'gptq_v2'")
    dynamic = c.object("dynamic").values if c.has("dynamic") else {}
    for rule in dynamic:
        if not rule.startswith("-:"):
            raise c.fail("dynamic", "rules that leave modules out (-:PATTERN) only")
    blocks = c.values["modules_in_block_to_quantize"] if c.has("modules_in_block_to_quantize") else None
    group = _group(c, "group_size")
    about = c.object("meta") if c.has("meta") else c  # newer writers have it there
    return QuantizationConfig(
        "gptq",
        group=group,
        act_order=c.flag("desc_act") and not about.flag("static_groups") and group > 0,
        symmetric=c.flag("sym"),
        zeros_minus_one=form == "gptq",
        kept=(*(() if c.flag("lm_head") else _ALL_BUT_HEAD), *_names(c, "modules_to_not_convert")),
        kept_patterns=tuple(_pattern(c, "dynamic", rule[2:]) for rule in dynamic),
        only=None if blocks is None else _flat(c, "modules_in_block_to_quantize", blocks),
    )


def _fp8(c: Fields) -> QuantizationConfig:
    if c.has("fmt") and c.text("fmt") not in ("e4m3", "float8_e4m3fn"):
        raise c.fail("fmt", "'e4m3'")
    return _in_blocks(c, "fp8")


def _blockwise_int8(c: Fields) -> QuantizationConfig:
    return _in_blocks(c, "block_int8")


def _in_blocks(c: Fields, layout: Layout) -> QuantizationConfig:
    if c.has("activation_scheme"):
        _expect(c, "activation_scheme", "dynamic")
    block = c.values.get("weight_block_size")
    if not isinstance(block, list) or len(block) != 2 or any(type(b) is not int or b % 32 for b in block):
        raise c.fail("weight_block_size", "[rows, columns] of the blocks that share a scale, multiples of 32")
    if not all(32 <= b <= _MAX_BLOCK for b in block):
        raise c.fail("weight_block_size", f"rows and columns from 32 to {_MAX_BLOCK}")
    kept = (*_names(c, "modules_to_not_convert"), *_names(c, "ignored_layers"))
    return QuantizationConfig(layout, block=(block[0], block[1]), kept=(*_ALL_BUT_HEAD, *kept))


def _w8a8_int8(c: Fields) -> QuantizationConfig:
    kept = (*_names(c, "modules_to_not_convert"), *_names(c, "ignore"))
    return QuantizationConfig("int8", kept=(*_ALL_BUT_HEAD, *kept))


def _compressed_tensors(c: Fields) -> QuantizationConfig:
    """Read the int8 form: one scale for each output, and activations that are quantised at run time."""
    _expect(c, "format", "int-quantized")
    if c.has("kv_cache_scheme"):
        raise c.fail("kv_cache_scheme", "no such key (quantised caches are not read from checkpoints)")
    groups = c.object("config_groups")
    if len(groups.values) != 1:
        raise c.fail("config_groups", "one group of modules")
    group = groups.object(next(iter(groups.values)))
    if group.values.get("targets") != ["Linear"]:
        raise group.fail("targets", "['Linear']")
    weights = group.object("weights")
    for key, value in (("num_bits", 8), ("type", "int"), ("strategy", "channel"), ("symmetric", True)):
        _expect(weights, key, value)
    activations = group.object("input_activations")
    for key, value in (("num_bits", 8), ("type", "int"), ("strategy", "token"), ("dynamic", True), ("symmetric", True)):
        _expect(activations, key, value)
    ignored = _names(c, "ignore")
    return QuantizationConfig(
        "int8",
        kept=tuple(name for name in ignored if not name.startswith("re:")),
        kept_patterns=tuple(_pattern(c, "ignore", name[3:]) for name in ignored if name.startswith("re:")),
    )


def _layout_key(c: Fields, old: str) -> str:
    """Return the key of the layout: transformers 5 calls it `format` and gives priority to the `old` name."""
    return "format" if c.has("format") and not c.has(old) else old


def _expect(c: Fields, key: str, value: int | str) -> None:
    """Raise ConfigError unless the key has the one value that is supported. In JSON, true is not 1."""
    found = c.values.get(key)
    if type(found) is not type(value) or found != value:
        raise c.fail(key, f"{value!r}" if type(value) is not bool else f"{value}".lower())


def _group(c: Fields, key: str) -> int:
    """Return how many columns share a scale, 0 for all of them, which the file gives as -1."""
    size = c.integer(key, -1, _MAX_GROUP)
    if size != -1 and (size < 32 or size % 32):
        raise c.fail(key, "-1 or a multiple of 32")
    return max(size, 0)


def _names(c: Fields, key: str) -> tuple[str, ...]:
    if not c.has(key):
        return ()
    names = c.values[key]
    if not isinstance(names, list) or any(type(name) is not str or not name for name in names):
        raise c.fail(key, "a list of names of modules")
    return tuple(names)


def _flat(c: Fields, key: str, lists: Any) -> tuple[str, ...]:
    """Return the names in [[name, ...], ...], groups of modules that were quantised one after the other."""
    if not isinstance(lists, list) or any(not isinstance(names, list) for names in lists):
        raise c.fail(key, "a list of lists of names of modules")
    return tuple(name for names in lists for name in _names(_holding(c, key, names), key))


def _holding(c: Fields, key: str, value: object) -> Fields:
    values: Mapping[str, Any] = {key: value}
    return type(c)(c.path, values, c.prefix)


def _pattern(c: Fields, key: str, pattern: str) -> str:
    """Return a regular expression that takes bounded time to match, because the file is not trusted.

    Matching tries all ways to go on at every repetition and every group of alternatives, so their number is limited.
    """
    refusal: ConfigError = c.fail(
        key, f"regular expressions with at most {_MAX_BRANCHES} repetitions and groups, no group repeated"
    )
    branches = len(re.findall(r"(?<!\\)[*+{(]|(?<![\\(*+?}])\?", pattern))  # after these, ? is no repetition of its own
    if len(pattern) > _MAX_PATTERN or branches > _MAX_BRANCHES or re.search(r"(?<!\\)\)[*+{]", pattern):
        raise refusal
    try:
        re.compile(pattern)
    except (re.error, OverflowError):
        raise refusal from None
    return pattern
