"""The options of `serve` for pictures, videos and sound: where they may come from, and how many a request may have."""

import argparse
import json
import logging
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import LaunchError

if TYPE_CHECKING:
    from tilerank.runtime.media.processor import Processor
    from tilerank.runtime.server.chat.media import MediaReader

log = logging.getLogger(__name__)

KINDS = ("image", "video", "audio")
DEFAULT_LIMIT = 999
"""Media of each kind in a request."""
_EXAMPLES = '\'{"image": 4, "video": 1}\' or image=4,video=1'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("pictures, videos and sound")
    group.add_argument(
        "--allowed-media-domains",
        nargs="+",
        action="extend",
        metavar="HOST",
        help="hosts from which http and https URLs in messages are read (default: none); never private addresses",
    )
    group.add_argument(
        "--allowed-local-media-path",
        type=Path,
        metavar="DIR",
        help="directory below which file: URLs in messages are read (default: none)",
    )
    group.add_argument(
        "--limit-mm-per-prompt",
        type=_limits,
        metavar="LIMITS",
        help=f"most media of a request, {_EXAMPLES} (default: {DEFAULT_LIMIT} of each kind)",
    )


def _limits(text: str) -> dict[str, int]:
    """Return kind -> count."""
    try:
        if text.lstrip().startswith("{"):
            found = json.loads(text)
        else:
            found = {name: int(count) for name, _, count in (pair.partition("=") for pair in text.split(","))}
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or not all(
        name in KINDS and type(count) is int and count >= 0 for name, count in found.items()
    ):
        raise argparse.ArgumentTypeError(f"{text!r}: expected counts of {' and '.join(KINDS)}, such as {_EXAMPLES}")
    return found


def check(args: argparse.Namespace, processor: "Processor | None") -> None:
    """Refuse options that cannot be followed. processor: of the model, None if it reads text only."""
    directory = args.allowed_local_media_path
    if directory is not None and not directory.is_dir():
        raise LaunchError(f"--allowed-local-media-path {directory} is not a directory")
    given = {
        "--allowed-media-domains": args.allowed_media_domains,
        "--allowed-local-media-path": directory,
        "--limit-mm-per-prompt": args.limit_mm_per_prompt,
    }
    for option, value in given.items():
        if value is not None and processor is None:
            raise LaunchError(f"{option} is for models that take pictures or videos; this one reads text only")


def media_reader(args: argparse.Namespace, processor: "Processor | None") -> "MediaReader | None":
    """Return what reads the media of requests; None for a model that reads text only."""
    from tilerank.runtime.media.decoder import MediaLimits
    from tilerank.runtime.server.chat.media import MediaReader
    from tilerank.runtime.server.http.fetch import Fetcher
    from tilerank.runtime.server.http.media_budget import MAX_DECODED, MAX_ENCODED

    from .media_decoder import MediaDecoder

    if processor is None:
        return None
    if processor.convention:
        log.info(processor.convention)
    missing = [what for module, what in (("PIL", "pictures"), ("av", "videos and sound")) if find_spec(module) is None]
    if missing:
        log.warning("%s are refused: they need pip install 'tilerank[vision]'", " and ".join(missing))
    limits: Mapping[str, int] = dict.fromkeys(KINDS, DEFAULT_LIMIT) | (args.limit_mm_per_prompt or {})
    fetcher = Fetcher(args.allowed_media_domains or (), args.allowed_local_media_path)
    return MediaReader(
        processor, lambda: MediaDecoder(MediaLimits(bytes=MAX_ENCODED, frame_bytes=MAX_DECODED)), fetcher, limits
    )
