"""`--quantization` and `--kv-cache-dtype`: the formats of weights and cache that the command line asks for."""

import argparse
from typing import TYPE_CHECKING

from tilerank.loader.quantization_config import DEFAULT_INT4_GROUP, INT4_GROUPS, Quantization, check_agreement

from ..errors import LaunchError

if TYPE_CHECKING:
    import torch

    from tilerank.loader.card import ModelCard

CODES = ("int8", "int4", "fp8")
KV_DTYPES = ("auto", "bfloat16", "bf16", "int8")


def add_arguments(parser: argparse._ActionsContainer) -> None:
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
        "--kv-cache-dtype",
        choices=KV_DTYPES,
        default="auto",
        help="dtype of cached keys and values; int8 has one scale per token and head (auto: that of the activations)",
    )


def quantization_of(args: argparse.Namespace) -> Quantization | None:
    """Return what the command line asks for. Raises LaunchError for a group without int4."""
    if args.quantization_group is not None and args.quantization != "int4":
        raise LaunchError("--quantization-group needs --quantization int4")
    return None if args.quantization is None else Quantization(args.quantization, args.quantization_group)


def check(args: argparse.Namespace, card: "ModelCard") -> None:
    """Raise before any rank is started what the ranks would raise: ConfigError or LaunchError."""
    check_agreement(card.quantization, quantization_of(args), args.dtype)
    if args.kv_cache_dtype not in ("auto", "int8"):  # these two are always valid, and torch need not be imported
        resolve_kv_dtype(args.kv_cache_dtype, resolve_dtype(card, args.dtype, quantization_of(args)))


def resolve_dtype(card: "ModelCard", dtype: str, quantization: Quantization | None) -> "torch.dtype":
    """Return the dtype of activations and unquantised weights.

    "auto": float32 if the checkpoint is, else bfloat16, which float16 is converted to; bfloat16 with quantised weights.
    """
    import torch

    if dtype == "auto":
        floats = quantization is None and card.quantization is None
        return torch.float32 if floats and card.dtype == "float32" else torch.bfloat16
    return {"bfloat16": torch.bfloat16, "float32": torch.float32}[dtype]


def resolve_kv_dtype(name: str, dtype: "torch.dtype") -> "torch.dtype":
    """Return the dtype of the KV cache. Raises LaunchError if no kernel combines it with activations of `dtype`."""
    import torch

    if name == "int8":
        return torch.int8
    if name != "auto" and dtype != torch.bfloat16:
        raise LaunchError(
            f"--kv-cache-dtype {name} needs --dtype bfloat16, found {str(dtype).removeprefix('torch.')}; "
            "the cache has the dtype of the activations, or int8"
        )
    return dtype
