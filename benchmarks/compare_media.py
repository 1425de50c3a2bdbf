"""Measures what a picture or sound takes in tilerank and in its peers, with the same model, media and cores.

    python -m benchmarks.compare_media MODEL_DIR --size 1024x1024 --with transformers,openvino,llama.cpp

It takes the options of `tilerank bench media` as well.
"""

from __future__ import annotations

import argparse
import base64
import sys
import tempfile
from pathlib import Path

from tilerank.launch.bench.harness import check_json_argument
from tilerank.launch.bench.media import NEXT_TOKENS, QUESTIONS, check_sizes, show, sizes_in
from tilerank.launch.bench.media_inputs import kind_of, media_prompts, random_file, size_text
from tilerank.launch.bench.peaks import peaks_of
from tilerank.launch.bench.rank_job import check_command, placement_of, run_ranks
from tilerank.launch.bench.report import OURS, Report
from tilerank.launch.errors import LaunchError

from . import script
from .peer import Peer, add_peers_argument, ready_peers

PEERS = {
    "transformers": ("transformers", "torchvision", "PIL"),
    "openvino": ("openvino_genai", "optimum", "PIL"),
    "llama.cpp": ("llama_cpp", "gguf"),
}
"""Systems to compare with, and the modules that their interpreters need."""


def add_own_arguments(parser: argparse.ArgumentParser) -> None:
    add_peers_argument(parser, PEERS)


def compare(args: argparse.Namespace) -> int:
    check_command(args)
    check_json_argument(args)
    check_sizes(args)
    if args.audio and {peer.name for peer in args.peers} - {"transformers"}:
        raise LaunchError("--audio: the only peer is transformers")
    peers = ready_peers(args.peers, lambda peer: peer.missing_module(PEERS[peer.name]))
    _, cores = placement_of(args)
    peaks = peaks_of(cores)
    own: Report = run_ranks(args, args.argv)
    reports = {OURS: own} | {peer.name: _measure_peer(args, peer, cores, own["dtype"]) for peer in peers}
    show(args, reports, peaks)
    return 0


def _measure_peer(args: argparse.Namespace, peer: Peer, cores: list[int], dtype: str) -> Report:
    """Return the report of a peer, whose program of peers/ measures the same media."""
    runs = ["warm-up", *map(str, range(args.repeat))]
    prompts, sizes = media_prompts(args.model), sizes_in(args)
    workload = {
        "model": str(args.model.absolute()),
        "dtype": dtype,
        "cores": cores,
        "next_tokens": NEXT_TOKENS,
        "texts": {kind: prompts.text(QUESTIONS[kind], kind) for kind in map(kind_of, sizes)},
        "sizes": [
            [kind_of(size), [base64.b64encode(random_file(size, f"media {run}")).decode() for run in runs]]
            for size in sizes
        ],
    }
    with tempfile.TemporaryDirectory(prefix="tilerank-bench-") as scratch:
        result = peer.run(f"run_{peer.name.replace('.', '_')}_media.py", workload, Path(scratch))
    found = [{"size": size_text(size), "runs": of[1:]} for size, of in zip(sizes, result["sizes"], strict=True)]
    return {"version": result["version"], "dtype": dtype, "tp": args.tp, "sizes": found}


if __name__ == "__main__":
    sys.exit(script.main("media", add_own_arguments, compare, __doc__.splitlines()[0]))
