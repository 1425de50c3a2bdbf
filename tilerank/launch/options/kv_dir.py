"""The directory in which pages of the KV cache are kept in files. Imports no torch."""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tilerank.runtime.protocol.sizes import KV_DIR_BYTES

from .model import gib

if TYPE_CHECKING:
    from tilerank.runtime.rank.rank_config import RankConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of commands whose requests may continue what earlier ones have cached."""
    files = parser.add_argument_group("cache in files")
    files.add_argument(
        "--kv-dir",
        type=Path,
        metavar="DIR",
        help="keep pages of the KV cache in files of this directory, which only its owner may enter: prompts that "
        "begin like earlier ones continue from there, also after a restart (default: none)",
    )
    files.add_argument(
        "--kv-dir-size",
        type=gib,
        default=KV_DIR_BYTES / (1 << 30),
        metavar="GIB",
        help="size of these files, of all ranks together; the least recently used ones go first "
        f"(default: {KV_DIR_BYTES >> 30})",
    )


def with_kv_dir(config: "RankConfig", args: argparse.Namespace) -> "RankConfig":
    """Return a configuration of the ranks with what the options say."""
    return replace(config, kv_dir=args.kv_dir, kv_dir_bytes=int(args.kv_dir_size * (1 << 30)))
