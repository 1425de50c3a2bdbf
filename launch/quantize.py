"""`--quantization` and `--kv-cache-dtype`: what the command line says about the formats of weights and cache."""

import argparse
from typing import TYPE_CHECKING

from tilerank.loader.quantization import DEFAULT_INT4_GROUP, INT4_GROUPS, Quantization, check_agreement

from .errors import LaunchError

if TYPE_CHECKING:
    import torch

    from tilerank.loader.config import ModelConfig

CODES = ("int8", "int4", "fp8")
KV_DTYPES = ("auto", "bfloat16", "bf16", "int8")


def add_arguments(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--quantization",
        choices=CODES,
        help="quantise the weights of projections while loading (default: as the checkpoint has them)",
    )
    parser.add_argument(
        "--quantization-group",
        type=int,
        choices=INT4_GROUPS,
        metavar="N",
        help=f"of int4: columns that share a scale, {', '.join(map(str, INT4_GROUPS))} (default: {DEFAULT_INT4_GROUP})",
    )
    parser.add_argument(
        "--kv-cache-dtype",
        choices=KV_DTYPES,
        default="auto",
        help="of keys and values; int8: codes, one scale per token and head (auto: as the activations)",
    )


def quantization_of(args: argparse.Namespace) -> Quantization | None:
    """LaunchError for a group without int4."""
    if args.quantization_group is not None and args.quantization != "int4":
        raise LaunchError("--quantization-group needs --quantization int4")
    return None if args.quantization is None else Quantization(args.quantization, args.quantization_group)


def check(args: argparse.Namespace, config: "ModelConfig") -> None:
    """Refuses what ranks would refuse, before there are any."""
    check_agreement(config.quantization, quantization_of(args), args.dtype)
    if args.kv_cache_dtype not in ("auto", "int8"):  # else anything goes, and nobody waits for torch
        resolve_kv_dtype(args.kv_cache_dtype, resolve_dtype(config, args.dtype, quantization_of(args)))


def resolve_dtype(config: "ModelConfig", dtype: str, quantization: Quantization | None) -> "torch.dtype":
    """The dtype of activations and unquantised weights: "auto" is the checkpoint's, as far as there are kernels.

    Quantised weights are multiplied with bfloat16.
    """
    import torch

    if dtype == "auto":
        floats = quantization is None and config.quantization is None
        return torch.float32 if floats and config.dtype == "float32" else torch.bfloat16
    return {"bfloat16": torch.bfloat16, "float32": torch.float32}[dtype]


def resolve_kv_dtype(name: str, dtype: "torch.dtype") -> "torch.dtype":
    """The dtype of the KV cache where activations have `dtype`. LaunchError where the kernels do not have the pair."""
    import torch

    if name == "int8":
        return torch.int8
    if name != "auto" and dtype != torch.bfloat16:
        raise LaunchError(
            f"--kv-cache-dtype {name} needs --dtype bfloat16, found {str(dtype).removeprefix('torch.')}; "
            "a cache has the dtype of the activations, or int8"
        )
    return dtype
