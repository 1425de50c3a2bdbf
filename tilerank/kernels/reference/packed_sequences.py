"""`packed_sequences.py` in plain torch."""

from itertools import pairwise

import torch
from torch import Tensor


def attention_varlen(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float) -> Tensor:
    """Return the attention within each packed sequence, in fp32 with one rounding."""
    out = torch.empty(q.shape, dtype=q.dtype)
    group = q.shape[1] // k.shape[1]
    for start, stop in pairwise(cu_seqlens.tolist()):
        for head in range(q.shape[1]):
            keys, values = (x[start:stop, head // group].float().contiguous() for x in (k, v))
            for row in range(start, stop):
                query = q[row, head].to(torch.float32, copy=True)  # a copy as in attention.py
                out[row, head] = torch.softmax(keys @ query * scale, dim=-1) @ values
    return out
