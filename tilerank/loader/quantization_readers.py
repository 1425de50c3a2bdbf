"""Reads how a checkpoint is quantised from its settings: `quantization_config` of config.json, or hf_quant_config.json.

No torch. Each writer of such files has its own keys; `quant_method` names it.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .errors import ConfigError
from .fields import Fields
from .quantization_config import MXFP4, NVFP4, Layout, QuantizationConfig, Scheme, bare_names

_NEVER = ("embed_tokens",)  # not a projection, also where it is the head as well
_HEAD = ("lm_head",)
_MAX_GROUP = 1 << 20
_MAX_BLOCK = 1 << 12
_MAX_PATTERN = 200
_MAX_BRANCHES = 4
_MAX_FLOAT_BITS = 16
_TENSOR, _CHANNEL = (0, 0), (1, 0)
_BLOCK = (128, 128)
_LESS_ONE = ("auto_round:auto_gptq", "auto_round:gptq", "auto")
"""The packings of AutoRound in which zero points are stored less one, as in the older of GPTQ's formats."""
_PACKINGS = (*_LESS_ONE, "auto_round:gptqmodel", "auto_round", "auto_round:auto_awq", "auto_round:awq")
_PACKED_FORMAT, _NVFP4_FORMAT = "pack-quantized", "nvfp4-pack-quantized"
_BYTE_FORMATS = ("int-quantized", "float-quantized", "naive-quantized")


def read_quantization(c: Fields) -> QuantizationConfig | None:
    """Read the object `quantization_config`; None if it quantises no weights.

    Raises ConfigError for what is not supported, naming what is.
    """
    readers = {
        "awq": _awq,
        "gptq": _gptq,
        "auto-round": _auto_round,
        "fp8": _fp8,
        "fbgemm_fp8": _fbgemm_fp8,
        "compressed-tensors": _compressed_tensors,
        "modelopt": _modelopt,
        "mxfp4": _mxfp4,
        "w8a8_int8": _w8a8_int8,
        "blockwise_int8": _blockwise_int8,
        "int8": _blockwise_int8 if c.has("weight_block_size") else _w8a8_int8,
    }
    if not c.has("quant_method"):
        if c.has("quant_algo"):
            return _modelopt(c)
        if c.has("bits") and c.has("group_size"):
            mode = c.values.get("mode", "affine")
            raise ConfigError(
                f"{c.path}: {c.prefix.removesuffix('.')}: expected a quant_method, one of {', '.join(readers)}, found "
                f"weights in the format of MLX (bits {c.values['bits']}, mode {mode}), which is not read"
            )
    method = c.text("quant_method")
    if method not in readers:
        raise c.fail("quant_method", "one of " + ", ".join(readers))
    found = readers[method](c)
    if found is None or not c.has("kv_cache_scheme"):
        return found
    return replace(found, cache=f"{c.prefix}kv_cache_scheme")


def read_hf_quant_config(c: Fields) -> QuantizationConfig | None:
    """Read hf_quant_config.json, which NVIDIA's Model Optimizer writes; None if it quantises no weights."""
    c = c.object("quantization")
    found = _modelopt(c, "exclude_modules")
    cache = "kv_cache_quant_algo"
    return found if found is None or not c.has(cache) else replace(found, cache=f"{c.prefix}{cache}")


def _awq(c: Fields) -> QuantizationConfig:
    _expect(c, "w_bit" if c.has("w_bit") and not c.has("bits") else "bits", 4)
    key = _layout_key(c, "version")
    if c.has(key) and c.text(key).lower() != "gemm":
        raise c.fail(key, "'gemm', the only layout of AWQ that is supported")
    _expect(c, "zero_point", True)
    group = _group(c, "q_group_size" if c.has("q_group_size") and not c.has("group_size") else "group_size")
    scheme = Scheme("awq", 4, (1, group), symmetric=False)
    return QuantizationConfig(scheme, bare_names(*_NEVER, *_HEAD, *_names(c, "modules_to_not_convert")))


