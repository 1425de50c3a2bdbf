"""Options of how many requests run at once, and of what they get that do not say otherwise."""

import argparse
from pathlib import Path

from tilerank.runtime.protocol.sizes import MAX_RUNNING

from .arguments import json_numbers, template_variables, whole_number


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("requests")
    group.add_argument("--chat-template", type=Path, metavar="FILE", help="a chat template in place of the model's")
    group.add_argument(
        "--default-chat-template-kwargs",
        type=template_variables,
        default={},
        metavar="JSON",
        help="variables of the chat template that requests leave out, such as a fixed date of gpt-oss",
    )
    group.add_argument(
        "--override-generation-config",
        type=json_numbers,
        default={},
        metavar="JSON",
        help='sampling values in place of those of generation_config.json, such as {"temperature": 0.6}',
    )
    group.add_argument(
        "--seed",
        type=whole_number(0, 2**64 - 1),
        metavar="N",
        help="draws the seeds of requests without one: the same requests in the same order get the same answers",
    )
    group.add_argument(
        "--max-running-requests",
        "--max-num-seqs",
        type=whole_number(1, MAX_RUNNING),
        default=MAX_RUNNING,
        metavar="N",
        help=f"choices of requests that run at once; others wait (default and most: {MAX_RUNNING})",
    )
