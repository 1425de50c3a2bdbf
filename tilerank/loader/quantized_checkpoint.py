"""Quantised checkpoints: which stored tensors a rectangle of a weight is read from.

A model declares rectangles of X.weight. Here each becomes rectangles of the tensors that the checkpoint has in place of
X.weight (quantization_config.py). Codes are written unchanged. Weights that the model holds as floats are dequantised.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from tilerank.parallel.parameters import Rectangle, WeightParameter

from .checkpoint import Checkpoint
from .encodings.byte_encoding import ByteEncoding
from .encodings.mxfp4_encoding import Mxfp4Encoding
from .encodings.nvfp4_encoding import Nvfp4Encoding
from .encodings.packed_encoding import AWQ, GPTQ, CompressedInts
from .encodings.weight_encoding import WeightEncoding
from .quantization_config import Layout, QuantizationConfig, Scheme
from .rectangle import Read, place_of, read_plain

_ENCODINGS: dict[Layout, type[WeightEncoding]] = {
    "awq": AWQ,
    "gptq": GPTQ,
    "packed": CompressedInts,
    "fp8": ByteEncoding,
    "int8": ByteEncoding,
    "mxfp4": Mxfp4Encoding,
    "nvfp4": Nvfp4Encoding,
}

CACHE_SCALES = ("k_scale", "v_scale", "q_scale", "kv_scale", "prob_scale", "output_scale")
"""Ends of the names of scales of a quantised cache, which are not used."""

_UNUSED = ("input_scale", "input_global_scale", "activation_scale", "input_zero_point", "weight_shape")
"""Ends of the names of tensors beside codes that are not needed: activations are quantised, if at all, row by row."""


class QuantizedCheckpoint:
    """What reads the weights of a checkpoint, each in the scheme of its module."""

    def __init__(self, config: QuantizationConfig, checkpoint: Checkpoint) -> None:
        self.config = config
        self._checkpoint = checkpoint
        self._encoding = cache(self._make_encoding)

    def reads(self, rectangle: Rectangle) -> Iterator[Read]:
        """Yield what to read for a rectangle; stored rectangles are empty where it is."""
        module, _, end = rectangle.name.rpartition(".")
        scheme = self.config.scheme_of(module)
        if scheme is None or end not in ("weight", "weight_scale"):
            yield read_plain(rectangle, place_of(rectangle, self._checkpoint))
            return
        encoding, parameter = self._encoding(scheme), rectangle.parameter
        if end == "weight_scale":
            yield encoding.scales_alone(rectangle)
        elif isinstance(parameter, WeightParameter) and parameter.is_quantised:
            yield from encoding.encoded(rectangle, parameter)
        else:
            yield encoding.floats(rectangle)

    def leaves_out(self, name: str) -> bool:
        """Return whether a tensor that the model does not use has no effect."""
        return name.endswith(tuple(f".{end}" for end in (*CACHE_SCALES, *_UNUSED)))

    def _make_encoding(self, scheme: Scheme) -> WeightEncoding:
        return _ENCODINGS[scheme.layout](scheme, self._checkpoint)
