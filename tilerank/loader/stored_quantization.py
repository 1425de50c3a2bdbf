"""The scheme in which a checkpoint stores each weight: headers of files decide, settings only break ties. No torch.

Files in use come without settings, with settings that were copied from the model they were made from, and with lists of
modules that are wrong. A weight is quantised if it has codes and a scale beside it:

    X.weight I8 or F8_E4M3, X.weight_scale or X.weight_scale_inv    the shape of the scale says what shares a scale
    X.qweight I32, X.qzeros, X.scales                               awq or gptq; the settings say which
    X.weight_packed I32, X.weight_scale                             packed
    X.weight_packed or X.weight U8, X.weight_scale F8_E4M3          nvfp4, if X.weight_global_scale or X.weight_scale_2
                                                                    is there, too

The experts of a layer are if their weights X have X_blocks U8 and X_scales (mxfp4).
"""

from collections import Counter
from collections.abc import Container, Mapping
from dataclasses import replace
from math import gcd, prod
from pathlib import Path

from .errors import ConfigError
from .fields import Fields
from .files import is_listed, read_json_object
from .gguf.file import open_gguf
from .gguf.names import NamedTensor, named_tensors
from .headers import StoredTensor, stored_tensors
from .quantization_config import MXFP4, NVFP4, Layout, QuantizationConfig, Scheme
from .quantization_readers import read_hf_quant_config, read_quantization

HF_QUANT_CONFIG = "hf_quant_config.json"

_FLOATS = ("BF16", "F16", "F32", "F64")
_LAYOUTS: dict[str, Layout] = {"I8": "int8", "F8_E4M3": "fp8"}
_CODED = (*_LAYOUTS, *_FLOATS)
_SCALES = ("weight_scale", "weight_scale_inv")
_OF_NVFP4 = ("weight_global_scale", "weight_scale_2")
_GGUF_UNIT = 32  # columns of the smallest block of any type
_BLOCK = (128, 128)  # what every published checkpoint has
_EXPERTS = {"gate_up_proj_blocks": ("gate_proj", "up_proj"), "down_proj_blocks": ("down_proj",)}
"""Tensors of the codes of all experts of a layer, and the projections of each expert that they hold."""
_PACKED = {**dict.fromkeys(("qweight", "qzeros", "scales"), ("awq", "gptq")), "weight_packed": ("packed",)}
"""Tensors of a module whose codes are packed, and the layouts that have them."""


def find_quantization(model_dir: Path, config: Fields | None) -> QuantizationConfig | None:
    """Return how the checkpoint stores its quantised weights; None for floats.

    config: the object quantization_config of config.json; without one, hf_quant_config.json is read. They decide alone
    where there are no files. Raises ConfigError for what is not supported.
    """
    tensors = stored_tensors(model_dir)
    if tensors is None:
        return _settings(model_dir, config)
    if all(tensor.dtype in _FLOATS for tensor in tensors.values()):
        return None
    if model_dir.is_file():
        return _of_gguf(named_tensors(open_gguf(model_dir)))
    if experts := _expert_modules(tensors):
        method = None if config is None else str(config.values.get("quant_method"))
        says_so = method == MXFP4.layout
        return QuantizationConfig(MXFP4, stored=experts, overrides=None if says_so else method or "nothing of it")
    nvfp4 = _nvfp4_modules(tensors)
    in_bytes, packed = _byte_modules(tensors), _packed_modules(tensors, nvfp4)
    if packed:
        found: QuantizationConfig | None = _packing(model_dir, config, *next(iter(packed.items())))
    elif in_bytes or nvfp4:
        try:
            found = _settings(model_dir, config)
        except ConfigError:  # those of another format, and out of date: the tensors say all that is needed
            found = None
    else:
        # Neither floats nor codes with scales. Without the settings' word the loader refuses the first such tensor.
        return _settings(model_dir, config)

    def said(module: str) -> Scheme | None:
        return None if found is None else found.scheme_of(module) or found.scheme

    whole = {module: _byte_scheme(tensors, module, said(module)) for module in in_bytes}
    stored = {module: scheme for module, scheme in whole.items() if scheme is not None}
    stored |= dict.fromkeys(nvfp4, NVFP4)
    for module in packed:
        scheme = said(module)
        assert scheme is not None
        if scheme.layout == "packed":
            scheme = replace(scheme, symmetric=f"{module}.weight_zero_point" not in tensors)
        stored[module] = scheme
    if not stored:
        return _settings(model_dir, config)  # codes without scales, which the loader names
    # The scheme that most modules have is the main one; settings break a tie.
    count, expected = Counter(stored.values()), None if found is None else found.scheme
    main = max(count, key=lambda scheme: (count[scheme], scheme == expected))
    # Where codes or scales are missing, the loader names them.
    stored |= {module: said(module) or main for module, scheme in whole.items() if scheme is None}
    says_so = expected is not None and (expected.layout, expected.block) == (main.layout, main.block)
    method = "nothing of it" if config is None else str(config.values.get("quant_method"))
    return QuantizationConfig(
        main, stored=stored, overrides=None if says_so else method, cache=None if found is None else found.cache
    )


