"""`attention.py` in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import KernelError
from ..kv_pages import PAGE_TOKENS, KVPages
from . import ops


def store_kv(k: Tensor, v: Tensor, cache: KVPages, slots: Tensor) -> None:
    """Write token i of k and v to slot slots[i] of the cache."""
    size = cache.num_pages * PAGE_TOKENS
    if slots.numel() and not 0 <= int(slots.min()) <= int(slots.max()) < size:
        bad = next(slot for slot in slots.tolist() if not 0 <= slot < size)
        raise KernelError(f"store_kv: slots: expected values in [0, {size}), found {bad}")
    page, offset = slots // PAGE_TOKENS, slots % PAGE_TOKENS
    if cache.scales is not None:
        k, cache.scales[page, :, 0, offset] = _codes(k)
        v, cache.scales[page, :, 1, offset] = _codes(v)
    keys, values = _pages(cache)
    x = keys.shape[-1]
    # Views whose first three dimensions address a token.
    by_lane = keys.permute(0, 2, 4, 1, 3, 5)  # [page, token / 16, token % 16, head, dim / x, x]
    by_pair = values.permute(0, 3, 5, 1, 2, 4)  # [page, token / x, token % x, head, dim / 16, 16]
    by_lane[page, offset // 16, offset % 16] = k.reshape(-1, *by_lane.shape[3:])
    padded = F.pad(v, (0, -v.shape[-1] % 16))
    by_pair[page, offset // x, offset % x] = padded.reshape(-1, *by_pair.shape[3:])


def _codes(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the int8 codes of x and the fp32 scales of every token and head."""
    codes, scales = ops.quantise_rows(x.float().flatten(0, 1))
    return codes.view(x.shape), scales.view(x.shape[:2])