def _mxfp4(_: Fields) -> QuantizationConfig:
    """Read gpt-oss's settings, which list what is stored as floats: all but the experts."""
    return QuantizationConfig(MXFP4, rules=((r".*\.experts\.", MXFP4),), others=False)


def _gptq(c: Fields) -> QuantizationConfig:
    key = _layout_key(c, "checkpoint_format")
    form = c.text(key) if c.has(key) else "gptq"
    if form not in ("gptq", "gptq_v2"):
        raise c.fail(key, "'gptq' or 'gptq_v2'")
    scheme = _gptq_scheme(c, c, form == "gptq")
    rules = []
    for rule, changes in (c.object("dynamic").values if c.has("dynamic") else {}).items():
        if not isinstance(changes, dict):
            raise c.fail("dynamic", "an object of settings for each rule")
        of_rule = Fields(c.path, {**c.values, **changes}, f"{c.prefix}dynamic.{rule}.")
        pattern = _pattern(c, "dynamic", rule.removeprefix("-:").removeprefix("+:"))
        rules.append((pattern, None if rule.startswith("-:") else _gptq_scheme(of_rule, c, form == "gptq")))
    only = c.values["modules_in_block_to_quantize"] if c.has("modules_in_block_to_quantize") else None
    if only is not None:
        names = _flat(c, "modules_in_block_to_quantize", only)
        rules += [(rf"(?:.*\.)?{re.escape(name)}$", scheme) for name in names]
    kept = (*_NEVER, *(() if c.flag("lm_head") else _HEAD), *_names(c, "modules_to_not_convert"))
    return QuantizationConfig(scheme, bare_names(*kept), rules=tuple(rules), others=only is None)


def _gptq_scheme(c: Fields, about: Fields, zeros_minus_one: bool) -> Scheme:
    """Return the scheme of GPTQ's settings. about: the settings of the file, which newer writers have in `meta`."""
    group = _group(c, "group_size")
    static = (about.object("meta") if about.has("meta") else about).flag("static_groups")
    return Scheme(
        "gptq",
        _bits(c, "bits"),
        (1, group),
        symmetric=c.flag("sym"),
        zeros_minus_one=zeros_minus_one,
        act_order=c.flag("desc_act") and not static and group > 0,
    )


def _auto_round(c: Fields) -> QuantizationConfig:
    """Read AutoRound's settings (arXiv 2309.05516), whose files have the packing of GPTQ or AWQ.

    `extra_config` has settings for single modules; those of 16 bits and more are floats.
    """
    key = "packing_format"
    packing = c.text(key) if c.has(key) else _PACKINGS[0]
    if packing not in _PACKINGS:
        raise c.fail(key, "one of " + ", ".join(_PACKINGS))
    if c.has("data_type") and c.text("data_type") != "int":
        raise c.fail("data_type", "'int'")
    is_awq = packing.endswith("awq")

    def scheme(settings: Fields) -> Scheme:
        if is_awq:
            _expect(settings, "bits", 4)
            return Scheme("awq", 4, (1, _group(settings, "group_size")), symmetric=False)
        return _gptq_scheme(settings, settings, zeros_minus_one=packing in _LESS_ONE)

    rules: list[tuple[str, Scheme | None]] = []
    for name, changes in (c.object("extra_config").values if c.has("extra_config") else {}).items():
        if not isinstance(changes, dict):
            raise c.fail("extra_config", "an object of settings for each module")
        own = Fields(c.path, {**c.values, **changes}, f"{c.prefix}extra_config.{name}.")
        floats = own.has("bits") and own.integer("bits", 1, 64) >= _MAX_FLOAT_BITS
        pattern = _pattern(c, "extra_config", name) if re.search(r"[*+?^$\[(|\\]", name) else rf"{re.escape(name)}$"
        rules.append((pattern, None if floats else scheme(own)))
    quantises_head = any(re.match(pattern, "lm_head") and found is not None for pattern, found in rules)
    kept = (*_NEVER, *(() if quantises_head else _HEAD), *_names(c, "modules_to_not_convert"))
    return QuantizationConfig(scheme(c), bare_names(*kept), rules=tuple(rules))


