"""`tilerank bench speech`: how fast frames of codes become samples, by the number of frames in a part of a sound."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tilerank.parallel.cost import Work

from ..errors import LaunchError
from ..host.topology import read_topology
from ..options.arguments import whole_numbers
from ..options.hub import add_model_argument
from ..options.model import DTYPES, ModelOptions
from .harness import Column, Row, add_json_argument, add_repeat_argument, check_json_argument, median_by, write_json
from .harness import table as lines_of
from .peaks import Peaks, RateProbe, bench_cores, compute_unit, peaks_of, share_text
from .report import OURS

if TYPE_CHECKING:
    import torch

    from tilerank.runtime.step.speaker import Vocoder

PARTS = 4
"""Parts of a sound that are measured, after a first one."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    parser.add_argument(
        "--frames",
        type=whole_numbers(1),
        default=[4, 16, 48],
        metavar="N,N",
        help="frames in a part of a sound, of 80 ms each (default: 4,16,48)",
    )
    add_repeat_argument(parser)
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="auto: the checkpoint's dtype")
    add_json_argument(parser)


def run(args: argparse.Namespace) -> int:
    check_json_argument(args)
    cores = bench_cores(read_topology())
    show(args, cores, *measure(args, cores))
    return 0


def show(args: argparse.Namespace, cores: list[int], rows: list[Row], peaks: Peaks) -> None:
    """Print rows of tilerank and of a system beside it as a table, and write them where --json says."""
    own = rows[0]
    print(f"{args.model.name}: {own['dtype']} on {len(cores)} cores, {own['isa']}; {peaks.text()}\n")
    print("\n".join(table(rows)))
    write_json(args, rows)


def measure(args: argparse.Namespace, cores: list[int]) -> tuple[list[Row], Peaks]:
    """Return the rows of tilerank, and the peaks of the cores."""
    import torch

    from tilerank.kernels import core
    from tilerank.runtime.protocol.speech_settings import SAMPLE_RATE
    from tilerank.runtime.rank.registry import read_supported_card

    dtype = ModelOptions(dtype=args.dtype).torch_dtype(read_supported_card(args.model))
    peaks = peaks_of(cores)
    vocoder = load_vocoder(args.model, dtype)
    core.start_pool(cores, spin=True)
    torch.set_num_threads(1)
    probe, cost = RateProbe(cores), vocoder.cost()
    rows: list[Row] = []
    for frames in args.frames:
        work = Work(cost.read) + cost.work(frames, 0)
        runs = [_measure(vocoder, frames, work, probe) for _ in range(args.repeat)]
        run = median_by(runs, "seconds")
        seconds = run["seconds"]
        shares = peaks.with_rates(run["rates"]).shares(work, seconds)
        rows.append(
            {
                "system": OURS,
                "model": args.model.name,
                "dtype": str(dtype).removeprefix("torch."),
                "isa": core.isa_text(),
                "frames": frames,
                "seconds": seconds,
                "sound_seconds": frames * vocoder.frame_samples / SAMPLE_RATE,
                "real_time_factor": seconds * SAMPLE_RATE / (frames * vocoder.frame_samples),
                "ours_ratio": 1.0,
            }
            | {name: shares[name] for name in ("flops", "compute_share", "limit_share", "peaks")}
        )
    return rows, peaks


def load_vocoder(model_dir: Path, dtype: torch.dtype) -> Vocoder:
    """Load what makes samples of codes, and nothing else of the model. LaunchError for a model that does not speak."""
    from tilerank.loader.checkpoint import Checkpoint
    from tilerank.loader.weights import load_weights
    from tilerank.parallel.sharding import Sharding
    from tilerank.runtime.rank.registry import build_model, read_supported_card

    model = build_model(read_supported_card(model_dir), Sharding(0, 1, dtype, None))
    if model.speaker is None:
        raise LaunchError(f"{model_dir}: expected a model that speaks, found one without a talker")
    load_weights(model.speaker.vocoder, Checkpoint(model_dir), ignore=lambda _: True, progress=False)
    return model.speaker.vocoder


def _measure(vocoder: Vocoder, frames: int, work: Work, probe: RateProbe) -> Row:
    """Return the mean "seconds" of a part of a sound, and the machine's "rates" at the time."""
    import torch

    codes, state = torch.zeros(frames, vocoder.codes, dtype=torch.int64), vocoder.begin()
    vocoder.decode(codes, state)

    def run() -> float:
        began = time.perf_counter()
        for _ in range(PARTS):
            vocoder.decode(codes, state)
        return (time.perf_counter() - began) / PARTS

    seconds, rates = probe.around(work, run)
    return {"seconds": seconds, "rates": rates}


def table(rows: list[Row]) -> list[str]:
    """Return a header and a line for each number of frames, with the time and the ratio of a peer, if there is one."""
    unit = f"of {compute_unit(rows[0]['peaks']['isa'])}"
    peers = {row["frames"]: row for row in rows if row["system"] != OURS}
    columns = [
        Column("frames", 8, lambda row: str(row["frames"])),
        Column("sound ms", -10, lambda row: f"{1e3 * row['sound_seconds']:.0f}"),
        Column("ms", -10, lambda row: f"{1e3 * row['seconds']:.1f}"),
        Column("x real time", -13, lambda row: f"{1 / row['real_time_factor']:.2f}"),
        Column("of limit", -10, lambda row: share_text(row["limit_share"])),
        Column(unit, -2 - len(unit), lambda row: share_text(row["compute_share"])),
    ]
    for peer in dict.fromkeys(row["system"] for row in peers.values()):
        columns += [
            Column(f"{peer} ms", -18, lambda row: f"{1e3 * peers[row['frames']]['seconds']:.1f}"),
            Column("ratio", -8, lambda row: f"{peers[row['frames']]['ours_ratio']:.2f}"),
        ]
    return lines_of(columns, [row for row in rows if row["system"] == OURS])
