"""`--quantization`: what the command line says about the format of weights."""

import argparse
from typing import TYPE_CHECKING

from tilerank.loader.quantization import DEFAULT_INT4_GROUP, INT4_GROUPS, Quantization, check_agreement

from .errors import LaunchError

if TYPE_CHECKING:
    import torch

    from tilerank.loader.config import ModelConfig

CODES = ("int8", "int4", "fp8")


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


def quantization_of(args: argparse.Namespace) -> Quantization | None:
    """LaunchError for a group without int4."""
    if args.quantization_group is not None and args.quantization != "int4":
        raise LaunchError("--quantization-group needs --quantization int4")
    return None if args.quantization is None else Quantization(args.quantization, args.quantization_group)


def check(args: argparse.Namespace, config: "ModelConfig") -> None:
    """Refuses what ranks would refuse, before there are any."""
    check_agreement(config.quantization, quantization_of(args), args.dtype)


def resolve_dtype(config: "ModelConfig", dtype: str, quantization: Quantization | None) -> "torch.dtype":
    """The dtype of activations, cache and unquantised weights: "auto" is the checkpoint's, as far as there are kernels.

    Quantised weights are multiplied with bfloat16.
    """
    import torch

    if dtype == "auto":
        floats = quantization is None and config.quantization is None
        return torch.float32 if floats and config.dtype == "float32" else torch.bfloat16
    return {"bfloat16": torch.bfloat16, "float32": torch.float32}[dtype]
