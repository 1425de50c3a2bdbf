"""The measured rates of the rungs of this CPU, kept in a file from the first start on, so that runs repeat.

`doctor` reads them, and it runs where libraries are missing: the standard library suffices.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import LaunchError

if TYPE_CHECKING:
    from tilerank.kernels.rung_rates import Rates

log = logging.getLogger(__name__)

_CPU = ("vendor_id", "cpu family", "model", "model name", "stepping", "microcode")


def read_rates(rungs: Sequence[str]) -> Rates | None:
    """Return the rates of `rungs` that an earlier start has kept, or None."""
    try:
        return _read(_file(rungs), rungs)
    except (LaunchError, OSError):
        return None


def rung_texts() -> list[str]:
    """Return what a start on this machine would choose, a text for each kind of kernel; none if there is no choice."""
    from tilerank.kernels.rung_rates import candidates, texts

    rungs = candidates()
    if not rungs:
        return []
    rates = read_rates(rungs)
    return ["not measured yet: the first start of a model does that"] if rates is None else texts(rates)


def known_rates(rungs: Sequence[str], measure: Callable[[Sequence[str]], Rates]) -> Rates:
    """Return the kept rates of `rungs`. If there are none, measure and keep them.

    A start does not fail for want of the file: a warning says what is wrong with it, and that the rates are measured.
    """
    rates: Rates | None = None
    try:
        path = _file(rungs)
        try:
            rates = _read(path, rungs)
        except LaunchError as error:
            log.warning("%s; the rates of the rungs are measured again", error)
            path.unlink(missing_ok=True)
        if rates is None:
            rates = measure(rungs)
            rates = _keep(path, rungs, rates)
            log.info("the rates of the rungs have been measured and are kept in %s", path)
    except (LaunchError, OSError) as error:
        log.warning("the rates of the rungs cannot be kept, so that each start measures them: %s", error)
    return measure(rungs) if rates is None else rates


def _file(rungs: Sequence[str]) -> Path:
    """Return the file for this CPU model with its stepping and microcode, this build of the core and these rungs.

    Raises LaunchError if this user has no cache directory.
    """
    from tilerank.kernels import core

    try:
        directory = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    except RuntimeError as error:
        raise LaunchError("XDG_CACHE_HOME: expected a directory, because this user has no home, found none") from error
    if not directory.is_absolute():
        raise LaunchError(f"XDG_CACHE_HOME: expected an absolute path, found {str(directory)!r}")
    key = json.dumps([cpu_fields(), core.build_digest(), list(rungs)])
    return directory / "tilerank" / f"rungs-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


def cpu_fields(cpuinfo: Path = Path("/proc/cpuinfo")) -> dict[str, str]:
    """Return what identifies the model of the first CPU. Containers and hypervisors may hide some of it."""
    first = cpuinfo.read_text().partition("\n\n")[0]
    fields = (line.partition(":") for line in first.splitlines())
    found = {name.strip(): value.strip() for name, _, value in fields}
    return {name: found[name] for name in _CPU if name in found}


def _read(path: Path, rungs: Sequence[str]) -> Rates | None:
    """Return the rates in the file, or None if there is no file. Raises LaunchError if it is damaged, or OSError."""
    from tilerank.kernels.rung_rates import KINDS, ROUNDS

    try:
        kept = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        raise LaunchError(f"{path}: expected rates of the rungs in JSON, found: {error}") from error
    rates: Rates | None = kept.get("rates") if isinstance(kept, dict) else None
    if (
        not isinstance(rates, dict)
        or tuple(rates) != KINDS
        or any(not isinstance(by_rung, dict) or list(by_rung) != list(rungs) for by_rung in rates.values())
        or not all(_are_rates(rounds, ROUNDS) for by_rung in rates.values() for rounds in by_rung.values())
    ):
        raise LaunchError(
            f"{path}: expected {ROUNDS} rates for each of {', '.join(KINDS)} on {', '.join(rungs)}, found others"
        )
    return rates


def _are_rates(found: Any, count: int) -> bool:
    """Return whether a value of the file is a list of `count` rates."""
    if not isinstance(found, list) or len(found) != count:
        return False
    return all(isinstance(rate, int | float) and rate > 0 and math.isfinite(rate) for rate in found)


def _keep(path: Path, rungs: Sequence[str], rates: Rates) -> Rates:
    """Write the file and return `rates`, or what another process has written first. Readers see whole files only."""
    path.parent.mkdir(parents=True, exist_ok=True)
    own = {kind: {rung: list(rounds) for rung, rounds in by_rung.items()} for kind, by_rung in rates.items()}
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        written = Path(scratch, path.name)
        # The CPU is for people who read the file; its name stands for the CPU already.
        written.write_text(json.dumps({"cpu": cpu_fields(), "rates": own}, indent=2))
        try:
            os.link(written, path)
        except FileExistsError:
            return _read(path, rungs) or rates
    return rates
