"""The options of what is predicted, and of what is chosen by it: `--machine`, `--slo`, `--mix`, `--disaggregate`."""

from __future__ import annotations

import argparse

from ...errors import LaunchError
from ...goodput.limits import Limits, limits_of
from ...goodput.mix import Mix, mix_of

_MIX = "mlperf-llama-3.1-8b"
_LIMITS = "ttft=2s,tpot=100ms"
"""Those of MLPerf Inference for the requests of the mix."""


def add_arguments(parser: argparse._ActionsContainer, machine: str) -> None:
    """Add the options. machine: the help of --machine."""
    parser.add_argument("--machine", metavar="NAME|FILE.yaml", help=machine)
    parser.add_argument(
        "--slo",
        type=limits_of,
        metavar=_LIMITS,
        help="limits of latency that 99 %% of the requests keep at the predicted goodput, as of `bench serve --slo` "
        f"(default with --disaggregate: {_LIMITS})",
    )
    parser.add_argument(
        "--mix",
        metavar="NAME|FILE",
        help=f"lengths of the requests of the predicted goodput, as of `bench serve --mix` (default: {_MIX})",
    )
    parser.add_argument(
        "--disaggregate",
        choices=("auto",),
        help="auto: choose the --prefill-nodes with the highest goodput that is predicted for --machine, or none if it "
        "is not over 5 %% higher than that of all ranks together",
    )


def check_disaggregate(args: argparse.Namespace) -> None:
    """Raise LaunchError for an option that does not go with --disaggregate, or for one that it needs."""
    if args.disaggregate is None:
        return
    if args.prefill_nodes is not None:
        raise LaunchError(
            "--disaggregate auto chooses the number of prefill ranks: expected no --prefill-nodes with it, found "
            f"{args.prefill_nodes}"
        )
    if args.dp != 1:
        raise LaunchError(f"--disaggregate auto is for one replica, found --dp {args.dp or 'auto'}")
    if args.machine is None:
        raise LaunchError(
            "--disaggregate auto needs --machine, whose file `tilerank doctor --machine FILE.yaml` writes, found none"
        )


def refuse_without(args: argparse.Namespace, needed: str, *names: str) -> None:
    """Raise LaunchError if one of these options is given. needed: the option that they need, which is not given."""
    for name in names:
        if getattr(args, name) is not None:
            raise LaunchError(f"--{name}: expected {needed} with it, found none")


def mix_and_limits(args: argparse.Namespace) -> tuple[Mix, Limits]:
    """Return those that the options name, or the default ones. Raises LaunchError."""
    return mix_of(args.mix or _MIX), args.slo or limits_of(_LIMITS)
