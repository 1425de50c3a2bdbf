"""`tilerank bench quality`: how well a model predicts a text in each format of weights and cache, against its fp32."""

from __future__ import annotations

import argparse
import math
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tilerank.loader.card import ModelCard, read_card
from tilerank.loader.quantization_config import INT4_GROUPS

from ..errors import LaunchError
from ..options.arguments import whole_number, whole_numbers
from ..options.hub import add_model_argument
from ..options.model import CODES
from ..text import size
from .harness import Column, Row, add_json_argument, check_json_argument, header, line, write_json
from .rank_job import (
    EngineJob,
    add_engine_arguments,
    add_rank_arguments,
    is_rank,
    run_as_rank,
    run_ranks,
)
from .scoring.text import DEFAULT_TEXT, Text, read_text, read_token_file

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tilerank.runtime.lead.engine import Engine

    from ..host.placement import Placement
    from .rank_job import RankMemory

DEFAULT_WINDOW = 1024
INT8_CACHE = "+int8-kv"
WIDE_ACTIVATIONS = "+a16"
BASELINE = "float32"
STORED = "stored"


def _int4_options(group: int, zero_points: str) -> list[str]:
    return ["--dtype", "bfloat16", "--quantization", "int4", "--quantization-group", f"{group}", zero_points]


FORMAT_OPTIONS = {
    STORED: [],
    "bfloat16": ["--dtype", "bfloat16"],
    BASELINE: ["--dtype", "float32"],
    **{codes: ["--dtype", "bfloat16", "--quantization", codes] for codes in CODES},
    **{f"int4-{group}": _int4_options(group, "--no-quantization-zero-points") for group in INT4_GROUPS},
    **{f"int4-{group}z": _int4_options(group, "--quantization-zero-points") for group in INT4_GROUPS},
}
FORMAT_OPTIONS |= {
    name + WIDE_ACTIVATIONS: [*options, "--activation-bits", "16"]
    for name, options in FORMAT_OPTIONS.items()
    if name.startswith(("int4", "mxfp4")) or name == STORED
}
FORMAT_OPTIONS |= {
    name + INT8_CACHE: [*options, "--kv-cache-dtype", "int8"] for name, options in FORMAT_OPTIONS.items()
}
"""The command line options of ranks for each name in --formats. int4-64z: in groups of 64 with zero points.
+a16: with activations of 16 bits."""

_INT4 = [f"int4-{group}{zeros}" for group in INT4_GROUPS for zeros in ("", "z")]
DEFAULT_FORMATS = ["bfloat16", f"bfloat16{INT8_CACHE}", "int8", "fp8", *_INT4]
DEFAULT_STORED = [STORED, f"{STORED}{INT8_CACHE}"]
"""The formats of a checkpoint that is quantised already."""

