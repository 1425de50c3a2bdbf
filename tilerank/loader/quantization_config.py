"""The quantisation that a command asks for, and the one in which a checkpoint stores its weights.

No torch: commands read it before they start ranks. quantization_readers.py reads it from a model directory's settings.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from .errors import ConfigError

Layout = Literal["awq", "gptq", "packed", "fp8", "int8", "mxfp4", "nvfp4", "gguf"]
Codes = Literal["int8", "int4", "fp8", "mxfp4", "nvfp4", "gguf"]
ActivationBits = Literal[8, 16]

INT4_GROUPS = (32, 64, 128)
DEFAULT_INT4_GROUP = 64
DEFAULT_INT4_ZERO_POINTS = False

ACTIVATION_BITS: tuple[ActivationBits, ...] = (8, 16)
DEFAULT_ACTIVATION_BITS: ActivationBits = 8
"""Bits of the activations that int4 weights are multiplied with; 8 are rounded while a model runs."""

_WRAPPERS = ("model", "language_model", "thinker")
"""Parts at the beginning of names in which the tensors of a file and the modules in memory differ."""


@dataclass(frozen=True)
class Quantization:
    """The codes to which a command quantises projections.

    For int4, group: the number of columns that share a scale. zero_points: whether they share a code for 0, too, which
    otherwise is the middle of the codes. None: the default. calibration: the file by which int4 and fp8 weigh errors
    (calibration.py), if any.
    """

    codes: Codes
    group: int | None = None
    zero_points: bool | None = None
    calibration: Path | None = None

    def __str__(self) -> str:
        group = "" if self.group is None else f" in groups of {self.group}"
        zeros = "" if self.zero_points is None else f" with{'' if self.zero_points else 'out'} zero points"
        return self.codes + group + zeros


@dataclass(frozen=True)
class Scheme:
    """What a checkpoint holds in place of the floats X.weight [n, k] of a quantised module X.

    awq: X.qweight, X.qzeros, X.scales, packed along the outputs in AWQ's own order. gptq: the same and X.g_idx, codes
    packed along the inputs. packed (compressed-tensors): X.weight_packed along the inputs, X.weight_scale, and
    X.weight_zero_point unless symmetric. fp8 (e4m3) and int8: X.weight, and its scales as X.weight_scale or
    X.weight_scale_inv. mxfp4 (gpt-oss): X_blocks and X_scales, where X is the weight of all experts of a layer.
    nvfp4: X.weight_packed or X.weight, X.weight_scale, and X.weight_global_scale or X.weight_scale_2. gguf: blocks of
    codes with their scales.
    """

    layout: Layout
    bits: int = 8
    block: tuple[int, int] = (0, 0)
    """Rows and columns that share a scale, 0: all of them."""
    symmetric: bool = True
    """awq, gptq, packed: every zero point is the middle of the codes."""
    zeros_minus_one: bool = False
    """gptq: zero points are stored less one (its first format, which files without checkpoint_format have)."""
    act_order: bool = False
    """gptq: columns that share a scale lie anywhere (desc_act); X.g_idx says where."""
    type: str = ""
    """gguf: the type of the blocks, such as Q4_K."""

    @property
    def codes(self) -> Codes:
        if self.layout in ("fp8", "mxfp4", "nvfp4", "gguf"):
            return self.layout
        return "int4" if self.bits == 4 else "int8"

    @property
    def group(self) -> int:
        """Columns that share a scale, 0: all."""
        return self.block[1]

    def __str__(self) -> str:
        return f"{self.type or self.codes} ({self.layout})"


MXFP4 = Scheme("mxfp4", 4, (1, 32))
NVFP4 = Scheme("nvfp4", 4, (1, 16))


@dataclass(frozen=True)
class QuantizationConfig:
    """Which modules a checkpoint quantises, and how.

    scheme: that of most modules, by which a model is cut.
    """

    scheme: Scheme
    kept: frozenset[str] = frozenset()
    """Modules that are stored as floats with all inside them, or parts of their names between dots."""
    kept_alone: frozenset[str] = frozenset()
    """Modules that are stored as floats; those inside them need not be."""
    rules: tuple[tuple[str, Scheme | None], ...] = ()
    """Regular expressions, from the start of a name, and how modules are stored whose first match it is; None: as
    floats."""
    others: bool = True
    """Whether modules that none of these names are stored as `scheme`."""
    stored: Mapping[str, Scheme] | None = field(default=None, repr=False, compare=False)
    """How the files store each quantised module, whatever the lists above say; None: there are no files."""
    overrides: str | None = None
    """What the settings say in place of `scheme`, which is that of the tensors; None: they say the same."""
    cache: str | None = None
    """The setting that announces a quantised cache of keys and values, which is not used."""

    def scheme_of(self, module: str) -> Scheme | None:
        """Return how a projection, such as model.layers.0.mlp.up_proj, is stored; None: as floats."""
        if self.stored is not None:
            return self.stored.get(module)
        if not self.kept.isdisjoint(_parts(module)) or _bare(module) in self.kept_alone:
            return None
        for pattern, scheme in self.rules:
            if re.match(pattern, module):
                return scheme
        return self.scheme if self.others else None


def bare_names(*names: str) -> frozenset[str]:
    """Return names for `kept` and `kept_alone`."""
    return frozenset(_bare(name) for name in names)


def _bare(name: str) -> str:
    """Return a name without the parts in which names on disk and in memory differ; never nothing."""
    parts = name.split(".")
    while len(parts) > 1 and parts[0] in _WRAPPERS:
        parts.pop(0)
    return ".".join(parts)


def _parts(module: str) -> Iterator[str]:
    """Yield every run of parts between the dots of a name."""
    parts = module.split(".")
    for first in range(len(parts)):
        for last in range(first, len(parts)):
            yield ".".join(parts[first : last + 1])


def check_agreement(
    stored: QuantizationConfig | None, asked: Quantization | None, dtype: str, activation_bits: ActivationBits
) -> None:
    """Raise ConfigError if a command asks for other codes than the checkpoint has, or for float32 activations, or for
    activations of 16 bits with codes that are defined with 8."""
    if stored is not None and asked is not None and not _same(stored.scheme, asked):
        raise ConfigError(
            f"quantization: expected none, or {stored.scheme} as the checkpoint is quantised already, found {asked}"
        )
    is_gguf = stored is not None and stored.scheme.layout == "gguf"
    if (stored or asked) is not None and dtype == "float32" and not is_gguf:
        raise ConfigError("dtype: expected bfloat16 with quantised weights, found float32")
    layout = (asked and asked.codes) if stored is None else stored.scheme.layout
    if activation_bits == 16 and layout == "int8":
        raise ConfigError("activation_bits: expected 8 with int8 weights, found 16")


def held_codes(stored: QuantizationConfig | None, asked: Quantization | None) -> Codes | None:
    """Return the codes that a model holds its weights in; None: floats."""
    if stored is not None:
        return None if stored.scheme.act_order else stored.scheme.codes
    return None if asked is None else asked.codes


def _same(stored: Scheme, asked: Quantization) -> bool:
    return (
        asked.codes == stored.codes
        and asked.group in (None, stored.group)
        and asked.zero_points in (None, not stored.symmetric)
    )
