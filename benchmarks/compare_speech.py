"""Measures how fast tilerank and transformers turn frames of codes into samples, on the same cores.

    python -m benchmarks.compare_speech MODEL_DIR

It takes the options of `tilerank bench speech` as well.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

from tilerank.launch.bench.harness import Row, check_json_argument
from tilerank.launch.bench.peaks import bench_cores
from tilerank.launch.bench.speech import measure, show
from tilerank.launch.host.topology import read_topology

from . import script
from .peer import Peer, add_peers_argument, ready_peers

PEERS = ("transformers",)


def add_own_arguments(parser: argparse.ArgumentParser) -> None:
    add_peers_argument(parser, PEERS)


def compare(args: argparse.Namespace) -> int:
    check_json_argument(args)
    peers = ready_peers(args.peers, lambda peer: peer.missing_module([peer.name]))
    cores = bench_cores(read_topology())
    own, peaks = measure(args, cores)
    rows = own + [row for peer in peers for row in _peer_rows(args, peer, own, cores)]
    show(args, cores, rows, peaks)
    return 0


def _peer_rows(args: argparse.Namespace, peer: Peer, own: list[Row], cores: list[int]) -> list[Row]:
    """Return the rows of a peer, which computes the same frames as a sound of their own."""
    workload = {
        "model": str(args.model.absolute()),
        "dtype": own[0]["dtype"],
        "cores": cores,
        "frames": args.frames,
        "repeat": args.repeat,
    }
    with tempfile.TemporaryDirectory(prefix="tilerank-bench-") as scratch:
        found = peer.run(f"run_{peer.name}_speech.py", workload, Path(scratch))
    rows = []
    for row, runs in zip(own, found["seconds"], strict=True):
        seconds = statistics.median(runs)
        rows.append(
            {name: row[name] for name in ("model", "dtype", "frames", "sound_seconds")}
            | {"system": peer.name, "version": found["version"], "seconds": seconds}
            | {"real_time_factor": seconds / row["sound_seconds"], "ours_ratio": seconds / row["seconds"]}
        )
    return rows


if __name__ == "__main__":
    sys.exit(script.main("speech", add_own_arguments, compare, __doc__.splitlines()[0]))
