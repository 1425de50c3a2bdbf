"""Compares what `tilerank plan --machine` predicts with what `tilerank bench model` measures, on this machine.

Six models of a few layers, three formats, TP 1 and 2, batches of 1 and 16, the median of three runs. The machine's file
is that of `tilerank doctor --machine`. Prints a table, and how many figures are within 15 %.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MODELS = {
    "qwen3-0.6b": ("--layers", "8"),
    "llama-3.2-3b": ("--layers", "3"),
    "gemma-3-1b": ("--layers", "6"),
    "qwen3-vl-2b": ("--layers", "4", "--vision-layers", "1"),
    "qwen3.5-2b": ("--layers", "4"),
    "qwen3-30b-a3b": ("--layers", "2", "--experts", "32"),
}
FORMATS = {"bfloat16": (), "int8": ("--quantization", "int8"), "int4": ("--quantization", "int4")}
BATCHES, PROMPT_TOKENS, NEW_TOKENS, REPEATS = (1, 16), 256, 16, 3
TOLERANCE = 0.15


@dataclass(frozen=True)
class Figure:
    """What was predicted and measured: seconds to the first token, or of a decode step."""

    what: str
    predicted_s: float
    measured_s: float

    @property
    def error(self) -> float:
        """The prediction over the measurement, less 1."""
        return self.predicted_s / self.measured_s - 1


def tilerank(*words: object) -> str:
    """Run tilerank and return what it prints. Ends this program with its error if it fails."""
    done = subprocess.run([sys.executable, "-m", "tilerank", *map(str, words)], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(done.stderr.strip() or f"tilerank {words[0]} failed")
    return done.stdout


def compare(model: Path, tp: int, options: Sequence[str], machine: Path) -> list[Figure]:
    """Return the figures of a model in one format on `tp` ranks."""
    lengths = ("--prompt-tokens", PROMPT_TOKENS, "--batch", ",".join(map(str, BATCHES)))
    common = (model, "--tp", tp, *options, *lengths)
    report = json.loads(tilerank("plan", *common, "--machine", machine, "--json"))
    runs = ("--new-tokens", NEW_TOKENS, "--repeat", REPEATS)
    measured = json.loads(tilerank("bench", "model", *common, *runs, "--json"))
    figures = []
    for case in report["prediction"]["cases"]:
        first, step = (_measured(measured, phase, case["batch"]) for phase in ("prefill", "decode"))
        figures.append(Figure(f"first token of {case['batch']}", case["first_s"], first["ttft_s"]))
        figures.append(Figure(f"step of {case['batch']}", case["step_s"], step["tpot_s"]))
    return figures


def _measured(rows: Sequence[dict[str, Any]], phase: str, batch: int) -> dict[str, Any]:
    return next(row for row in rows if row["phase"] == phase and row["batch"] == batch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--machine", type=Path, required=True, metavar="FILE.yaml", help="of `doctor --machine`")
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS), metavar="NAME")
    args = parser.parse_args()
    figures = []
    with tempfile.TemporaryDirectory(prefix="tilerank-prediction-") as scratch:
        print(f"{'model':<15}{'format':<10}{'tp':>3}  {'figure':<18}{'predicted':>12}{'measured':>12}{'error':>9}")
        for name in args.models:
            model = Path(scratch, name)
            tilerank("bench", "make-model", model, "--like", name, *MODELS[name])
            for format, options in FORMATS.items():
                for tp in (1, 2):
                    for figure in compare(model, tp, options, args.machine):
                        figures.append(figure)
                        times = f"{1e3 * figure.predicted_s:>9.1f} ms{1e3 * figure.measured_s:>9.1f} ms"
                        print(
                            f"{name:<15}{format:<10}{tp:>3}  {figure.what:<18}{times}{figure.error:>+9.1%}", flush=True
                        )
    within = sum(abs(figure.error) <= TOLERANCE for figure in figures)
    print(f"{within} of {len(figures)} within {TOLERANCE:.0%}")


if __name__ == "__main__":
    main()
