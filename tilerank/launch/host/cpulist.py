"""The kernel's list format ("0-3,8,10-11"), and small reads from sysfs."""

from collections.abc import Iterable
from pathlib import Path

_MAX_ID = 1 << 16  # far above any kernel's NR_CPUS; keeps "0-99999999999" from filling memory


def parse_cpulist(text: str) -> tuple[int, ...]:
    """Parse "0-3,8" to (0, 1, 2, 3, 8), sorted and without duplicates; "" is (). ValueError names the malformed
    part."""
    found: set[int] = set()
    for item in text.strip().split(","):
        if not item.strip():
            if text.strip():
                raise ValueError(f"empty item in {text.strip()!r}")
            continue
        first, dash, last = (part.strip() for part in item.partition("-"))
        if not (first.isascii() and first.isdigit() and (not dash or (last.isascii() and last.isdigit()))):
            raise ValueError(f"{item.strip()!r} is neither a number nor a range like 0-39")
        low, high = int(first), int(last or first)
        if high < low:
            raise ValueError(f"range {item.strip()!r} runs backwards")
        if high >= _MAX_ID:
            raise ValueError(f"{high} is larger than any id that Linux assigns")
        found.update(range(low, high + 1))
    return tuple(sorted(found))


def format_cpulist(ids: Iterable[int]) -> str:
    """Format ids in the shortest form that `parse_cpulist` reads back; () is "none"."""
    runs: list[list[int]] = []
    for i in sorted(set(ids)):
        if runs and runs[-1][1] == i - 1:
            runs[-1][1] = i
        else:
            runs.append([i, i])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs) or "none"


def read_text(path: Path) -> str | None:
    """Return the stripped content of a sysfs, proc or cgroup file; None if this kernel or container lacks it."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:  # missing, unreadable, or an attribute that fails on read (offline CPU)
        return None


def read_cpulist(path: Path) -> tuple[int, ...] | None:
    """Return the list in a file; None if the file is missing or empty, which for a cpuset means "not set here"."""
    text = read_text(path)
    return parse_cpulist(text) if text else None


def read_int(path: Path) -> int | None:
    """Return the decimal number in a file; None if the file is missing or holds no number ("max")."""
    text = read_text(path)
    return int(text) if text and text.lstrip("-").isdigit() else None


def read_fields(path: Path) -> dict[str, str]:
    """Return the lines "Name: value" of a file, such as /proc/PID/status; none if the file is missing."""
    lines = (line.partition(":") for line in (read_text(path) or "").splitlines())
    return {name: value.strip() for name, _, value in lines}
