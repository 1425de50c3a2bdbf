"""Options of one model family: `--mllama-intermediate` and `--no-talker`."""

import argparse

from tilerank.runtime.media.mllama_intermediate import INTERMEDIATE


def add_arguments(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--mllama-intermediate",
        choices=INTERMEDIATE,
        help="Llama-3.2-Vision: take the inputs of the tower's intermediate layers, with which it was trained, or "
        "their outputs, as transformers 5.23 does, to compare with it (default: meta)",
    )
    parser.add_argument(
        "--no-talker", action="store_true", help="Qwen3-Omni: leave the weights of speech out; it answers in text alone"
    )