def _fp8(c: Fields) -> QuantizationConfig:
    if c.has("fmt") and c.text("fmt") not in ("e4m3", "float8_e4m3fn"):
        raise c.fail("fmt", "'e4m3'")
    return _in_blocks(c, "fp8", _TENSOR)


def _fbgemm_fp8(c: Fields) -> QuantizationConfig:
    return _bytes(c, "fp8", _CHANNEL)


def _blockwise_int8(c: Fields) -> QuantizationConfig:
    return _in_blocks(c, "int8", None)


def _w8a8_int8(c: Fields) -> QuantizationConfig:
    return _bytes(c, "int8", _CHANNEL)


def _in_blocks(c: Fields, layout: Layout, without: tuple[int, int] | None) -> QuantizationConfig:
    """without: what shares a scale if there are no blocks; None: there have to be some."""
    if c.has("activation_scheme") and c.text("activation_scheme") not in ("dynamic", "static"):
        raise c.fail("activation_scheme", "dynamic or static")
    if without is not None and not c.has("weight_block_size"):
        return _bytes(c, layout, without)
    return _bytes(c, layout, _block(c, "weight_block_size"))


def _bytes(c: Fields, layout: Layout, block: tuple[int, int]) -> QuantizationConfig:
    kept = (name for key in ("modules_to_not_convert", "ignored_layers", "ignore") for name in _names(c, key))
    return QuantizationConfig(Scheme(layout, 8, block), bare_names(*_NEVER, *_HEAD, *kept))


def _modelopt(c: Fields, exceptions: str = "ignore") -> QuantizationConfig | None:
    """Read the settings of NVIDIA's Model Optimizer. exceptions: the key of the modules that stay floats.

    Their names may have wildcards.
    """
    if not c.has("quant_algo"):
        return None
    schemes = {
        "FP8": Scheme("fp8", 8, _TENSOR),
        "FP8_PER_CHANNEL_PER_TOKEN": Scheme("fp8", 8, _CHANNEL),
        "NVFP4": NVFP4,
    }
    if c.text("quant_algo") not in schemes:
        raise c.fail("quant_algo", "one of " + ", ".join(schemes))
    names = _names(c, exceptions)
    if any(len(name) > _MAX_PATTERN for name in names):
        raise c.fail(exceptions, f"names of at most {_MAX_PATTERN} characters")
    patterns = [name for name in names if "*" in name]
    return QuantizationConfig(
        schemes[c.text("quant_algo")],
        bare_names(*_NEVER, *_HEAD, *(name for name in names if "*" not in name)),
        rules=tuple((fnmatch.translate(pattern), None) for pattern in patterns),
    )


def _compressed_tensors(c: Fields) -> QuantizationConfig | None:
    """Read groups of modules. Names of modules and patterns of names count before the class of a module, `Linear`."""
    by_name: list[tuple[str, Scheme | None]] = []
    of_class: Scheme | None = None
    groups = c.object("config_groups")
    for key in groups.values:
        group = groups.object(key)
        scheme = _group_scheme(c, group)
        for target in _names(group, "targets") or ("Linear",):
            if target == "Linear":
                of_class = of_class or scheme
            else:
                by_name.append((_target_pattern(group, "targets", target), scheme))
    if not groups.values:
        return None
    ignored = _names(c, "ignore")
    patterns = [(_pattern(c, "ignore", name[3:]), None) for name in ignored if name.startswith("re:")]
    main = of_class or next(scheme for _, scheme in by_name if scheme is not None)
    return QuantizationConfig(
        main,
        bare_names(*_NEVER),
        bare_names(*(name for name in ignored if not name.startswith("re:"))),
        rules=(*patterns, *by_name),
        others=of_class is not None,
    )


