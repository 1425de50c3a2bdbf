"""Numbers and tables as text for a terminal."""

from __future__ import annotations

from collections.abc import Sequence


def size(nbytes: float) -> str:
    """Format bytes with three digits: 512 B, 12.0 KiB, 300 MiB, 1.50 GiB."""
    unit = "B"
    for larger in ("KiB", "MiB", "GiB"):
        if nbytes < 1024:
            break
        nbytes, unit = nbytes / 1024, larger
    digits = 0 if unit == "B" or nbytes >= 100 else 1 if nbytes >= 10 else 2
    return f"{nbytes:.{digits}f} {unit}"


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def count(n: int, what: str) -> str:
    """Format a number of things: 1 core, 2 cores."""
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def token_count(n: int) -> str:
    return f"{n:,} token{'s' * (n != 1)}"


def table(rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Format rows as lines. Columns are right-aligned except for the first and the last `left - 1`."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    last = len(widths) - (left - 1)
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if 0 < i < last else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("   ".join(cells).rstrip())
    return lines