COLUMNS = [
    Column("format", 20, lambda row: row["format"]),
    Column("ranks", -6, lambda row: str(row["tp"])),
    Column("bits/weight", -13, lambda row: f"{row['bits_per_weight']:.2f}"),
    Column("perplexity", -13, lambda row: f"{row['perplexity']:.4f}"),
    Column("of fp32", -11, lambda row: _or_dash(row["perplexity_increase"], "{:+.2%}")),
    Column("mean KL", -11, lambda row: _or_dash(row["mean_kl"], "{:.5f}")),
    Column("same top-1", -12, lambda row: _or_dash(row["same_top_1"], "{:.2%}")),
    Column("load s", -9, lambda row: f"{row['load_s']:.1f}"),
    Column("score s", -9, lambda row: f"{row['score_s']:.1f}"),
]


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--text", type=Path, metavar="FILE", help="the text to predict, in UTF-8 (default: prose and code of tilerank)"
    )
    source.add_argument(
        "--tokens", type=Path, metavar="FILE", help='JSON with "sequences", lists of token ids, each a window'
    )
    parser.add_argument(
        "--window",
        type=whole_number(2),
        default=DEFAULT_WINDOW,
        metavar="N",
        help=f"tokens that --text is cut into; each window is predicted by itself (default: {DEFAULT_WINDOW})",
    )
    parser.add_argument("--limit", type=whole_number(1), metavar="N", help="only the first N windows")
    parser.add_argument(
        "--formats",
        type=_formats,
        metavar="NAME,NAME",
        help=f"names from {', '.join(FORMAT_OPTIONS)} (default: {','.join(DEFAULT_FORMATS)}, or "
        f"{','.join(DEFAULT_STORED)} for a quantised checkpoint)",
    )
    parser.add_argument(
        "--ranks", type=whole_numbers(1), default=[1], metavar="N,N", help="numbers of ranks (default: 1)"
    )
    parser.add_argument(
        "--baseline",
        type=Path,
        metavar="MODEL_DIR",
        help="the model whose fp32 run is the baseline (default: MODEL; none for a quantised checkpoint)",
    )
    add_engine_arguments(parser)
    add_json_argument(parser)
    add_rank_arguments(parser)
    # Of ranks: the file of the baseline's log-probabilities, and whether this run writes it instead of reading it.
    parser.add_argument("--baseline-file", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--writes-baseline", action="store_true", help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    if is_rank(args):
        if args.quantization not in ("int4", "fp8"):  # --calibration is for those of --formats that have a use for it
            args.calibration = None
        text = _read(args)
        if args.writes_baseline:
            args.model = args.baseline or args.model
        longest = max(map(len, text.windows))
        job = EngineJob(args, total_tokens=longest + 32, measure=lambda *context: _measure(args, text, *context))
        return run_as_rank(args, job)
    check_json_argument(args)
    if args.dtype != "auto" or args.quantization is not None or args.tp is not None:
        raise LaunchError(
            "bench quality takes lists: --formats and --ranks instead of --dtype, --quantization and --tp"
        )
    if args.kv_cache_dtype != "auto":
        raise LaunchError(f"bench quality takes lists: --formats bfloat16{INT8_CACHE} instead of --kv-cache-dtype")
    text, card = _read(args), read_card(args.model)
    print(f"{args.model.name}: {text.describe()}")
    with tempfile.TemporaryDirectory(prefix="tilerank-quality-") as scratch:
        write_json(args, _Comparison(args, text, card, Path(scratch) / "baseline").rows())
    return 0


def _read(args: argparse.Namespace) -> Text:
    card = read_card(args.model)
    if args.tokens is not None:
        return read_token_file(args.tokens, card, args.limit)
    return read_text(args.text or DEFAULT_TEXT, card, args.model, args.window, args.limit)


@dataclass(frozen=True)
class _Comparison:
    """All runs of one command. file: where the run in fp32 leaves its log-probabilities for the others."""

    args: argparse.Namespace
    text: Text
    card: ModelCard
    file: Path

    def rows(self) -> list[Row]:
        """Run every format with every number of ranks, print a line for each, and return the JSON rows."""
        args, rows = self.args, []
        has_baseline = args.baseline is not None or self.card.quantization is None
        formats = args.formats or (DEFAULT_FORMATS if self.card.quantization is None else DEFAULT_STORED)
        runs = [(name, ranks) for name in formats for ranks in args.ranks]
        print(header(COLUMNS))
        if has_baseline:
            self._check_baseline()
            rows.append(self._run(BASELINE, args.ranks[0], ["--writes-baseline"], None))
            if args.baseline is None:
                runs = [run for run in runs if run != (BASELINE, args.ranks[0])]
        for name, ranks in runs:
            rows.append(self._run(name, ranks, [], rows[0]["perplexity"] if has_baseline else None))
        return rows

    def _run(self, name: str, ranks: int, options: Sequence[str], baseline: float | None) -> Row:
        args = self.args
        given = [*args.argv, *FORMAT_OPTIONS[name], *options, "--log-level", "warning"]
        if options or baseline is not None:
            given += ["--baseline-file", str(self.file)]
        found = run_ranks(args, given, ranks)
        model = args.baseline if options and args.baseline is not None else args.model
        row = row_of(name, ranks, found, baseline) | {"model": model.name, "text": self.text.name}
        print(line(COLUMNS, row), flush=True)
        return row

    def _check_baseline(self) -> None:
        """Raise LaunchError if the baseline has another vocabulary, or its log-probabilities do not fit the disk."""
        args = self.args
        if args.baseline is not None:
            vocab = read_card(args.baseline).vocab_size
            if vocab != self.card.vocab_size:
                raise LaunchError(f"--baseline: expected a vocabulary of {self.card.vocab_size}, found {vocab}")
        need, free = 4 * self.text.counted * self.card.vocab_size, shutil.disk_usage(self.file.parent).free
        if need > free:
            raise LaunchError(
                f"bench quality: the log-probabilities of the baseline take {size(need)}, but {self.file.parent} has "
                f"{size(free)} free; TMPDIR names another place, --limit takes fewer windows"
            )


def row_of(name: str, ranks: int, found: Row, baseline: float | None) -> Row:
    """Return a JSON row. found: sums over the counted tokens, from the ranks. baseline: the perplexity in fp32."""
    tokens = found["tokens"]
    value = math.exp(found["loss"] / tokens)
    compared = baseline is not None
    return {
        "format": name,
        "tp": ranks,
        "isa": found["isa"],
        "tokens": tokens,
        "bits_per_weight": found["bits_per_weight"],
        "perplexity": value,
        "perplexity_increase": value / baseline - 1 if baseline is not None else None,
        "mean_kl": found["kl"] / tokens if compared else None,
        "same_top_1": found["same_top_1"] / tokens if compared else None,
        "load_s": found["load_s"],
        "score_s": found["score_s"],
    }


def _measure(args: argparse.Namespace, text: Text, engine: Engine, _: Placement, ranks: list[RankMemory]) -> Row:
    """Predict the text and return sums over the counted tokens. Runs on rank 0."""
    from tilerank.kernels import core

    from .scoring.likelihood import Likelihood

    likelihood = Likelihood(args.baseline_file, writes=args.writes_baseline)
    with likelihood:
        for window in text.windows:
            likelihood.add(engine, window)
    return {
        **likelihood.sums(),
        "isa": core.isa_text(),
        "bits_per_weight": 8 * sum(rank.weight_bytes for rank in ranks) / engine.worker.parameters,
        "load_s": engine.worker.load_report.seconds,
    }


def _formats(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in FORMAT_OPTIONS]:
        raise argparse.ArgumentTypeError(f"expected some of {', '.join(FORMAT_OPTIONS)}, found {unknown[0]!r}")
    return names