def load_kv(cache: KVPages, pages: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys [PAGE_TOKENS * len(pages), kv_heads, head_dim] and values [..., value_dim] of pages, in order."""
    tokens, d = pages.shape[0] * PAGE_TOKENS, cache.value_dim
    keys, values = (half[pages] for half in _pages(cache))
    keys = keys.permute(0, 2, 4, 1, 3, 5).reshape(tokens, cache.kv_heads, cache.head_dim)
    values = values.permute(0, 3, 5, 1, 2, 4).reshape(tokens, cache.kv_heads, d + -d % 16)
    if cache.scales is not None:
        scales = cache.scales[pages].permute(2, 0, 3, 1).reshape(2, tokens, cache.kv_heads, 1)
        keys, values = keys * scales[0], values * scales[1]
    return keys, values[..., :d]


def _pages(cache: KVPages) -> tuple[Tensor, Tensor]:
    """Return views of k and v in the layout of `KVPages`.

    k: [page, head, token / 16, dim / x, token % 16, x]; v: [page, head, dim / 16, token / x, dim % 16, x].
    """
    x = 1 if cache.dtype == torch.float32 else 2
    keys = cache.k.view(cache.num_pages, cache.kv_heads, PAGE_TOKENS // 16, cache.head_dim // x, 16, x)
    return keys, cache.v.view(cache.num_pages, cache.kv_heads, -1, PAGE_TOKENS // x, 16, x)


def attention(
    q: Tensor,
    cache: KVPages,
    page_tables: Tensor,
    seq_lens: Tensor,
    query_starts: Tensor,
    kv_map: Tensor,
    scale: float,
    *,
    causal: bool = True,
    lse: Tensor | None = None,
    kv_starts: Tensor | None = None,
    window: int = 0,
    sinks: Tensor | None = None,
    softcap: float = 0.0,
    visible: Tensor | None = None,
) -> Tensor:
    """Return the attention of the last tokens of every sequence over its cached tokens, in fp32 with one rounding."""
    firsts = [0] * seq_lens.shape[0] if kv_starts is None else kv_starts.tolist()
    ends = None if visible is None else visible.tolist()
    batch = page_tables, seq_lens, query_starts, causal, firsts
    check_batch("attention", q.shape[0], cache.num_pages, *batch, window=window, ends=ends)
    _check_kv_map(kv_map, q.shape[1])
    if lse is not None:
        lse.fill_(float("-inf"))
    out = torch.zeros(*q.shape[:2], cache.value_dim, dtype=q.dtype)
    starts = query_starts.tolist()
    for sequence, length in enumerate(seq_lens.tolist()):
        start, stop = starts[sequence : sequence + 2]
        seen = seen_tokens(length, stop - start, causal, window, None if ends is None else ends[start:stop])
        if not seen or not length:
            continue
        # Tokens are counted from `origin`, the first token of the first page that is read.
        origin = (firsts[sequence] + seen[0].start) // PAGE_TOKENS * PAGE_TOKENS - firsts[sequence]
        end = -(-(firsts[sequence] + length) // PAGE_TOKENS)
        pages = page_tables[sequence, (firsts[sequence] + origin) // PAGE_TOKENS : end]
        keys, values = load_kv(cache, pages.long())
        for head, (first, count) in enumerate(kv_map.tolist()):
            heads = slice(first, first + count)
            head_keys, head_values = keys[:, head].float().contiguous(), values[:, head].float().contiguous()
            for row, tokens in enumerate(seen, start):
                # Only the visible keys, so that the order of summation depends neither on the batch nor on later
                # tokens; a copy of the query, because it also depends on the query's alignment.
                own = slice(tokens.start - origin, tokens.stop - origin)
                queries = q[row, heads].to(torch.float32, copy=True)
                scores = queries @ head_keys[own].T * scale
                if softcap:
                    scores = softcap * torch.tanh(scores / softcap)
                if sinks is not None:
                    scores = torch.cat([scores, sinks[heads, None]], dim=-1)
                if lse is not None:
                    lse[row, heads] = scores.logsumexp(dim=-1)
                weights = torch.softmax(scores, dim=-1)[:, : len(tokens)]
                out[row, heads] = (weights @ head_values[own]).to(q.dtype)
    return out


def seen_tokens(length: int, rows: int, causal: bool, window: int, ends: list[int] | None) -> list[range]:
    """Return the tokens that each of the last `rows` tokens of a sequence attends to.

    ends: the ends of these ranges, if they differ from position + 1.
    """
    if not causal:
        return [range(length)] * rows
    first = length - rows
    return [
        range(max(0, position + 1 - window) if window else 0, position + 1 if ends is None else ends[position - first])
        for position in range(first, length)
    ]


def check_batch(
    kernel: str,
    rows: int,
    num_pages: int,
    page_tables: Tensor,
    seq_lens: Tensor,
    query_starts: Tensor,
    causal: bool,
    firsts: list[int],
    *,
    window: int = 0,
    ends: list[int] | None = None,
) -> None:
    """Check the values of the arguments that could make a kernel read or write out of bounds."""
    starts, lengths = query_starts.tolist(), seq_lens.tolist()
    if starts[0] != 0 or starts[-1] != rows:
        raise KernelError(f"{kernel}: query_starts: expected 0 to {rows}, found {starts[0]} to {starts[-1]}")
    for i, length in enumerate(lengths):
        queries = starts[i + 1] - starts[i]
        if length < 0:
            raise KernelError(f"{kernel}: seq_lens: expected at least 0 tokens of sequence {i}, found {length}")
        most = length if causal else rows
        if not 0 <= queries <= most:
            raise KernelError(f"{kernel}: query_starts: expected 0 to {most} queries of sequence {i}, found {queries}")
        if firsts[i] < 0:
            raise KernelError(f"{kernel}: kv_starts: expected at least 0 tokens before sequence {i}, found {firsts[i]}")
        pages = -(-(firsts[i] + length) // PAGE_TOKENS) if length else 0
        if pages > page_tables.shape[1]:
            raise KernelError(
                f"{kernel}: page_tables: expected {pages} pages for sequence {i}, found {page_tables.shape[1]}"
            )
        if ends is not None:
            _check_ends(kernel, range(starts[i], starts[i + 1]), ends, length)
        seen = seen_tokens(length, queries, causal, window, None)
        first_page = (firsts[i] + (seen[0].start if seen else 0)) // PAGE_TOKENS
        for page in page_tables[i, first_page:pages].tolist():
            if not 0 <= page < num_pages:
                raise KernelError(
                    f"{kernel}: page_tables: expected pages in [0, {num_pages}) for sequence {i}, found {page}"
                )


def _check_ends(kernel: str, rows: range, ends: list[int], length: int) -> None:
    least = 0
    for row in rows:
        least = max(least, length - (rows.stop - row) + 1)
        if not least <= ends[row] <= length:
            raise KernelError(f"{kernel}: visible: expected {least} to {length} for row {row}, found {ends[row]}")
        least = ends[row]


def _check_kv_map(kv_map: Tensor, q_heads: int) -> None:
    next_head = 0  # after the query heads of the KV heads before
    for head, (first, count) in enumerate(kv_map.tolist()):
        if count == 0:
            continue
        if first < next_head or count < 0 or first + count > q_heads:
            raise KernelError(
                f"attention: kv_map: expected query heads in [{next_head}, {q_heads}) for KV head {head}, "
                f"found {count} from {first}"
            )
        next_head = first + count
