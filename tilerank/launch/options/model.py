"""Which model is run, and how it is loaded: the options that commands share, and what they say. Imports no torch."""

import argparse
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from tilerank.loader.card import ModelCard, read_card
from tilerank.loader.errors import ConfigError
from tilerank.loader.pooling import DOES
from tilerank.loader.quantization_config import (
    ACTIVATION_BITS,
    DEFAULT_ACTIVATION_BITS,
    DEFAULT_INT4_GROUP,
    DEFAULT_INT4_ZERO_POINTS,
    INT4_GROUPS,
    ActivationBits,
    Quantization,
    check_agreement,
)
from tilerank.runtime.media.family import FamilyOptions
from tilerank.runtime.media.registry import all_options, with_options
from tilerank.runtime.protocol.prompt import MM_CACHE_BYTES
from tilerank.runtime.protocol.speculative import Speculative

from ..errors import LaunchError
from .arguments import real_number, whole_number
from .hub import add_model_argument

if TYPE_CHECKING:
    import torch

    from tilerank.parallel.shard import Strategy
    from tilerank.parallel.sharding import KVSplit
    from tilerank.runtime.rank.rank_config import RankConfig

DTYPES = ("auto", "bfloat16", "float32")
CODES = ("int8", "int4", "fp8", "mxfp4")
KV_DTYPES = ("auto", "bfloat16", "bf16", "int8")
AskedDrafts = Literal["auto", Speculative]
KV_SPLIT_HELP = "latent attention (DeepSeek): every rank reads a part of a context for the heads of all, or if it pays"
DEFAULT_FRACTION = 0.8
"""The share of a node's memory that ranks may use by default (--mem-fraction-static)."""


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The formats, the cut and the caches with which the command line asks to load a model.

    dtype, kv_cache_dtype: as on the command line. quantization: of projections while they are loaded. activation_bits:
    of the activations that int4 weights are multiplied with. context_length:
    tokens of a request (default: the model's). cached_tokens: size of the KV cache (default: what `mem_fraction` of the
    memory leaves room for). mm_cache_bytes: what encoded media may take on each rank, if the model takes any. family:
    the options of its family. speculative: which drafts are made. draft_model: the model that makes them, if one does.
    gives_pages: whether the ranks give pages of prompts to others, through a memory as large as the cache.
    """

    dtype: str = "auto"
    quantization: Quantization | None = None
    activation_bits: ActivationBits = DEFAULT_ACTIVATION_BITS
    kv_cache_dtype: str = "auto"
    strategy: "Strategy" = "auto"
    kv_split: "KVSplit" = "auto"
    context_length: int | None = None
    cached_tokens: int | None = None
    mem_fraction: float = DEFAULT_FRACTION
    mm_cache_bytes: int = 0
    family: FamilyOptions = field(default_factory=dict)
    speculative: AskedDrafts = "off"
    draft_model: Path | None = None
    gives_pages: bool = False

    def torch_dtype(self, card: ModelCard) -> "torch.dtype":
        """Return the dtype of activations and unquantised weights.

        "auto": float32 if the checkpoint is, else bfloat16, which float16 is converted to; bfloat16 with quantised
        weights.
        """
        import torch

        if self.dtype == "auto":
            floats = self.quantization is None and card.quantization is None
            return torch.float32 if floats and card.dtype == "float32" else torch.bfloat16
        return {"bfloat16": torch.bfloat16, "float32": torch.float32}[self.dtype]

    def torch_kv_dtype(self, card: ModelCard) -> "torch.dtype":
        """Return the dtype of the KV cache. Raises LaunchError if no kernel combines it with the activations."""
        import torch

        name, dtype = self.kv_cache_dtype, self.torch_dtype(card)
        if name == "int8":
            return torch.int8
        if name != "auto" and dtype != torch.bfloat16:
            raise LaunchError(
                f"--kv-cache-dtype {name} needs --dtype bfloat16, found {str(dtype).removeprefix('torch.')}; "
                "the cache has the dtype of the activations, or int8"
            )
        return dtype

    def drafts(self, card: ModelCard) -> Speculative:
        """Return which drafts are made. Raises LaunchError if some are asked for of a model that generates no text."""
        if card.pooling is None:
            return "ngram" if self.speculative == "auto" else self.speculative
        if self.speculative in ("auto", "off"):
            return "off"
        raise LaunchError(
            f"--speculative {self.speculative}: expected a model that generates text, found one that "
            f"{DOES[card.pooling.task]}"
        )

    def rank_config(self, card: ModelCard, max_total_tokens: int) -> "RankConfig":
        """Return what every rank is configured with. max_total_tokens: tokens in the KV cache."""
        from tilerank.runtime.rank.rank_config import RankConfig
        from tilerank.runtime.step.cache import expected_tokens

        return RankConfig(
            dtype=self.torch_dtype(card),
            quantization=self.quantization,
            activation_bits=self.activation_bits,
            kv_dtype=self.torch_kv_dtype(card),
            strategy=self.strategy,
            kv_split=self.kv_split,
            context_length=self.context_length,
            max_total_tokens=max_total_tokens,
            cached_tokens=self.cached_tokens or expected_tokens(self.context_length or card.context_length),
            source_bytes=self.mm_cache_bytes // 2,
            family_options=self.family,
            speculative=self.drafts(with_options(card, self.family)),
            draft_model=self.draft_model,
        )


def model_options(args: argparse.Namespace) -> ModelOptions:
    """Return what the options of `add_arguments`, or of `add_plan_arguments`, say. Raises LaunchError for
    options of a quantisation that is not asked for, and for a draft model without drafts of a model or the reverse."""
    for name in ("group", "zero_points"):
        if getattr(args, f"quantization_{name}") is not None and args.quantization != "int4":
            raise LaunchError(f"--quantization-{name.replace('_', '-')} needs --quantization int4")
    if args.calibration is not None and args.quantization not in ("int4", "fp8"):
        raise LaunchError("--calibration needs --quantization int4 or fp8")
    quantization = None
    if args.quantization is not None:
        quantization = Quantization(
            args.quantization, args.quantization_group, args.quantization_zero_points, args.calibration
        )
    given = {option.name: getattr(args, option.name.strip("-").replace("-", "_")) for option in all_options()}
    return ModelOptions(
        dtype=args.dtype,
        quantization=quantization,
        activation_bits=args.activation_bits,
        kv_cache_dtype=args.kv_cache_dtype,
        strategy=args.strategy,
        kv_split=args.kv_split,
        context_length=args.context_length,
        cached_tokens=args.max_total_tokens,
        mem_fraction=args.mem_fraction_static,
        mm_cache_bytes=int(args.mm_cache_gib * (1 << 30)),
        family={name: value for name, value in given.items() if value is not None},
        speculative=_speculative(args),
        draft_model=args.draft_model,
    )


def _speculative(args: argparse.Namespace) -> AskedDrafts:
    """Return which drafts are asked for."""
    asked: AskedDrafts | None = args.speculative
    if args.draft_model is None and asked == "draft":
        raise LaunchError("--speculative draft needs --draft-model MODEL, found none")
    if args.draft_model is not None and asked not in (None, "draft"):
        raise LaunchError(f"--draft-model {args.draft_model} needs --speculative draft, found {asked}")
    return asked or ("auto" if args.draft_model is None else "draft")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of commands that run a model."""
    add_model_argument(parser, nargs="?")
    parser.add_argument("--model-path", type=Path, metavar="MODEL", help="the same as an option")
    model = parser.add_argument_group("model")
    model.add_argument(
        "--tokenizer",
        type=Path,
        metavar="DIR",
        help="a directory or an id on the hub, whose tokenizer and chat template take the place of the model's",
    )
    model.add_argument(
        "--weight-cache",
        type=Path,
        metavar="DIR",
        help="keep each rank's packed weights in DIR, where the next start with the same model and options reads them",
    )
    add_format_arguments(model, "auto: the checkpoint's")
    add_cut_arguments(model, "heads that do not divide: padded, split unevenly, or whichever reads fewer bytes")
    _add_cache_arguments(model)
    add_draft_argument(model)


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Add those of `tilerank plan`, which can plan for a cache of no tokens."""
    add_cut_arguments(
        parser, "how heads are cut: padded to equal shapes, split unevenly, or auto: whichever reads less"
    )
    add_format_arguments(parser, "of the weights")
    _add_cache_arguments(parser, "--cached-tokens", low=0)
    add_draft_argument(parser)


def add_draft_argument(parser: argparse._ActionsContainer) -> None:
    """Add --speculative and --draft-model."""
    parser.add_argument(
        "--speculative",
        choices=get_args(AskedDrafts),
        default=None,  # also where `set_default_sizes` has set another
        help="draft tokens that are then checked together, which changes no text: ngram: those that followed the same "
        "tokens before; mtp: those of the multi-token-prediction head of the checkpoint, which is loaded for it; "
        "draft: those of --draft-model; auto: ngram, and off if the model generates no text "
        "(default: auto, or draft with --draft-model)",
    )
    parser.add_argument(
        "--draft-model",
        type=Path,
        metavar="MODEL",
        help="a small model with the same vocabulary that drafts: a directory, a GGUF file, or an id on the hub",
    )


def gib(text: str) -> float:
    """Parse a number of GiB."""
    return real_number(lambda value: 0 <= value <= 1 << 20, "a number of GiB; expected 0 or more")(text)


def set_default_sizes(parser: argparse.ArgumentParser) -> None:
    """Set the sizes that `model_options` reads, and no drafts, for commands without options for them."""
    parser.set_defaults(
        context_length=None,
        max_total_tokens=None,
        mem_fraction_static=DEFAULT_FRACTION,
        mm_cache_gib=MM_CACHE_BYTES / (1 << 30),
        speculative="off",
        draft_model=None,
    )


def add_format_arguments(parser: argparse._ActionsContainer, dtype: str) -> None:
    """Add the options of the formats of weights and cache, and those of families. dtype: the help of --dtype."""
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help=dtype)
    parser.add_argument(
        "--quantization",
        choices=CODES,
        help="quantise the weights of projections while loading (default: as stored in the checkpoint)",
    )
    parser.add_argument(
        "--quantization-group",
        type=int,
        choices=INT4_GROUPS,
        metavar="N",
        help=f"int4: columns that share a scale, {', '.join(map(str, INT4_GROUPS))} (default: {DEFAULT_INT4_GROUP})",
    )
    parser.add_argument(
        "--quantization-zero-points",
        action=argparse.BooleanOptionalAction,
        help="int4: columns that share a scale share a code for 0 as well, instead of the middle of the codes "
        f"(default: {'yes' if DEFAULT_INT4_ZERO_POINTS else 'no'})",
    )
    parser.add_argument(
        "--calibration",
        type=Path,
        metavar="FILE",
        help="int4, fp8: weigh errors by the inputs that they meet, which `tilerank calibrate` wrote into FILE",
    )
    parser.add_argument(
        "--activation-bits",
        type=int,
        choices=ACTIVATION_BITS,
        default=DEFAULT_ACTIVATION_BITS,
        help="int4 and mxfp4, also of a checkpoint, and GGUF: bits of the activations that weights are multiplied "
        f"with: 8, rounded in groups, or 16, bfloat16 as they are (default: {DEFAULT_ACTIVATION_BITS})",
    )
    parser.add_argument(
        "--kv-cache-dtype",
        choices=KV_DTYPES,
        default="auto",
        help="dtype of cached keys and values; int8 has one scale per token and head (auto: that of the activations)",
    )
    for option in all_options():
        if option.choices:
            parser.add_argument(option.name, choices=option.choices, help=option.help)
        else:
            parser.add_argument(option.name, action="store_const", const="on", help=option.help)


def add_cut_arguments(parser: argparse._ActionsContainer, strategy: str, kv_split: str = KV_SPLIT_HELP) -> None:
    """Add the options of how a model is cut. strategy, kv_split: their help."""
    parser.add_argument("--strategy", choices=("auto", "pad", "split"), default="auto", help=strategy)
    parser.add_argument("--kv-split", choices=("auto", "on", "off"), default="auto", help=kv_split)


def _add_cache_arguments(parser: argparse._ActionsContainer, *option: str, low: int = 1) -> None:
    """Add the options of the cache's size. option: further names of --max-total-tokens; low: its minimum."""
    parser.add_argument(
        "--context-length", "--max-model-len", type=whole_number(2), metavar="N", help="tokens of a request"
    )
    parser.add_argument(
        "--mem-fraction-static",
        type=real_number(lambda value: 0 < value <= 1, "a share of the memory; expected above 0, at most 1"),
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
        type=gib,
        default=MM_CACHE_BYTES / (1 << 30),
        metavar="GIB",
        help="memory for encoded pictures and videos on each rank of a model that takes them, half of it for keys "
        "and values in models with cross-attention; those of one request "
        f"must fit (default: {MM_CACHE_BYTES >> 30})",
    )


