"""`latent.py` in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import KernelError
from ..kv_pages import PAGE_TOKENS, KVPages
from ..latent_pages import LatentPages
from ..packed_experts import PackedExperts
from . import attention, ops


def store_latent(latent: Tensor, rope_key: Tensor, cache: LatentPages, slots: Tensor) -> None:
    """Write token i to slot slots[i] of the cache."""
    size = cache.num_pages * PAGE_TOKENS
    if slots.numel() and not 0 <= int(slots.min()) <= int(slots.max()) < size:
        bad = next(slot for slot in slots.tolist() if not 0 <= slot < size)
        raise KernelError(f"store_latent: slots: expected values in [0, {size}), found {bad}")
    page, offset = slots // PAGE_TOKENS, slots % PAGE_TOKENS
    if cache.scales is not None:
        latent, cache.scales[page, 0, offset] = ops.quantise_rows(latent.float())
        rope_key, cache.scales[page, 1, offset] = ops.quantise_rows(rope_key.float())
    row = torch.cat([latent, rope_key], dim=1)
    cache.data[page, offset] = F.pad(row, (0, cache.data.shape[2] - row.shape[1]))


def load_latent(cache: LatentPages, pages: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the rows of the given pages, in order."""
    bad = pages[(pages < 0) | (pages >= cache.num_pages)]
    if bad.numel():
        raise KernelError(f"load_latent: pages: expected values in [0, {cache.num_pages}), found {int(bad[0])}")
    rows = cache.data[pages.long()].flatten(0, 1)
    latent, rope_key = rows[:, : cache.latent_dim], rows[:, cache.latent_dim :][:, : cache.rope_dim]
    if cache.scales is not None:
        scales = cache.scales[pages.long()].transpose(0, 1).reshape(2, -1, 1)
        return (latent * scales[0]).to(dtype), (rope_key * scales[1]).to(dtype)
    return latent.contiguous(), rope_key.contiguous()


def latent_attention(
    q_latent: Tensor,
    q_rope: Tensor,
    cache: LatentPages,
    page_tables: Tensor,
    seq_lens: Tensor,
    query_starts: Tensor,
    scale: float,
    *,
    causal: bool = True,
    lse: Tensor | None = None,
    kv_starts: Tensor | None = None,
) -> Tensor:
    """Return the attention over one head of keys [latent, rope_key] and values latent, in fp32 with one rounding."""
    q = torch.cat([q_latent, q_rope], dim=2)
    firsts = [0] * seq_lens.shape[0] if kv_starts is None else kv_starts.tolist()
    attention.check_batch(
        "latent_attention", q.shape[0], cache.num_pages, page_tables, seq_lens, query_starts, causal, firsts
    )
    if lse is not None:
        lse.fill_(float("-inf"))
    out = torch.zeros(q_latent.shape, dtype=q.dtype)
    starts = query_starts.tolist()
    for sequence, (first, length) in enumerate(zip(firsts, seq_lens.tolist(), strict=True)):
        if first % PAGE_TOKENS:
            raise KernelError(
                f"latent_attention: kv_starts: expected a multiple of {PAGE_TOKENS} for sequence {sequence}, "
                f"found {first}"
            )
        pages = page_tables[sequence, first // PAGE_TOKENS : -(-(first + length) // PAGE_TOKENS)]
        latent, rope_key = load_latent(cache, pages, torch.float32 if cache.dtype == torch.int8 else cache.dtype)
        keys = torch.cat([latent, rope_key], dim=1)[:length].float()
        start, stop = starts[sequence : sequence + 2]
        for row in range(start, stop):
            seen = length - (stop - row) + 1 if causal else length
            if not seen:
                continue
            # As in `attention`: only the visible tokens, and a copy of the query.
            scores = q[row].to(torch.float32, copy=True) @ keys[:seen].T * scale
            if lse is not None:
                lse[row] = scores.logsumexp(dim=-1)
            values = keys[:seen, : cache.latent_dim].contiguous()
            out[row] = (torch.softmax(scores, dim=-1) @ values).to(q.dtype)
    return out


def join_queries(q_latent: Tensor, q_rope: Tensor, heads: int) -> Tensor:
    """Return both parts of the queries, with zeros for the heads that are not given."""
    joined = torch.cat([q_latent, q_rope], dim=2)
    return F.pad(joined, (0, 0, 0, heads - joined.shape[1]))


def weigh_part(part: Tensor, lse: Tensor, rank: int) -> Tensor:
    """Return the part times its weight, in fp32 with one rounding."""
    return (part.float() * torch.softmax(lse, dim=0)[rank, ..., None]).to(part.dtype)


def head_linear(x: Tensor, weight: PackedExperts, x_scales: Tensor | None = None) -> Tensor:
    """Return every head's product in fp32, rounded once."""
    heads = []
    for head in range(weight.experts):
        rows = x[:, head] if x_scales is None else (x[:, head].float() * x_scales[head]).to(x.dtype)
        heads.append(weight.part(head).product(rows))
    return torch.stack(heads, dim=1).to(x.dtype)


def expanded_pages(k: Tensor, v: Tensor, rope_key: Tensor) -> KVPages:
    """Store keys [k, rope_key] and values as any others."""
    tokens, heads, _ = k.shape
    keys = torch.cat([k, rope_key[:, None].expand(-1, heads, -1)], dim=2)
    pages = max(-(-tokens // PAGE_TOKENS), 1)
    cache = KVPages.in_arena(pages, heads, keys.shape[2], k.dtype, value_dim=v.shape[2])
    attention.store_kv(keys, v, cache, torch.arange(tokens))
    return cache
