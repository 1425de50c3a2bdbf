"""Draws rows of `bench model`, of one or several systems, as an SVG bar chart of the shares of the machine's limit."""

import argparse
import statistics
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

from ..errors import LaunchError
from .harness import is_writable, write_file
from .peaks import compute_peak_texts

WIDTH, LEFT, RIGHT = 880, 190, 130
BAR, GAP, GROUP_GAP, HEAD = 18, 3, 14, 64
COLORS = ("#0b6e75", "#b8c4cc", "#d9a441", "#8d7fb0", "#c96f53", "#7a9e5f")  # tilerank's stands out

Row = dict[str, Any]


def add_chart_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--chart", type=Path, metavar="FILE.svg", help="also draw the shares of the limit as a bar chart"
    )


def check_chart_argument(args: argparse.Namespace) -> None:
    if args.chart and not (args.chart.suffix == ".svg" and is_writable(args.chart)):
        raise LaunchError(f"--chart: expected a .svg file in a writable directory, found {args.chart}")


def write_chart(args: argparse.Namespace, rows: list[Row]) -> None:
    if args.chart:
        write_file("--chart", args.chart, draw(rows))


def draw(rows: list[Row]) -> str:
    """Return an SVG with a group of bars for each phase, prompt length and batch, and in it a bar for each system."""
    systems = list(dict.fromkeys(row["system"] for row in rows))
    # The axis ends at the limit, or at the largest share: one above 1 occurs if other load slowed the peaks down.
    scale = (WIDTH - LEFT - RIGHT) / max(1.0, *(row["limit_share"] for row in rows))
    limit = LEFT + scale
    parts: list[str] = []
    y = HEAD
    for (_, tokens, batch), group in groupby(sorted(rows, key=_group_key), key=_group_key):
        bars = sorted(group, key=lambda row: systems.index(row["system"]))
        middle = y + (len(bars) * (BAR + GAP) - GAP) / 2 + 4
        parts.append(_text(LEFT - 12, middle, f"{bars[0]['phase']} {tokens} x {batch}", anchor="end"))
        for row in bars:
            width = max(row["limit_share"] * scale, 1.0)
            color = COLORS[systems.index(row["system"]) % len(COLORS)]
            parts.append(f"<rect x='{LEFT}' y='{y}' width='{width:.1f}' height='{BAR}' rx='2' fill='{color}'/>")
            label = f"{_rate_text(row['tokens_per_s'])} tokens/s · {row['limit_share']:.2f}"
            parts.append(_text(LEFT + width + 6, y + 13, label, size=11))
            y += BAR + GAP
        y += GROUP_GAP
    legend_x = LEFT
    for index, system in enumerate(systems):
        color = COLORS[index % len(COLORS)]
        parts.append(f"<rect x='{legend_x}' y='36' width='12' height='12' rx='2' fill='{color}'/>")
        parts.append(_text(legend_x + 17, 46, system))
        legend_x += 34 + 8 * len(system)
    peaks = {  # each row has its own peaks
        name: statistics.median(row["peaks"][name] for row in rows) if isinstance(value, float) else value
        for name, value in rows[0]["peaks"].items()
    }
    limits = ", ".join([f"{peaks['stream_read_gbs']:.1f} GB/s read", *compute_peak_texts(peaks)[:1]])
    title = f"{rows[0]['model']}: share of the machine's limit ({limits}), by prompt tokens x batch"
    height = y + 8
    head = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {height}' width='{WIDTH}' height='{height}'",
        " font-family='system-ui, sans-serif'>",
        f"<rect width='{WIDTH}' height='{height}' fill='#fff'/>",
        _text(16, 22, title, size=14),
    ]
    limit_line = [
        f"<path d='M {limit:.1f} {HEAD - 8} V {y - 6}' stroke='#444' stroke-dasharray='3 3'/>",
        _text(limit, HEAD - 12, "limit", size=11, anchor="middle"),
    ]
    return "\n".join([*head, *parts, *limit_line, "</svg>", ""])


def _group_key(row: Row) -> tuple[bool, int, int]:
    return row["phase"] == "decode", row["prompt_tokens"], row["batch"]


def _rate_text(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _text(x: float, y: float, content: str, *, size: int = 12, anchor: str = "start") -> str:
    return (
        f"<text x='{x:.1f}' y='{y:.1f}' font-size='{size}' text-anchor='{anchor}' fill='#222'>{escape(content)}</text>"
    )
