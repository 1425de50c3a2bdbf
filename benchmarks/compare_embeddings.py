"""Measures how many tokens a second are embedded over HTTP, by the engine alone, and by sentence-transformers.

    python -m benchmarks.compare_embeddings MODEL_DIR --prompt-tokens 512 --with sentence-transformers=PYTHON

It takes the options of `tilerank bench serve` too. MODEL_DIR is a model that embeds texts, or any with --task embed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tilerank.launch.bench import embeddings
from tilerank.launch.bench.harness import check_json_argument, write_json
from tilerank.launch.bench.rank_job import check_command, placement_of
from tilerank.launch.bench.serve import compare_with_engine, table
from tilerank.launch.errors import LaunchError
from tilerank.launch.options.model import model_options
from tilerank.loader.card import read_card
from tilerank.runtime.media.registry import with_options

from . import script
from .peer import Peer, add_peers_argument, ready_peers

PEERS = {"sentence-transformers": ("sentence_transformers",)}
"""Systems to compare with, and the modules that their interpreters need."""


def add_own_arguments(parser: argparse.ArgumentParser) -> None:
    add_peers_argument(parser, PEERS, default="sentence-transformers")


def compare(args: argparse.Namespace) -> int:
    check_command(args)
    check_json_argument(args)
    card = with_options(read_card(args.model), model_options(args).family)
    if card.pooling is None or card.pooling.task != "embed":
        raise LaunchError(f"{args.model.name}: expected a model that embeds texts, or --task embed")
    peers = ready_peers(args.peers, lambda peer: peer.missing_module(PEERS[peer.name]))
    _, cores = placement_of(args)
    rows, _ = compare_with_engine(args)
    dtype = str(model_options(args).torch_dtype(card)).removeprefix("torch.")
    print(f"{args.model.name}: texts of {args.prompt_tokens} tokens, {args.streams} at the same time, {dtype}")
    print("\n".join(table(rows)))
    found = {peer.name: _measure_peer(args, peer, cores, dtype) for peer in peers}
    for name, metrics in found.items():
        for row in rows:
            theirs, is_rate = metrics[row["what"]], row["what"].endswith("_per_s")
            faster = row["http"] / theirs if is_rate else theirs / row["http"]
            shown = f"{theirs:.1f}" if is_rate else f"{1e3 * theirs:.1f} ms"
            print(
                f"{name}: {embeddings.TITLES[row['what']]}: {shown}; tilerank over HTTP is {faster:.2f} times as fast"
            )
    write_json(args, {"rows": rows, "peers": found})
    return 0


def _measure_peer(args: argparse.Namespace, peer: Peer, cores: list[int], dtype: str) -> dict[str, float]:
    """Return the metrics of a peer, whose program of peers/ embeds the same texts."""
    runs = [embeddings.texts_of(args, seed) for seed in range(-1, args.repeat)]
    workload = {"model": str(args.model.absolute()), "dtype": dtype, "cores": cores, "runs": runs}
    with tempfile.TemporaryDirectory(prefix="tilerank-bench-") as scratch:
        result = peer.run(f"run_{peer.name.replace('-', '_')}.py", workload, Path(scratch))
    return embeddings.metrics_of(args, result["seconds"][1:])


if __name__ == "__main__":
    sys.exit(script.main("serve", add_own_arguments, compare, __doc__.splitlines()[0]))
