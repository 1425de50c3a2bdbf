"""`tilerank bench`: what this machine can do at best, and what is reached of it. Every figure is a share of the former.

Each kind of measurement is a module of its own, which is imported when it runs or is asked for its options.
"""

import argparse
import contextlib
import importlib
import signal
from collections.abc import Iterator

from .bench_json import with_json

BENCHES = {
    "peaks": "memory bandwidth, compute peaks and core-to-core latency of the cores this process may use",
    "kernels": "every kernel as a share of reading memory or of computing, and against torch",
    "comm": "all-reduce and all-gather in shared memory and over gloo, from two ranks up",
    "model": "prefill and decode of a model, as shares of what the machine allows",
    "compare": "a model against other systems with the same weights on the same cores, in turns",
    "serve": "a server under load over HTTP, against its engine without one",
    "make-model": "write a checkpoint of random weights in the shape of a public model",
    "quality": "perplexity of a model on known text, for every dtype and number of ranks",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    benches = parser.add_subparsers(dest="bench", required=True, metavar="WHAT")
    for name, purpose in BENCHES.items():
        one = benches.add_parser(name, help=purpose, description=purpose[0].upper() + purpose[1:] + ".")
        module = importlib.import_module(f".bench_{name.replace('-', '_')}", __package__)
        module.add_arguments(one)
        one.set_defaults(run_bench=module.run)


def run(args: argparse.Namespace) -> int:
    with _tidy_on_sigterm():
        return with_json(args.run_bench, args)


@contextlib.contextmanager
def _tidy_on_sigterm() -> Iterator[None]:
    """As after Ctrl-C, what was started ends with this process, and files that were made for it are removed."""

    def end(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
