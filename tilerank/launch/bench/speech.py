"""`tilerank bench speech`: how fast frames of codes become samples, by the number of frames in a part of a sound."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tilerank.parallel.cost import Work

from ..errors import LaunchError
from ..host.topology import read_topology
from ..options.arguments import whole_number
from ..options.quantize import resolve_dtype
from .json_rows import add_json_argument, check_json_argument, write_json
from .peaks import Peaks, RateProbe, Rates, bench_cores, compute_unit, mean_rates, peaks_of, share_text
from .rank_job import DTYPES, add_model_arguments, whole_numbers
from .report import OURS, Row

if TYPE_CHECKING:
    import torch

    from tilerank.runtime.step.speaker import Vocoder

PARTS = 4
"""Parts of a sound that are measured, after a first one."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument(
        "--frames",
        type=whole_numbers(1),
        default=[4, 16, 48],
        metavar="N,N",
        help="frames in a part of a sound, of 80 ms each (default: 4,16,48)",
    )
    parser.add_argument(
        "--repeat", type=whole_number(1), default=3, metavar="N", help="runs, of which the median is used (default: 3)"
    )
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

    dtype = resolve_dtype(read_supported_card(args.model), args.dtype, None)
    peaks = peaks_of(cores)
    vocoder = load_vocoder(args.model, dtype)
    core.start_pool(cores, spin=True)
    torch.set_num_threads(1)
    probe, cost = RateProbe(cores), vocoder.cost()
    rows: list[Row] = []
    for frames in args.frames:
        work = Work(cost.read) + cost.work(frames, 0)
        runs = [_measure(vocoder, frames, work, probe) for _ in range(args.repeat)]
        seconds, rates = sorted(runs, key=lambda run: run[0])[(len(runs) - 1) // 2]
        now = peaks.with_rates(rates)
        rows.append(
            {
                "system": OURS,
                "model": args.model.name,
                "dtype": str(dtype).removeprefix("torch."),
                "isa": core.isa(),
                "frames": frames,
                "seconds": seconds,
                "sound_seconds": frames * vocoder.frame_samples / SAMPLE_RATE,
                "real_time_factor": seconds * SAMPLE_RATE / (frames * vocoder.frame_samples),
                "flops": work.flops,
                "compute_share": now.compute_share(work, seconds),
                "limit_share": now.limit_seconds(work) / seconds,
                "peaks": now.as_json(),
                "ours_ratio": 1.0,
            }
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


def _measure(vocoder: Vocoder, frames: int, work: Work, probe: RateProbe) -> tuple[float, Rates]:
    """Return the mean seconds of a part of a sound, and the machine's rates at the time."""
    import torch

    codes, state = torch.zeros(frames, vocoder.codes, dtype=torch.int64), vocoder.begin()
    vocoder.decode(codes, state)
    before = probe.measure(work)
    began = time.perf_counter()
    for _ in range(PARTS):
        vocoder.decode(codes, state)
    seconds = (time.perf_counter() - began) / PARTS
    return seconds, mean_rates(before, probe.measure(work))


def table(rows: list[Row]) -> list[str]:
    """Return a header and a line for each number of frames, with the time and the ratio of a peer, if there is one."""
    unit = f"of {compute_unit(rows[0]['peaks']['isa'])}"
    peers = {row["frames"]: row for row in rows if row["system"] != OURS}
    lines = [f"{'frames':<8}{'sound ms':>10}{'ms':>10}{'x real time':>13}{'of limit':>10}{unit:>{len(unit) + 2}}"]
    for peer in dict.fromkeys(row["system"] for row in peers.values()):
        lines[0] += f"{peer + ' ms':>18}{'ratio':>8}"
    for row in rows:
        if row["system"] != OURS:
            continue
        line = f"{row['frames']:<8}{1e3 * row['sound_seconds']:>10.0f}{1e3 * row['seconds']:>10.1f}"
        line += f"{1 / row['real_time_factor']:>13.2f}{share_text(row['limit_share']):>10}"
        line += f"{share_text(row['compute_share']):>{len(unit) + 2}}"
        if other := peers.get(row["frames"]):
            line += f"{1e3 * other['seconds']:>18.1f}{other['ours_ratio']:>8.2f}"
        lines.append(line)
    return lines
