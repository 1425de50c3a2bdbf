"""`tilerank bench media`: what a picture or sound takes from its file to the first token, its tower by parts, and the
tokens after the first."""

from __future__ import annotations

import argparse
import time
from contextlib import closing
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec import structs

from tilerank.loader.card import read_card
from tilerank.parallel.cost import Work

from ..errors import LaunchError
from ..host.topology import read_topology
from ..options.hub import add_model_argument
from ..options.model import model_options
from ..serving.media_decoder import MediaDecoder
from ..text import count
from .harness import add_json_argument, add_repeat_argument, check_json_argument, write_json
from .media_inputs import (
    Clip,
    MediaPrompts,
    MediumSize,
    clips_of,
    kind_of,
    media_prompts,
    random_file,
    random_jpeg,
    size_text,
    sizes_of,
)
from .media_report import rows_of, table
from .peaks import Peaks, RateProbe, peaks_of
from .rank_job import (
    EngineJob,
    add_engine_arguments,
    add_rank_arguments,
    cores_of,
    is_rank,
    placement_of,
    run_as_rank,
    run_ranks,
)
from .report import OURS, Report

if TYPE_CHECKING:
    from tilerank.runtime.lead.engine import Engine
    from tilerank.runtime.media.decoder import FileDecoder
    from tilerank.runtime.protocol.prompt import Medium, Prompt
    from tilerank.runtime.rank.worker import Worker

    from ..host.placement import Placement
    from .rank_job import RankMemory

QUESTIONS = {"image": "What is in the picture?", "audio": "What is said?"}
NEXT_TOKENS = 8
"""Tokens after the first that are measured."""
_ENCODING = -1  # the number of its encodings; the engine counts from 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    parser.add_argument(
        "--size", type=sizes_of, metavar="WxH,WxH", help="of pictures (default: 1024x1024, or none with --audio)"
    )
    parser.add_argument(
        "--audio", type=clips_of, default=[], metavar="SECONDS,SECONDS", help="length of clips of sound"
    )
    add_repeat_argument(parser)
    add_engine_arguments(parser)
    add_json_argument(parser)
    add_rank_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if is_rank(args):
        return run_as_rank(args, MediaJob(args))
    check_json_argument(args)
    check_sizes(args)
    _, cores = placement_of(args)
    peaks = peaks_of(cores)
    show(args, {OURS: run_ranks(args, args.argv)}, peaks)
    return 0


def show(args: argparse.Namespace, reports: dict[str, Report], peaks: Peaks) -> None:
    """Print the reports of tilerank and of systems beside it as a table, and write their rows where --json says."""
    rows, own = rows_of(reports, args.model.name, peaks), reports[OURS]
    ranks = own["tp"]
    print(f"{args.model.name}: {own['dtype']} on {count(ranks, 'rank')}, {own['isa']}; {peaks.text()}\n")
    print("\n".join(table(rows)))
    write_json(args, rows)


def sizes_in(args: argparse.Namespace) -> list[MediumSize]:
    """Return the sizes of all media."""
    pictures: list[MediumSize] = args.size or ([] if args.audio else [(1024, 1024)])
    return [*pictures, *args.audio]


def _tokens(prompts: MediaPrompts, size: MediumSize) -> int:
    """Return the tokens of the prompt with a medium."""
    return prompts.tokens_before(size, QUESTIONS[kind_of(size)])


def check_sizes(args: argparse.Namespace) -> None:
    """Raise LaunchError for media that the model does not take, and prompts that are longer than its context."""
    prompts, limit = media_prompts(args.model), read_card(args.model).context_length
    for size in sizes_in(args):
        prompts.check(size)
        if not isinstance(size, Clip):
            random_jpeg((1, 1), "")  # refuses where Pillow is missing
        if (tokens := _tokens(prompts, size)) + NEXT_TOKENS >= limit:
            raise LaunchError(
                f"a medium of {size_text(size)} needs {tokens} positions and {1 + NEXT_TOKENS} for an answer; the "
                f"model's context has {limit}"
            )


class MediaJob(EngineJob):
    """Measures media on rank 0, with an engine whose cache fits every prompt."""

    def __init__(self, args: argparse.Namespace) -> None:
        from tilerank.kernels.kv_pages import PAGE_TOKENS

        self._prompts, self._decoder = media_prompts(args.model), MediaDecoder()
        self._sizes = sizes_in(args)
        super().__init__(
            args,
            total_tokens=max(_tokens(self._prompts, size) for size in self._sizes) + PAGE_TOKENS,
            measure=lambda *context: _measure(args, self._prompts, self._decoder, *context),
        )

    def prepare(self) -> None:
        """Start the process that decodes. Later, it would inherit the one core of the thread that measures."""
        smallest = Clip(1) if isinstance(self._sizes[0], Clip) else (1, 1)
        self._decoder.decode(kind_of(smallest), [random_file(smallest, "")], False, self._prompts.sample)

    def lead(self, worker: Worker, size: int, placement: Placement) -> None:
        with closing(self._decoder):
            super().lead(worker, size, placement)


