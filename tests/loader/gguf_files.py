"""Writes GGUF files, and what their blocks mean by the formulas of the formats, value by value."""

import math
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

TYPES = {
    "F32": (0, 1, 4),
    "F16": (1, 1, 2),
    "Q4_0": (2, 32, 18),
    "Q4_1": (3, 32, 20),
    "Q5_0": (6, 32, 22),
    "Q5_1": (7, 32, 24),
    "Q8_0": (8, 32, 34),
    "Q2_K": (10, 256, 84),
    "Q3_K": (11, 256, 110),
    "Q4_K": (12, 256, 144),
    "Q5_K": (13, 256, 176),
    "Q6_K": (14, 256, 210),
    "IQ4_NL": (20, 32, 18),
    "IQ4_XS": (23, 256, 136),
    "BF16": (30, 1, 2),
    "MXFP4": (39, 32, 17),
}
"""By name: the number in files, values and bytes of a block."""
BLOCKS = tuple(name for name, (_, values, _) in TYPES.items() if values > 1)

HOSTILE: tuple[Any, ...] = (0, (1 << 32) - 1, math.nan, True, "x\ny", [1, 2], [math.nan], ["a", "a"])
"""Values that no key of the metadata expects."""

_HALVES = {
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "Q4_1": (0, 2),
    "Q5_1": (0, 2),
}
_FORMATS = {bool: (7, "?"), int: (4, "I"), float: (6, "f")}

Tensors = Mapping[str, tuple[str, Sequence[int], bytes]]
"""By name: type, shape and data."""


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def _value(value: Any) -> bytes:
    """Return the type and the bytes of a value of the metadata."""
    if isinstance(value, str):
        return struct.pack("<I", 8) + text(value)
    if isinstance(value, list):
        items = [_value(item) for item in value]
        return struct.pack("<I", 9) + items[0][:4] + struct.pack("<Q", len(items)) + b"".join(one[4:] for one in items)
    number, code = _FORMATS[type(value)]
    return struct.pack("<I" + code, number, value)


def gguf_bytes(metadata: Mapping[str, Any], tensors: Tensors, alignment: int = 32) -> bytes:
    """Return a file of version 3."""
    header = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(metadata))
    header += b"".join(text(key) + _value(value) for key, value in metadata.items())
    data = b""
    for name, (kind, shape, blocks) in tensors.items():
        dims = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        header += text(name) + dims + struct.pack("<IQ", TYPES[kind][0], len(data))
        data += blocks + bytes(-len(blocks) % alignment)
    return header + bytes(-len(header) % alignment) + data


def write_gguf(path: Path, metadata: Mapping[str, Any], tensors: Tensors) -> Path:
    path.write_bytes(gguf_bytes(metadata, tensors))
    return path


def random_blocks(kind: str, rows: int, columns: int, rng: np.random.Generator, scale: float = 0.01) -> bytes:
    """Return rows of random blocks with finite scales around `scale`. k-quants multiply them with factors up to 127."""
    _, values, nbytes = TYPES[kind]
    blocks = rng.integers(0, 256, (rows * columns // values, nbytes), dtype=np.uint8)
    if kind == "MXFP4":
        blocks[:, 0] = 127 + round(math.log2(scale))
    elif values > 1:
        for at in _HALVES.get(kind, (0,)):
            scales = rng.normal(0, scale / (32 if values == 256 else 1), len(blocks)).astype(np.float16)
            blocks[:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)
    return blocks.tobytes()


def values_of(kind: str, data: bytes, shape: Sequence[int]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return what blocks mean in fp32."""
    _, values, nbytes = TYPES[kind]
    if kind == "F32":
        return np.frombuffer(data, np.float32).reshape(shape)
    blocks = [data[at : at + nbytes] for at in range(0, len(data), nbytes)]
    found = [[np.float32(_at(kind, block, i)) for i in range(values)] for block in blocks]
    return np.array(found, np.float32).reshape(shape)


def _int8(block: bytes, at: int) -> int:
    return int.from_bytes(block[at : at + 1], signed=True)


def _half(block: bytes, at: int) -> float:
    return float(struct.unpack_from("<e", block, at)[0])


_T = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_F = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def _nibble(byte: int, high: int) -> int:
    return byte >> 4 if high else byte & 15


def _at(kind: str, b: bytes, i: int) -> float:
    """Return value i of a block, by the formula of its format, in fp64, which is exact but for a difference."""
    if TYPES[kind][1] == 32 and kind != "Q8_0":
        codes = TYPES[kind][2] - 16
        q = _nibble(b[codes + i % 16], int(i >= 16))
        if kind in ("Q5_0", "Q5_1"):
            q |= (int.from_bytes(b[codes - 4 : codes], "little") >> i & 1) << 4
        match kind:
            case "MXFP4":
                return math.ldexp(_F[q], b[0] - 128)
            case "IQ4_NL":
                return _half(b, 0) * _T[q]
            case "Q4_0" | "Q5_0":
                return _half(b, 0) * (q - (8 if kind == "Q4_0" else 16))
        return _half(b, 0) * q + _half(b, 2)
    match kind:
        case "Q8_0":
            return _half(b, 0) * _int8(b, 2 + i)
        case "Q2_K":
            q = b[16 + 32 * (i // 128) + i % 32] >> 2 * (i % 128 // 32) & 3
            factors = b[i // 16]
            return _half(b, 80) * (factors & 15) * q - _half(b, 82) * (factors >> 4)
        case "Q3_K":
            q = b[32 + 32 * (i // 128) + i % 32] >> 2 * (i % 128 // 32) & 3
            g = i // 16
            factor = _nibble(b[96 + g % 8], int(g >= 8)) | (b[104 + g % 4] >> 2 * (g // 4) & 3) << 4
            return _half(b, 108) * (factor - 32) * (q - (0 if b[i % 32] >> i // 32 & 1 else 4))
        case "Q4_K" | "Q5_K":
            s, g = b[4:16], i // 32
            if g < 4:
                factor, less = s[g] & 63, s[g + 4] & 63
            else:
                factor = (s[g + 4] & 15) + 16 * (s[g - 4] >> 6)
                less = (s[g + 4] >> 4) + 16 * (s[g] >> 6)
            q = _nibble(b[len(b) - 128 + 32 * (i // 64) + i % 32], i % 64 // 32)
            if kind == "Q5_K":
                q |= (b[16 + i % 32] >> i // 32 & 1) << 4
            return _half(b, 0) * factor * q - _half(b, 2) * less
        case "Q6_K":
            n, s_, place = i // 128, i % 128 // 32, i % 32
            q = _nibble(b[64 * n + 32 * (s_ % 2) + place], int(s_ >= 2)) | (b[128 + 32 * n + place] >> 2 * s_ & 3) << 4
            return _half(b, 208) * _int8(b, 192 + i // 16) * (q - 32)
    g = i // 32
    factor = _nibble(b[4 + g // 2], g % 2) + 16 * (int.from_bytes(b[2:4], "little") >> 2 * g & 3)
    return _half(b, 0) * (factor - 32) * _T[_nibble(b[8 + 16 * g + i % 16], i % 32 // 16)]
