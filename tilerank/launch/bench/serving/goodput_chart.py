"""Draws the trials of `bench serve --slo` as an SVG: the waits of the slowest 1 % of the requests by their rate."""

from __future__ import annotations

from html import escape
from math import log10
from pathlib import Path
from typing import Any

from ..harness import write_file

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 880, 400, 70, 30, 70, 50
LOWEST, HIGHEST = 0.01, 10.0
"""The ends of the vertical axis, as shares of a limit. Waits beyond them are drawn there."""
SERIES = (("ttft_s", "first token", "#0b6e75"), ("tpot_s", "token after the first", "#d9a441"))


def write_goodput_chart(path: Path, report: dict[str, Any]) -> None:
    write_file("--chart", path, draw(report))


def draw(report: dict[str, Any]) -> str:
    """Return the SVG of a report of `Goodput.as_json`."""
    marks = [report[name] for name in ("requests_per_s", "limit_requests_per_s")]
    rates = [rate for rate in (*(trial["rate"] for trial in report["trials"]), *marks) if rate]
    low, high = (min(rates) / 1.2, max(rates) * 1.2) if rates else (0.1, 10.0)

    def x(rate: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * log10(rate / low) / log10(high / low)

    def y(share: float) -> float:
        inside = min(max(share, LOWEST), HIGHEST)
        return TOP + (HEIGHT - TOP - BOTTOM) * log10(HIGHEST / inside) / log10(HIGHEST / LOWEST)

    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {HEIGHT}' width='{WIDTH}' height='{HEIGHT}'",
        " font-family='system-ui, sans-serif'>",
        f"<rect width='{WIDTH}' height='{HEIGHT}' fill='#fff'/>",
        _text(16, 22, f"{report['model']}: wait of the slowest 1 % as a share of its limit, by requests a second", 14),
        _text(16, 42, report["mix"], 11),
    ]
    for share in (0.01, 0.1, 1.0, 10.0):
        dashes = "" if share == 1 else " stroke-dasharray='2 4'"
        parts.append(f"<path d='M {LEFT} {y(share):.1f} H {WIDTH - RIGHT}' stroke='#888'{dashes}/>")
        parts.append(_text(LEFT - 8, y(share) + 4, f"{share:g}", 11, "end"))
    for rate, title in zip(marks, ("goodput", "machine's limit"), strict=True):
        if rate:
            parts.append(f"<path d='M {x(rate):.1f} {TOP} V {HEIGHT - BOTTOM}' stroke='#444' stroke-dasharray='3 3'/>")
            parts.append(_text(x(rate), TOP - 6, f"{title} {rate:.3g}/s", 11, "middle"))
    trials = sorted(report["trials"], key=lambda trial: trial["rate"])
    for number, (name, title, color) in enumerate(SERIES):
        points = [(x(trial["rate"]), y(trial["waits"][name] / report["limits"][name])) for trial in trials]
        line = " ".join(f"{across:.1f},{down:.1f}" for across, down in points)
        parts.append(f"<polyline points='{line}' fill='none' stroke='{color}'/>")
        for (across, down), trial in zip(points, trials, strict=True):
            fill = "#fff" if trial["given_up"] else color
            parts.append(f"<circle cx='{across:.1f}' cy='{down:.1f}' r='4' stroke='{color}' fill='{fill}'/>")
        parts.append(f"<rect x='{LEFT + 190 * number}' y='{HEIGHT - 20}' width='12' height='12' fill='{color}'/>")
        parts.append(_text(LEFT + 17 + 190 * number, HEIGHT - 10, title, 12))
    parts.append(_text(WIDTH - RIGHT, HEIGHT - 10, "hollow: given up, the wait is longer", 11, "end"))
    for trial in trials:
        parts.append(_text(x(trial["rate"]), HEIGHT - BOTTOM + 16, f"{trial['rate']:.3g}", 10, "middle"))
    return "\n".join([*parts, "</svg>", ""])


def _text(x: float, y: float, content: str, size: int, anchor: str = "start") -> str:
    return (
        f"<text x='{x:.1f}' y='{y:.1f}' font-size='{size}' text-anchor='{anchor}' fill='#222'>{escape(content)}</text>"
    )