def _measure(
    args: argparse.Namespace,
    prompts: MediaPrompts,
    decoder: FileDecoder,
    engine: Engine,
    placement: Placement,
    _: list[RankMemory],
) -> dict[str, Any]:
    """Measure all sizes `--repeat` times, after a warm-up of each, and return the report. Runs on rank 0.

    A report has "isa", "dtype", "tp", and "sizes"; for each size "size", "tokens", "work" (of parts of the tower, as
    dicts) and "runs": "rates" and the seconds of each part that media_report.py names.
    """
    from tilerank.kernels import core

    from ..planning.work import encoder_work

    dtype = model_options(args).torch_dtype(engine.card)
    probe = RateProbe(cores_of(placement, read_topology()))
    tower = Tower(engine.worker)
    sizes = []
    for size in sizes_in(args):
        grid = prompts.grid(size)
        work = encoder_work(engine.card, dtype, grid)
        total = sum(work.values(), start=Work())
        _measure_medium(engine, tower, prompts, decoder, size, "warm-up")
        runs = []
        for number in range(args.repeat):
            run = partial(_measure_medium, engine, tower, prompts, decoder, size, str(number))
            seconds, rates = probe.around(total, run)
            runs.append({**seconds, "rates": rates})
        tokens = engine.worker.encoder.shape(grid)[1] if engine.worker.encoder else 0
        parts = {name: asdict(part) for name, part in work.items()}
        sizes.append({"size": size_text(size), "tokens": tokens, "work": parts, "runs": runs})
    return {
        "isa": core.isa_text(),
        "dtype": str(dtype).removeprefix("torch."),
        "tp": len(placement.ranks),
        "sizes": sizes,
    }


def _measure_medium(
    engine: Engine, tower: Tower, prompts: MediaPrompts, decoder: FileDecoder, size: MediumSize, seed: str
) -> dict[str, float]:
    """Return the seconds of each part for a new medium."""
    from tilerank.runtime.lead.engine import Request
    from tilerank.runtime.lead.sampling import SamplingParams

    kind = kind_of(size)
    file, text = random_file(size, f"media {seed}"), prompts.text(QUESTIONS[kind], kind)
    began = time.perf_counter()
    frames = decoder.decode(kind, [file], False, prompts.sample)
    decoded = time.perf_counter()
    prompt: Prompt = prompts.prompt(text, frames)
    request = Request(prompt, SamplingParams(max_new_tokens=1 + NEXT_TOKENS, ignore_eos=True))
    first, *_, last = (time.perf_counter() for _ in engine.generate([request]))
    return {
        "decode": decoded - began,
        "first token": first - began,
        "next token": (last - first) / NEXT_TOKENS,
        **tower.measure(prompt.media[0]),
    }


class Tower:
    """Encodes media on all ranks, beside the engine, and keeps the last encoding. Lives on rank 0."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._held: list[int] = []

    def measure(self, medium: Medium) -> dict[str, float]:
        """Return the seconds of "preprocessing", "tower" and its parts.

        The parts are missing on the rung "reference", which has no launches; there, "tower" includes preprocessing.
        """
        from tilerank.runtime.lead.encodings import PART_BYTES
        from tilerank.runtime.lead.media_encoding import operations_of_piece
        from tilerank.runtime.protocol.rank_messages import Encode, EncodePiece, Frames

        from .launch_times import launch_times

        worker = self._worker
        parts = [medium.frames[i : i + PART_BYTES] for i in range(0, len(medium.frames), PART_BYTES)]
        operations = operations_of_piece(worker.dtype, worker.team.group.size)
        first = Encode(_ENCODING, structs.replace(medium, frames=parts[0]), operations, self._held)
        messages: list[Encode | Frames] = [first, *map(Frames, parts[1:])]
        for message in messages:
            worker.announce(message)
            worker.prepare_encode(message)
        self._held = [_ENCODING]
        with launch_times() as launches:
            began = time.perf_counter()
            complete = False
            while not complete:
                worker.announce(EncodePiece())
                complete = worker.encode_piece()
            seconds = time.perf_counter() - began
        return tower_parts(seconds, launches)


def tower_parts(seconds: float, launches: dict[int, float]) -> dict[str, float]:
    """Return the seconds of each part of an encode from the seconds of its kernels, by number."""
    if not launches:
        return {"tower": seconds}
    from tilerank.kernels import _C

    names = {_C.kernel(name): name for name in _C.kernels()}
    found = dict.fromkeys(("preprocessing", "linear layers", "attention", "norms", "sums", "other kernels"), 0.0)
    for number, spent in launches.items():
        found[_part_of(names[number])] += spent
    tower = seconds - found["preprocessing"]
    return found | {"tower": tower, "between kernels": seconds - sum(launches.values())}


def _part_of(kernel: str) -> str:
    """Return the part of an encode to which a kernel belongs. "sums": over ranks, and with the residual."""
    if kernel.startswith("linear"):
        return "linear layers"
    if kernel.startswith("shm"):
        return "sums"
    parts = {
        "patches": "preprocessing",
        "log_mel": "preprocessing",
        "attention": "attention",
        "store_kv": "attention",
        "add_rows": "sums",
    }
    return parts.get(kernel) or {"layer_norm": "norms", "add": "sums"}.get(kernel, "other kernels")
