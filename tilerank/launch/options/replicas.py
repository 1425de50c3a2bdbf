"""The number of replicas of a model. Imports no torch."""

import argparse

from .arguments import whole_number

MAX_REPLICAS = 256


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --dp: a number of replicas, or None for "auto"."""
    parser.add_argument_group("replicas").add_argument(
        "--dp",
        "--data-parallel-size",
        type=_replica_count,
        default=1,
        metavar="auto|N",
        help="replicas of the model, each on --tp ranks of its own (default: 1; auto: as many as the NUMA nodes give "
        "with --tp, or with --tp auto as the size of the model suggests)",
    )


def _replica_count(text: str) -> int | None:
    return None if text == "auto" else whole_number(1, MAX_REPLICAS)(text)