def _target_pattern(c: Fields, key: str, target: str) -> str:
    if target.startswith("re:"):
        return _pattern(c, key, target[3:])
    if "." not in target:
        raise c.fail(key, "Linear, names of modules, and patterns of names (re:PATTERN)")
    return rf"{re.escape(target)}$"


def _group_scheme(c: Fields, group: Fields) -> Scheme:
    holder = group if group.has("format") else c
    form = holder.text("format")
    if form not in (_PACKED_FORMAT, _NVFP4_FORMAT, *_BYTE_FORMATS):
        raise holder.fail("format", "one of " + ", ".join((_PACKED_FORMAT, _NVFP4_FORMAT, *_BYTE_FORMATS)))
    weights = group.object("weights")
    kind = weights.text("type")
    if kind not in ("int", "float"):
        raise weights.fail("type", "int or float")
    if form == _NVFP4_FORMAT:
        return _nvfp4(weights)
    strategy = weights.text("strategy") if weights.has("strategy") else "tensor"
    symmetric = weights.flag("symmetric") if weights.has("symmetric") else True
    if form == _PACKED_FORMAT:
        if kind != "int":
            raise weights.fail("type", f"int in the format {form}")
        if strategy not in ("group", "channel"):
            raise weights.fail("strategy", "group or channel")
        columns = _group(weights, "group_size") if strategy == "group" else 0
        act_order = strategy == "group" and weights.values.get("actorder") in ("group", "dynamic", True)
        return Scheme("packed", _bits(weights, "num_bits"), (1, columns), symmetric, act_order=act_order)
    _expect(weights, "num_bits", 8)
    if kind == "int":
        group.object("input_activations")  # int8 codes are multiplied with int8 activations
    if not symmetric:
        raise weights.fail("symmetric", f"true in the format {form}")
    if strategy == "block":
        return Scheme("fp8" if kind == "float" else "int8", 8, _block(weights, "block_structure"))
    if strategy not in ("tensor", "channel"):
        raise weights.fail("strategy", "tensor, channel or block")
    return Scheme("fp8" if kind == "float" else "int8", 8, _CHANNEL if strategy == "channel" else _TENSOR)


def _nvfp4(weights: Fields) -> Scheme:
    """Return the scheme of NVFP4; raise ConfigError for other settings, because it leaves no choice."""
    for key, value in (("num_bits", 4), ("type", "float"), ("strategy", "tensor_group"), ("group_size", 16)):
        _expect(weights, key, value)
    return NVFP4


def _layout_key(c: Fields, old: str) -> str:
    """Return the key of the layout: transformers 5 calls it `format` and gives priority to the `old` name."""
    return "format" if c.has("format") and not c.has(old) else old


def _expect(c: Fields, key: str, value: int | str) -> None:
    """Raise ConfigError unless the key has the one value that is supported. In JSON, true is not 1."""
    found = c.values.get(key)
    if type(found) is not type(value) or found != value:
        raise c.fail(key, f"{value!r}" if type(value) is not bool else f"{value}".lower())


def _bits(c: Fields, key: str) -> int:
    bits = c.values.get(key)
    if type(bits) is not int or bits not in (4, 8):
        raise c.fail(key, "4 or 8")
    return bits


def _group(c: Fields, key: str) -> int:
    """Return how many columns share a scale, 0 for all of them, which the file gives as -1."""
    size = c.integer(key, -1, _MAX_GROUP)
    if size != -1 and (size < 32 or size % 32):
        raise c.fail(key, "-1 or a multiple of 32")
    return max(size, 0)


def _block(c: Fields, key: str) -> tuple[int, int]:
    block = c.values.get(key)
    if not isinstance(block, list) or len(block) != 2 or any(type(b) is not int or b % 32 for b in block):
        raise c.fail(key, "[rows, columns] of the blocks that share a scale, multiples of 32")
    if not all(32 <= b <= _MAX_BLOCK for b in block):
        raise c.fail(key, f"rows and columns from 32 to {_MAX_BLOCK}")
    return block[0], block[1]


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