def model_directory(args: argparse.Namespace) -> Path:
    """MODEL or --model-path. LaunchError unless exactly one is given."""
    given = [path for path in (args.model, args.model_path) if path is not None]
    if not given:
        rest = " --prompt TEXT" if args.command == "generate" else ""
        raise LaunchError(f"no model given: tilerank {args.command} MODEL{rest}")
    if len(set(given)) > 1:
        raise LaunchError(f"two models given: {given[0]} and --model-path {given[1]}")
    return Path(given[0])


def tokenizer_directory(args: argparse.Namespace) -> Path:
    """Return where the tokenizer is read: --tokenizer, or the model. LaunchError as of `model_directory`."""
    own = model_directory(args)
    return own if args.tokenizer is None else args.tokenizer


def checked_card(args: argparse.Namespace, model_dir: Path) -> ModelCard:
    """Return the model's card with the options that change it. ConfigError or LaunchError for options that do not agree
    with it."""
    card, options = _read_card(model_dir), model_options(args)
    check_agreement(card.quantization, options.quantization, options.dtype, options.activation_bits)
    if options.kv_cache_dtype not in ("auto", "int8"):  # these two are always valid, and torch need not be imported
        options.torch_kv_dtype(card)
    card = with_options(card, options.family)
    options.drafts(card)
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
    """Tokens of a prompt and its answer together. LaunchError for more than the model's context."""
    longest = card.context_length
    if args.context_length is not None and args.context_length > longest:
        raise LaunchError(
            f"--context-length {args.context_length} is more than the {longest} tokens of the model's context"
        )
    return args.context_length or longest
