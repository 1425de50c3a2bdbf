"""`tilerank bench`: measures the machine's peaks, and everything else as a share of them.

Each benchmark is a module with `add_arguments(parser)` and `run(args)`, named as in `BENCHES`.
"""

import argparse
import contextlib
import importlib
import os
import signal
from collections.abc import Iterator

from ..errors import LaunchError
from .harness import run_with_json

BENCHES = {
    "peaks": "memory bandwidth, compute peaks and core-to-core latency of the cores this process may use",
    "kernels": "every kernel as a share of the machine's peaks, and its speedup over torch",
    "comm": "all-reduce and all-gather, in shared memory and over gloo, for two and more ranks",
    "model": "prefill and decode of a model as shares of the machine's limit",
    "speculative": "tokens a second with drafts against plain decoding, on requests that repeat their prompts",
    "media": "a picture or sound from its file to the first token, and the parts of its tower as shares of the limit",
    "speech": "codes of speech to samples, as a share of the limit and of real time",
    "speaking": "answers that are spoken at once, as seconds of sound made in a second",
    "serve": "a server under load over HTTP, against its engine alone",
    "make-model": "write a checkpoint of random weights in the shape of a public model",
    "quality": "perplexity of a model on given texts, for each dtype and number of ranks",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    benches = parser.add_subparsers(dest="bench", required=True, metavar="WHAT")
    for name, purpose in BENCHES.items():
        subparser = benches.add_parser(name, help=purpose, description=purpose[0].upper() + purpose[1:] + ".")
        module = importlib.import_module(f".{name.replace('-', '_')}", __package__)
        module.add_arguments(subparser)
        subparser.set_defaults(run_bench=module.run)


def run(args: argparse.Namespace) -> int:
    """Run one benchmark and return its exit status. Raises LaunchError in a build that emulates AMX."""
    if _emulates_amx() and os.environ.get("TILERANK_ISA", "amx") == "amx":
        raise LaunchError(
            "bench: expected AMX tiles of the CPU, found a build that emulates them for tests;"
            " with TILERANK_ISA=avx512_bf16 the rungs below can be measured"
        )
    with _exit_on_sigterm():
        return run_with_json(args.run_bench, args)


def _emulates_amx() -> bool:
    try:
        from tilerank.kernels import _C
    except ImportError:
        return False
    return _C.emulates_amx


@contextlib.contextmanager
def _exit_on_sigterm() -> Iterator[None]:
    """Raise SystemExit on SIGTERM, so that child processes are ended and temporary files are removed, as on Ctrl-C."""

    def on_sigterm(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    previous = signal.signal(signal.SIGTERM, on_sigterm)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
