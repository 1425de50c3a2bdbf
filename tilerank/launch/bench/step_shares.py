"""Where the time of a decode step goes: the shares of its kernels by what they do, and of what is not in kernels.

A row of `bench model` has them as fields, such as products_share.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .harness import Column, Row
from .harness import table as lines_of

KERNELS = {
    "products": ("linear_", "head_linear_", "moe_", "convolve_"),
    "attention": (
        *("attention", "latent_", "store_", "load_latent", "expanded_pages", "join_queries", "weigh_part"),
        *("delta_", "causal_conv", "gated_norm"),
    ),
    "exchange": ("shm_", "python"),  # "python": a message to other hosts between launches
    "sampling": ("argmax", "sample"),
}
"""How the names of kernels begin, by what they do; those of all others are "other"."""

FIELDS = (*(f"{name}_share" for name in (*KERNELS, "other")), "overhead_share")
"""The fields of a row. overhead_share: outside of kernels, on rank 0's host threads and between launches."""


def kernel_group(kernel: str) -> str:
    """Return what a kernel does: a key of KERNELS, or "other" for norms, rotary embeddings, embeddings and the like."""
    return next((name for name, prefixes in KERNELS.items() if kernel.startswith(prefixes)), "other")


def shares_of(entries: Iterable[tuple[str, float]], step_s: float) -> dict[str, float]:
    """Return the fields of a step that took step_s, from the seconds of its kernels."""
    seconds = dict.fromkeys((*KERNELS, "other"), 0.0)
    for kernel, kernel_s in entries:
        seconds[kernel_group(kernel)] += kernel_s
    shares = {f"{name}_share": spent / step_s for name, spent in seconds.items()}
    return shares | {"overhead_share": 1 - sum(shares.values())}


def median_step(steps: Sequence[dict[str, float]]) -> dict[str, float] | None:
    """Return the shares of the step whose overhead is the median. None if there are no steps."""
    return sorted(steps, key=lambda step: step["overhead_share"])[len(steps) // 2] if steps else None


def step_table(rows: Sequence[Row]) -> list[str]:
    """Return a header and a line for each decode row that has shares."""
    columns = [
        Column("step", 8, lambda row: str(row["phase"])),
        Column("prompt", -7, lambda row: str(row["prompt_tokens"])),
        Column("batch", -6, lambda row: str(row["batch"])),
        Column("ms", -9, lambda row: f"{1000 * row['tpot_s']:.2f}"),
        *(_share_column(name) for name in FIELDS),
    ]
    return lines_of(columns, [row for row in rows if row.get(FIELDS[0]) is not None])


def _share_column(name: str) -> Column:
    return Column(name.removesuffix("_share"), -11, lambda row: f"{row[name]:.1%}")
