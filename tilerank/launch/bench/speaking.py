"""`tilerank bench speaking`: answers that are spoken at once, as seconds of sound made in a second."""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import asdict
from typing import TYPE_CHECKING

from tilerank.loader.card import read_card
from tilerank.loader.quantization_config import held_codes
from tilerank.parallel.cost import Cost, Work

from ..errors import LaunchError
from ..host.topology import read_topology
from ..options.arguments import whole_number, whole_numbers
from ..options.hub import add_model_argument
from ..options.model import model_options
from .harness import Column, Row, add_json_argument, check_json_argument, write_json
from .harness import table as lines_of
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

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from tilerank.runtime.lead.engine import Engine, Request
    from tilerank.runtime.protocol.speech_messages import SpeechStep
    from tilerank.runtime.rank.speech_rank import SpeechOutputs
    from tilerank.runtime.step.cache import Cache
    from tilerank.runtime.step.speaker import FrameInputs, Speaker

    from ..host.placement import Placement

PROMPT_TOKENS, TEXT_TOKENS = 30, 40
"""Tokens of a user's turn, and of a spoken text."""
WARM_UP = 32
"""Frames of every request before those that are measured."""
LARGEST_PART = 25
"""Frames of a part of sound from then on, of which every request has one at least."""
TEXT_ID = 1000
"""A token that is in every vocabulary, and of no special meaning."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    parser.add_argument(
        "--requests",
        type=whole_numbers(1),
        default=[1, 4, 16],
        metavar="N,N",
        help="that speak at once (default: 1,4,16)",
    )
    parser.add_argument(
        "--frames",
        type=whole_number(LARGEST_PART),
        default=50,
        metavar="N",
        help="of each that are measured (default: 50)",
    )
    add_engine_arguments(parser)
    add_json_argument(parser)
    add_rank_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from tilerank.runtime.protocol.speech_settings import voices_of

    if not voices_of(read_card(args.model)):
        raise LaunchError(f"{args.model}: expected a model that speaks, found one without a talker")
    if is_rank(args):
        tokens = max(args.requests) * (PROMPT_TOKENS + TEXT_TOKENS + 32)
        job = EngineJob(
            args, total_tokens=tokens, measure=lambda engine, placement, _: _measure(args, engine, placement)
        )
        return run_as_rank(args, job)
    check_json_argument(args)
    _, cores = placement_of(args)
    peaks = peaks_of(cores)
    report = run_ranks(args, args.argv)
    rows = [_with_shares(row, peaks) for row in report["rows"]]
    print(f"{args.model.name}: {report['quantization'] or report['dtype']}, {report['isa']}; {peaks.text()}\n")
    print("\n".join(table(rows)))
    write_json(args, rows)
    return 0


def _with_shares(row: Row, peaks: Peaks) -> Row:
    """Return the row with the shares of the predictor in place of its work and the rates of the machine."""
    work, now = Work(**row.pop("predictor_work")), peaks.with_rates(row.pop("rates"))
    seconds = row["predictor_s"]
    shares = {
        "predictor_stream_share": now.stream_share(work, seconds),
        "predictor_limit_share": now.limit_seconds(work) / seconds,
    }
    return row | shares | {"peaks": now.as_json()}


def table(rows: list[Row]) -> list[str]:
    """Return a header and a line for each number of requests."""
    columns = [
        Column("requests", 8, lambda row: str(row["requests"])),
        Column("x real time", -14, lambda row: f"{row['real_time']:.2f}"),
        Column("each", -8, lambda row: f"{row['real_time'] / row['requests']:.2f}"),
        Column("first sound s", -15, lambda row: f"{row['first_sound_s']:.2f}"),
        Column("frame ms", -10, lambda row: f"{1e3 * row['frame_s']:.1f}"),
        Column("predictor ms", -14, lambda row: f"{1e3 * row['predictor_s']:.1f}"),
        Column("of read", -9, lambda row: f"{row['predictor_stream_share']:.2f}"),
        Column("of limit", -10, lambda row: f"{row['predictor_limit_share']:.2f}"),
        Column("talker ms", -11, lambda row: f"{1e3 * row['talker_s']:.1f}"),
        Column("sound ms", -10, lambda row: f"{1e3 * row['sound_s']:.1f}"),
        Column("text ms", -9, lambda row: f"{1e3 * row['text_s']:.1f}"),
    ]
    return lines_of(columns, rows)


def _measure(args: argparse.Namespace, engine: Engine, placement: Placement) -> Row:
    """Runs on rank 0."""
    from tilerank.kernels import core

    from ..planning.work import predictor_cost

    options = model_options(args)
    dtype = options.torch_dtype(engine.card)
    cost = predictor_cost(engine.card, dtype, options.quantization, options.activation_bits)
    probe = RateProbe(cores_of(placement, read_topology()))
    assert engine.worker.speech is not None
    predictor = _PredictorClock(engine.worker.speech.speaker)
    return {
        "isa": core.isa_text(),
        "dtype": str(dtype).removeprefix("torch."),
        "quantization": held_codes(engine.card.quantization, options.quantization),
        "rows": [_measure_together(engine, predictor, count, args.frames, cost, probe) for count in args.requests],
    }


class _PredictorClock:
    """Measures the code predictor in steps of frames that are recorded after this clock is made."""

    def __init__(self, speaker: Speaker) -> None:
        self.seconds = 0.0
        """Seconds that the code predictor took in the last step of frames."""
        self._began = 0.0
        self._choose = speaker.choose
        speaker.choose = self._timed  # type: ignore[method-assign]

    def _timed(self, inputs: FrameInputs, frame_caches: Sequence[Cache]) -> tuple[list[Tensor], Tensor]:
        from tilerank.kernels.graph import between_launches

        between_launches(self._begin)
        chosen = self._choose(inputs, frame_caches)
        between_launches(self._end)
        return chosen

    def _begin(self) -> None:
        self._began = time.perf_counter()

    def _end(self) -> None:
        self.seconds = time.perf_counter() - self._began


class _SpeechClock:
    """The seconds of steps of speech, with and without sound, and how many frames of each request they had.

    frames_s: of steps of frames alone, as a whole and of the code predictor.
    """

    def __init__(self, engine: Engine, predictor: _PredictorClock) -> None:
        self.frames: dict[int, int] = {}
        self.frames_s: list[tuple[float, float]] = []
        self.total_s = self.sound_frames = 0.0
        self._speak, self._predictor = engine.worker.speak, predictor

    def speak(self, step: SpeechStep) -> SpeechOutputs:
        began = time.perf_counter()
        spoken = self._speak(step)
        seconds = time.perf_counter() - began
        for frame in step.frames:
            self.frames[frame.sequence] = self.frames.get(frame.sequence, 0) + 1
        self.sound_frames += sum(sound.end - sound.first for sound in step.sounds)
        self.total_s += seconds
        if not step.sounds and not step.chunks:
            self.frames_s.append((seconds, self._predictor.seconds))
        return spoken


def _measure_together(
    engine: Engine, predictor: _PredictorClock, count: int, frames: int, cost: Cost, probe: RateProbe
) -> Row:
    """Let `count` requests speak, and measure `frames` frames of each after the first ones.

    cost: of the code predictor. frame_s: of a step of frames. predictor_s, talker_s: of the code predictor in it, and
    of the rest. sound_s: of the sound of one frame. text_s: of everything else, for a step.
    """
    from tilerank.runtime.protocol.events import SoundEvent

    clock = _SpeechClock(engine, predictor)
    engine.worker.speak = clock.speak  # type: ignore[method-assign]
    began, first = time.perf_counter(), dict[int, float]()
    numbers = [engine.submit(_request(engine, seed)) for seed in range(count)]

    def go_on(until: int) -> None:
        while len(clock.frames) < count or min(clock.frames.values()) < until:
            for event in engine.step():
                if isinstance(event, SoundEvent):
                    if event.last:
                        raise LaunchError("bench speaking: expected speech that goes on, found its end")
                    first.setdefault(event.request, time.perf_counter() - began)

    go_on(WARM_UP)
    work = Work(cost.read) + cost.work(count, 0)
    before = sum(clock.frames.values()), clock.sound_frames, clock.total_s
    clock.frames_s.clear()

    def measured() -> float:
        began_measuring = time.perf_counter()
        go_on(WARM_UP + frames)
        return time.perf_counter() - began_measuring

    seconds, rates = probe.around(work, measured)
    made, sound_frames, speaking_s = (
        now - then
        for now, then in zip((sum(clock.frames.values()), clock.sound_frames, clock.total_s), before, strict=True)
    )
    engine.worker.speak = clock._speak  # type: ignore[method-assign]
    for number in numbers:
        engine.cancel(number)
    frame_s, predictor_s = map(statistics.median, zip(*clock.frames_s, strict=True))
    steps = made / count
    return {
        "requests": count,
        "real_time": made * 0.08 / seconds,
        "first_sound_s": max(first.values()),
        "frame_s": frame_s,
        "predictor_s": predictor_s,
        "talker_s": frame_s - predictor_s,
        "sound_s": (speaking_s - steps * frame_s) / sound_frames,
        "text_s": (seconds - speaking_s) / steps,
        "predictor_work": asdict(work),
        "rates": rates,
    }


def _request(engine: Engine, seed: int) -> Request:
    from tilerank.runtime.lead.engine import Request
    from tilerank.runtime.lead.sampling import SamplingParams
    from tilerank.runtime.protocol.params import SpeechParams
    from tilerank.runtime.protocol.prompt import Prompt
    from tilerank.runtime.protocol.speech_settings import read_speech_settings

    settings = read_speech_settings(engine.card)
    assert settings is not None
    turn = [settings.start, settings.user, *(TEXT_ID + seed + i for i in range(PROMPT_TOKENS))]
    prompt = Prompt([*turn, settings.start, settings.assistant, TEXT_ID])
    speech = SpeechParams(next(iter(settings.voices)))
    return Request(
        prompt,
        SamplingParams(max_new_tokens=TEXT_TOKENS, temperature=1.0, ignore_eos=True, seed=seed, speech=speech),
    )