def _of_gguf(tensors: Mapping[str, NamedTensor]) -> QuantizationConfig:
    """Return the block types of a GGUF file's weights; the main one is that of most values.

    A weight whose columns are in another order than on the hub has blocks small enough to move as a whole. If these
    were smaller than the smallest block of any type, the weight is held as floats.
    """
    stored, values = dict[str, Scheme](), Counter[Scheme]()
    for name, tensor in tensors.items():
        type, order = tensor.stored.type, tensor.order_of(columns=True)
        if type.is_float:
            continue
        scheme = Scheme("gguf", block=(1, type.block), type=type.name)
        values[scheme] += prod(tensor.shape)
        block = type.block if order is None else gcd(type.block, order.width)
        if block % _GGUF_UNIT == 0:
            stored[name.removesuffix(".weight")] = replace(scheme, block=(1, block))
    return QuantizationConfig(values.most_common(1)[0][0], stored=stored)


def _settings(model_dir: Path, config: Fields | None) -> QuantizationConfig | None:
    if config is not None:
        return read_quantization(config)
    if not is_listed(model_dir, HF_QUANT_CONFIG):
        return None
    return read_hf_quant_config(
        Fields(model_dir / HF_QUANT_CONFIG, read_json_object(model_dir, HF_QUANT_CONFIG, ConfigError))
    )


def _expert_modules(tensors: Mapping[str, StoredTensor]) -> dict[str, Scheme]:
    """Return the modules of experts whose codes are stored together, one for each projection of each expert."""
    return {
        f"{experts}.{expert}.{projection}": MXFP4
        for name, tensor in tensors.items()
        for experts, _, end in (name.rpartition("."),)
        if tensor.dtype == "U8" and tensor.shape
        for projection in _EXPERTS.get(end, ())
        for expert in range(tensor.shape[0])
    }


def _byte_modules(tensors: Mapping[str, StoredTensor]) -> list[str]:
    """Return the names of the modules that have codes of a byte, or scales without a weight."""
    found: dict[str, None] = {}
    for name, tensor in tensors.items():
        module, _, end = name.rpartition(".")
        weight = tensors.get(f"{module}.weight")
        if (end == "weight" and tensor.dtype in _LAYOUTS) or (
            end in _SCALES and f"{module}.weight_packed" not in tensors and (weight is None or weight.dtype in _CODED)
        ):
            found[module] = None
    return list(found)


def _nvfp4_modules(tensors: Mapping[str, StoredTensor]) -> dict[str, None]:
    """Return the names of the modules that have scales of both kinds of NVFP4."""
    modules = (name.rpartition(".") for name in tensors)
    return {module: None for module, _, end in modules if end in _OF_NVFP4}


def _packed_modules(tensors: Mapping[str, StoredTensor], others: Container[str]) -> dict[str, str]:
    """Return the names of the modules that have packed codes, but for `others`, and an example of their tensors."""
    found: dict[str, str] = {}
    for name in tensors:
        module, _, end = name.rpartition(".")
        if end in _PACKED and module not in others:
            found.setdefault(module, name)
    return found


def _byte_scheme(tensors: Mapping[str, StoredTensor], module: str, said: Scheme | None) -> Scheme | None:
    """Return the scheme of a module with codes of a byte; None if its codes or scales are missing."""
    weight = tensors.get(f"{module}.weight")
    end = next((end for end in _SCALES if f"{module}.{end}" in tensors), None)
    if weight is None or end is None or weight.dtype not in _LAYOUTS or len(weight.shape) != 2:
        return None
    layout = _LAYOUTS[weight.dtype]
    block = said.block if said is not None and said.layout == layout else None
    return Scheme(layout, 8, _sharing(weight.shape, tensors[f"{module}.{end}"].shape, block, end))


def _sharing(
    weight: tuple[int, ...], scale: tuple[int, ...], said: tuple[int, int] | None, end: str
) -> tuple[int, int]:
    """Return rows and columns that share a scale, from the shapes of a weight and of its scales.

    said: by the settings, which decide where a small weight has one scale in any case. end: the name of the scales,
    which decides where their shape fits nothing; the loader then names the tensor.
    """
    blocks = said if said is not None and all(said) else _BLOCK
    by_block = tuple(-(-size // block) for size, block in zip(weight, blocks, strict=True))
    if scale == by_block and said in (None, blocks):
        return blocks
    if all(size == 1 for size in scale):
        return 0, 0
    if scale in ((weight[0],), (weight[0], 1)):
        return 1, 0
    if scale == by_block:
        return blocks
    return said or (blocks if end == "weight_scale_inv" else (1, 0))


def _packing(model_dir: Path, config: Fields | None, module: str, example: str) -> QuantizationConfig:
    """Return the settings of packed codes: only they say how codes and zero points are packed."""
    found = _settings(model_dir, config)
    layouts = _PACKED[example.rpartition(".")[2]]
    if found is None or config is None:
        kinds = "AWQ or GPTQ" if "awq" in layouts else "compressed-tensors"
        raise ConfigError(
            f"{model_dir / 'config.json'}: quantization_config: expected that of {kinds} for tensor {example}, "
            "found no such key"
        )
    scheme = found.scheme_of(module) or found.scheme
    if scheme.layout not in layouts:
        methods = " or ".join("compressed-tensors" if layout == "packed" else layout for layout in layouts)
        end = example.rpartition(".")[2]
        raise config.fail("quant_method", f"{methods}, because the checkpoint has tensors {end}")
    return found
