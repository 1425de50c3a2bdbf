"""Which model is run, and how it is loaded: the options that commands share, and what they say. Imports no torch."""

import argparse
from pathlib import Path

from tilerank.loader.card import ModelCard, read_card
from tilerank.loader.errors import ConfigError
from tilerank.runtime.protocol.prompt import MM_CACHE_BYTES

from ..errors import LaunchError
from . import family_options, quantize
from .arguments import whole_number
from .hub import add_model_argument

DEFAULT_FRACTION = 0.8
"""Of a node's memory: see --mem-fraction-static."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of commands that run a model."""
    add_model_argument(parser, nargs="?")
    parser.add_argument("--model-path", type=Path, metavar="MODEL", help="the same as an option")
    model = parser.add_argument_group("model")
    _add_format_arguments(model, "auto: the checkpoint's")
    _add_cut_arguments(model, "heads that do not divide: padded, split unevenly, or whichever reads fewer bytes")
    model.add_argument(
        "--context-length", "--max-model-len", type=whole_number(2), metavar="N", help="tokens of a request"
    )
    _add_cache_arguments(model)


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Add those of `tilerank plan`, which can plan for a cache of no tokens."""
    _add_cut_arguments(
        parser, "how heads are cut: padded to equal shapes, split unevenly, or auto: whichever reads less"
    )
    _add_format_arguments(parser, "of the weights")
    _add_cache_arguments(parser, "--cached-tokens", low=0)


def _add_format_arguments(parser: argparse._ActionsContainer, dtype: str) -> None:
    parser.add_argument("--dtype", choices=("auto", "bfloat16", "float32"), default="auto", help=dtype)
    quantize.add_arguments(parser)
    family_options.add_arguments(parser)


def _add_cut_arguments(parser: argparse._ActionsContainer, strategy: str) -> None:
    parser.add_argument("--strategy", choices=("auto", "pad", "split"), default="auto", help=strategy)
    parser.add_argument(
        "--kv-split",
        choices=("auto", "on", "off"),
        default="auto",
        help="latent attention (DeepSeek): every rank reads a part of a context for the heads of all, or if it pays",
    )


def _add_cache_arguments(parser: argparse._ActionsContainer, *option: str, low: int = 1) -> None:
    """Add the options of the cache's size. option: further names of --max-total-tokens; low: its minimum."""
    parser.add_argument(
        "--mem-fraction-static",
        type=_fraction,
        default=DEFAULT_FRACTION,
        metavar="F",
        help="share of each node's memory, and of the control group's limit, that weights, KV cache, states and "
        f"encoded media may take together (default: {DEFAULT_FRACTION})",
    )
    parser.add_argument(
        "--max-total-tokens",
        *option,
        type=whole_number(low),
        metavar="N",
        help="tokens in the KV cache, of all requests together (default: as many as there is room for)",
    )
    parser.add_argument(
        "--mm-cache-gib",
        type=_gib,
        default=MM_CACHE_BYTES / (1 << 30),
        metavar="GIB",
        help="memory for encoded pictures and videos on each rank of a model that takes them, half of it for keys "
        "and values in models with cross-attention; those of one request "
        f"must fit (default: {MM_CACHE_BYTES >> 30})",
    )


def _gib(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1 << 20:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of GiB; expected 0 or more")
    return value


def _fraction(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share of the memory; expected above 0, at most 1")
    return value


def model_directory(args: argparse.Namespace) -> Path:
    """MODEL or --model-path. LaunchError unless exactly one is given."""
    given = [path for path in (args.model, args.model_path) if path is not None]
    if not given:
        rest = " --prompt TEXT" if args.command == "generate" else ""
        raise LaunchError(f"no model given: tilerank {args.command} MODEL{rest}")
    if len(set(given)) > 1:
        raise LaunchError(f"two models given: {given[0]} and --model-path {given[1]}")
    return Path(given[0])


def checked_card(args: argparse.Namespace, model_dir: Path) -> ModelCard:
    """Return the model's card. ConfigError or LaunchError for options that do not agree with it."""
    card = _read_card(model_dir)
    quantize.check(args, card)
    family_options.check(args, card)
    context_length(args, card)
    return card


def _read_card(model_dir: Path) -> ModelCard:
    """Return the model's card. torch is imported only to find out whether a card that is wrong is of a known family,
    since a family that is unknown is named before the fields that it spells otherwise."""
    try:
        return read_card(model_dir)
    except ConfigError:
        from tilerank.runtime.rank.registry import read_supported_card

        return read_supported_card(model_dir)


def context_length(args: argparse.Namespace, card: ModelCard) -> int:
    """Tokens of a prompt and its answer together. LaunchError for more than the model's positions."""
    longest = card.context_length
    if args.context_length is not None and args.context_length > longest:
        raise LaunchError(
            f"--context-length {args.context_length} is more than the model's max_position_embeddings {longest}"
        )
    return args.context_length or longest


def mm_cache_bytes(args: argparse.Namespace) -> int:
    """Return the bytes that encoded media may take on each rank."""
    return int(args.mm_cache_gib * (1 << 30))
