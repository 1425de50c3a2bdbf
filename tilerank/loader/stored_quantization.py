"""The format in which a checkpoint stores its weights: dtypes of tensors decide, config.json breaks ties. No torch.

Files in use come without quantization_config, with one that was copied from the model they were made from, and with
lists of modules that are wrong. A weight is quantised if it has codes and a scale beside it:

    X.weight I8, X.weight_scale             int8: one scale for each output
    X.weight I8, X.weight_scale_inv         block_int8: one scale for each block
    X.weight F8_E4M3, X.weight_scale_inv    fp8: one scale for each block
    X.qweight I32, X.qzeros, X.scales       awq or gptq; quantization_config says which
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from .errors import ConfigError
from .fields import Fields
from .headers import stored_dtypes
from .quantization_config import Layout, QuantizationConfig, read_quantization

_FLOATS = ("BF16", "F16", "F32")
_LAYOUTS: dict[tuple[str, str], Layout] = {
    ("I8", "weight_scale"): "int8",
    ("I8", "weight_scale_inv"): "block_int8",
    ("F8_E4M3", "weight_scale_inv"): "fp8",
}
_CODES = ("I8", "F8_E4M3")
_SCALES = ("weight_scale", "weight_scale_inv")
_PACKED = ("qweight", "qzeros", "scales")
_BLOCK = (128, 128)  # what every published checkpoint has
_METHODS: dict[Layout, tuple[str, ...]] = {
    "int8": ("w8a8_int8", "int8", "compressed-tensors"),
    "block_int8": ("blockwise_int8", "int8"),
    "fp8": ("fp8",),
}
"""The values of quant_method whose other settings are checked; any other is out of date."""


def find_quantization(model_dir: Path, config: Fields | None) -> QuantizationConfig | None:
    """Return how the checkpoint stores its quantised weights; None for floats.

    config: the object quantization_config of config.json, which decides alone where there are no files. Raises
    ConfigError for what is not supported.
    """
    dtypes = stored_dtypes(model_dir)
    if dtypes is None:
        return None if config is None else read_quantization(config)
    if all(dtype in _FLOATS for dtype in dtypes.values()):
        return None
    if any(name.endswith(".qweight") for name in dtypes):
        return _packed(model_dir, config, dtypes)
    method = None if config is None else config.values.get("quant_method")
    layout = _layout(dtypes, method)
    if layout is not None:
        coded = {name.removesuffix(".weight") for name, dtype in dtypes.items() if _is_weight(name, dtype)}
        return replace(_settings(layout, method, config), coded=frozenset(coded | _modules(dtypes, _SCALES)))
    # Neither floats nor codes with scales. Without config.json's word the loader refuses the first tensor of this kind.
    return None if config is None else read_quantization(config)


def _is_weight(name: str, dtype: str) -> bool:
    return dtype in _CODES and name.endswith(".weight")


def _layout(dtypes: Mapping[str, str], method: object) -> Layout | None:
    """Return the layout that most weights have; config.json breaks a tie. None if no weight has a layout.

    A weight of another layout is refused when it is read, if the model needs it.
    """
    found = Counter(
        layout
        for (codes, scale), layout in _LAYOUTS.items()
        for module in _modules(dtypes, (scale,))
        if dtypes.get(f"{module}.weight") == codes
    )
    if not found:
        return None
    best: Layout = max(found, key=lambda layout: (found[layout], method in _METHODS[layout]))
    return best


def _modules(dtypes: Mapping[str, str], ends: tuple[str, ...]) -> set[str]:
    """Return the names of the modules that have a tensor with one of these last parts of its name."""
    split = (name.rpartition(".") for name in dtypes)
    return {module for module, _, end in split if end in ends}


def _settings(layout: Layout, method: object, config: Fields | None) -> QuantizationConfig:
    """Return the settings in config.json if they are those of this layout, else its defaults."""
    if config is not None and method in _METHODS[layout]:
        found = read_quantization(config)
        if found.layout == layout:
            return found
    block = (0, 0) if layout == "int8" else _BLOCK
    return QuantizationConfig(layout, block=block, overrides=str(method) if method else "nothing of it")


def _packed(model_dir: Path, config: Fields | None, dtypes: Mapping[str, str]) -> QuantizationConfig:
    """Return the layout of int4 weights: only config.json says in which order codes and zero points are packed."""
    if config is None:
        name = next(name for name in dtypes if name.endswith(".qweight"))
        raise ConfigError(
            f"{model_dir / 'config.json'}: quantization_config: expected that of AWQ or GPTQ for tensor {name}, "
            "found no such key"
        )
    found = read_quantization(config)
    if found.layout not in ("awq", "gptq"):
        raise config.fail("quant_method", "awq or gptq, because the checkpoint has tensors qweight")
    return replace(found, coded=frozenset(_modules(dtypes, _PACKED)))
