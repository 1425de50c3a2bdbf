"""`tilerank bench quality`: perplexity on given texts, for each dtype, quantisation and number of ranks."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from tilerank.loader.card import read_card
from tilerank.loader.quantization_config import INT4_GROUPS

from ..errors import LaunchError
from ..options.arguments import whole_number
from ..options.hub import add_model_argument
from ..options.model import CODES
from .harness import Column, Row, add_json_argument, check_json_argument, header, line, write_json
from .rank_job import (
    EngineJob,
    add_engine_arguments,
    add_rank_arguments,
    is_rank,
    run_as_rank,
    run_ranks,
    whole_numbers,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from tilerank.runtime.lead.engine import Engine


INT8_CACHE = "+int8-kv"

DTYPE_OPTIONS = {
    "bfloat16": ["--dtype", "bfloat16"],
    "float32": ["--dtype", "float32"],
    **{codes: ["--dtype", "bfloat16", "--quantization", codes] for codes in CODES},
    **{
        f"int4-{group}": ["--dtype", "bfloat16", "--quantization", "int4", "--quantization-group", f"{group}"]
        for group in INT4_GROUPS
    },
}
DTYPE_OPTIONS |= {name + INT8_CACHE: [*options, "--kv-cache-dtype", "int8"] for name, options in DTYPE_OPTIONS.items()}
"""The command line options of ranks for each name in --dtypes."""

_INT4 = [f"int4-{group}" for group in INT4_GROUPS]
_DEFAULT = ["bfloat16", f"bfloat16{INT8_CACHE}", "float32", "int8", f"int8{INT8_CACHE}", "fp8", *_INT4]


COLUMNS = [
    Column("dtype", 16, lambda row: row["dtype"]),
    Column("ranks", -6, lambda row: str(row["tp"])),
    Column("perplexity", -13, lambda row: f"{row['perplexity']:.4f}"),
    Column("of reference", -14, lambda row: "-" if row["reference_ratio"] is None else f"{row['reference_ratio']:.5f}"),
    Column("of first", -10, lambda row: f"{row['first_ratio']:.5f}"),
]


class EvalTokens(msgspec.Struct):
    """The contents of a --tokens file: texts as token ids, and their perplexities from another implementation."""

    sequences: list[list[int]]
    about: str = ""
    fp32_perplexity: float | None = None
    bf16_perplexity: float | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    parser.add_argument(
        "--tokens",
        type=Path,
        metavar="FILE",
        help='JSON with "sequences", lists of token ids (default: MODEL_DIR/eval_tokens.json)',
    )
    parser.add_argument("--limit", type=whole_number(1), metavar="N", help="score only the first N sequences")
    parser.add_argument(
        "--dtypes",
        type=_dtypes,
        default=_DEFAULT,
        metavar="NAME,NAME",
        help=f"names from {', '.join(DTYPE_OPTIONS)} (default: {','.join(_DEFAULT)})",
    )
    parser.add_argument(
        "--ranks", type=whole_numbers(1), default=[1, 2], metavar="N,N", help="numbers of ranks (default: 1,2)"
    )
    add_engine_arguments(parser)
    add_json_argument(parser)
    add_rank_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if is_rank(args):
        texts = read_tokens(args)
        longest = max(map(len, texts.sequences))
        job = EngineJob(args, total_tokens=longest + 32, measure=lambda *context: _measure(texts.sequences, *context))
        return run_as_rank(args, job)
    check_json_argument(args)
    if args.dtype != "auto" or args.quantization is not None or args.tp is not None:
        raise LaunchError("bench quality takes lists: --dtypes and --ranks instead of --dtype, --quantization and --tp")
    if args.kv_cache_dtype != "auto":
        raise LaunchError(f"bench quality takes lists: --dtypes bfloat16{INT8_CACHE} instead of --kv-cache-dtype")
    texts = read_tokens(args)
    rows: list[Row] = []
    print(header(COLUMNS))
    for dtype in args.dtypes:
        for ranks in args.ranks:
            argv = [*args.argv, *DTYPE_OPTIONS[dtype], "--log-level", "warning"]
            found = run_ranks(args, argv, ranks)
            expected = texts.fp32_perplexity if dtype == "float32" else texts.bf16_perplexity
            if args.limit is not None:
                expected = None  # the file has the perplexity of all sequences
            rows.append(row_of(dtype, ranks, found, expected, rows[0]["perplexity"] if rows else None))
            print(line(COLUMNS, rows[-1]), flush=True)
    write_json(args, rows)
    return 0


def row_of(dtype: str, ranks: int, found: Row, expected: float | None, first: float | None) -> Row:
    """Return a JSON row. found: the sum of losses and the number of tokens, from the ranks.

    reference_ratio: perplexity / expected, the file's. first_ratio: perplexity / first, the first row's.
    """
    value = math.exp(found["loss"] / found["tokens"])
    return {
        "dtype": dtype,
        "tp": ranks,
        "isa": found["isa"],
        "tokens": found["tokens"],
        "perplexity": value,
        "reference_perplexity": expected,
        "reference_ratio": None if expected is None else value / expected,
        "first_ratio": value / (value if first is None else first),
    }


def read_tokens(args: argparse.Namespace) -> EvalTokens:
    """Read and check the --tokens file.

    LaunchError unless each sequence has two tokens or more, fits the context, and has only ids of the vocabulary.
    """
    card = read_card(args.model)
    path: Path = args.tokens or args.model / "eval_tokens.json"
    try:
        texts = msgspec.json.decode(path.read_bytes(), type=EvalTokens)
    except OSError as e:
        raise LaunchError(f"{path} cannot be read: {e.strerror}; expected a JSON file with token ids") from e
    except msgspec.DecodeError as e:
        raise LaunchError(f"{path}: {e}") from e
    if args.limit is not None:
        texts.sequences = texts.sequences[: args.limit]
    if not texts.sequences:
        raise LaunchError(f"{path}: sequences: expected at least one, found none")
    for index, ids in enumerate(texts.sequences):
        if not 2 <= len(ids) <= card.context_length:
            raise LaunchError(f"{path}: sequence {index}: expected 2 to {card.context_length} tokens, found {len(ids)}")
        if wrong := [id for id in ids if not 0 <= id < card.vocab_size]:
            raise LaunchError(
                f"{path}: sequence {index}: expected token ids from 0 to {card.vocab_size - 1}, found {wrong[0]}"
            )
    return texts


def _measure(sequences: Sequence[list[int]], engine: Engine, *_: object) -> Row:
    from tilerank.kernels import core
    from tilerank.runtime.protocol.prompt import Prompt

    loss = sum(negative_log_likelihood(engine.score(Prompt(ids)), ids) for ids in sequences)
    return {"loss": loss, "tokens": sum(len(ids) - 1 for ids in sequences), "isa": core.isa()}


def negative_log_likelihood(logits: Tensor, ids: Sequence[int]) -> float:
    """Return -sum(log p(ids[i] | ids[:i]) for i >= 1), summed in fp64. logits: [len(ids), vocab]."""
    import torch

    log_probs = torch.log_softmax(logits[:-1].double(), dim=-1)
    return -float(log_probs.gather(1, torch.tensor(ids[1:]).unsqueeze(1)).sum())


def _dtypes(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in DTYPE_OPTIONS]:
        raise argparse.ArgumentTypeError(f"expected some of {', '.join(DTYPE_OPTIONS)}, found {unknown[0]!r}")
    return names
