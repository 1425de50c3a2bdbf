"""The memory of rows that kernels quantise to int8 at run time, in steps of inputs that share a scale."""

from __future__ import annotations

from .. import core
from ..weight import TILE_ROWS, round_up

_TILE_K = 64  # inputs of a row of an AMX tile


def scratch_of_int8_rows(format: str, m: int, k: int, step: int, code_bytes: int = 1) -> int:
    """Return the bytes for the codes of x[m, k], and for a scale and a start of sums for every row and step.

    format: of the weight, by the name of its layout. code_bytes: of a code, in vectors. 0 with few rows, which every
    thread quantises for itself.
    """
    if core.packs_per_thread(format, m):
        return 0
    if core.rung_of(format) == "amx":
        return round_up(m, TILE_ROWS) * round_up(k, _TILE_K) // _TILE_K * (_TILE_K + _TILE_K // step * 8)
    return m * -(-k // step) * (step * code_bytes + 8)
