"""`tilerank bench speaking`: answers that are spoken at once, as seconds of sound made in a second."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING, Any

from ..errors import LaunchError
from ..start import whole_number
from .json_rows import add_json_argument, check_json_argument, write_json
from .rank_job import (
    EngineJob,
    add_engine_arguments,
    add_model_arguments,
    add_rank_arguments,
    engine_dtype,
    is_rank,
    model_card,
    run_as_rank,
    run_ranks,
    whole_numbers,
)

if TYPE_CHECKING:
    from tilerank.runtime.engine import Engine, Request
    from tilerank.runtime.speech.speech_messages import SpeechStep
    from tilerank.runtime.speech.speech_rank import Spoken

PROMPT_TOKENS, TEXT_TOKENS = 30, 40
"""Of a user's turn, and of a spoken text."""
WARM_UP = 32
"""Frames of every request before those that are measured."""
LARGEST_PART = 25
"""Frames of a part of sound from then on, of which every request has one at least."""
TEXT_ID = 1000
"""A token that is in every vocabulary, and of no special meaning."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
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
    from tilerank.runtime.speech.speech_settings import voices_of

    if not voices_of(model_card(args.model)):
        raise LaunchError(f"{args.model}: expected a model that speaks, found one without a talker")
    if is_rank(args):
        tokens = max(args.requests) * (PROMPT_TOKENS + TEXT_TOKENS + 32)
        job = EngineJob(args, total_tokens=tokens, measure=lambda engine, *_: _measure(args, engine))
        return run_as_rank(args, job)
    check_json_argument(args)
    report = run_ranks(args, args.argv)
    print(f"{args.model.name}: {report['dtype']}, {report['isa']}\n")
    print("\n".join(table(report["rows"])))
    write_json(args, report["rows"])
    return 0


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Return a header and a line for each number of requests."""
    titles = ("x real time", 12), ("each", 8), ("first sound s", 15), ("frame ms", 10), ("sound ms", 10), ("text ms", 9)
    lines = ["requests  " + "".join(f"{title:>{width}}" for title, width in titles)]
    for row in rows:
        lines.append(
            f"{row['requests']:<10}{row['real_time']:>12.2f}{row['real_time'] / row['requests']:>8.2f}"
            f"{row['first_sound_s']:>15.2f}{1e3 * row['frame_s']:>10.1f}{1e3 * row['sound_s']:>10.1f}"
            f"{1e3 * row['text_s']:>9.1f}"
        )
    return lines


def _measure(args: argparse.Namespace, engine: Engine) -> dict[str, Any]:
    """Runs on rank 0."""
    from tilerank.kernels import core

    return {
        "isa": core.isa(),
        "dtype": str(engine_dtype(args)).removeprefix("torch."),
        "rows": [_measure_together(engine, count, args.frames) for count in args.requests],
    }


class _Clock:
    """The seconds of steps of speech, with and without sound, and how many frames of each request they had."""

    def __init__(self, engine: Engine) -> None:
        self.frames: dict[int, int] = {}
        self.plain_s: list[float] = []
        self.total_s = self.sound_frames = 0.0
        self._speak = engine.worker.speak

    def speak(self, step: SpeechStep) -> Spoken:
        began = time.perf_counter()
        spoken = self._speak(step)
        seconds = time.perf_counter() - began
        for frame in step.frames:
            self.frames[frame.sequence] = self.frames.get(frame.sequence, 0) + 1
        self.sound_frames += sum(sound.end - sound.first for sound in step.sounds)
        self.total_s += seconds
        if not step.sounds and not step.chunks:
            self.plain_s.append(seconds)
        return spoken


def _measure_together(engine: Engine, count: int, frames: int) -> dict[str, Any]:
    """Let `count` requests speak, and measure `frames` frames of each after the first ones.

    frame_s: of a step of frames. sound_s: of the sound of one frame. text_s: of everything else, for a step.
    """
    from tilerank.runtime.engine import SoundEvent

    clock = _Clock(engine)
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
    before = sum(clock.frames.values()), clock.sound_frames, clock.total_s
    clock.plain_s.clear()
    began_measuring = time.perf_counter()
    go_on(WARM_UP + frames)
    seconds = time.perf_counter() - began_measuring
    made, sound_frames, speaking_s = (
        now - then
        for now, then in zip((sum(clock.frames.values()), clock.sound_frames, clock.total_s), before, strict=True)
    )
    engine.worker.speak = clock._speak  # type: ignore[method-assign]
    for number in numbers:
        engine.cancel(number)
    frame_s = sorted(clock.plain_s)[len(clock.plain_s) // 2]
    steps = made / count
    return {
        "requests": count,
        "real_time": made * 0.08 / seconds,
        "first_sound_s": max(first.values()),
        "frame_s": frame_s,
        "sound_s": (speaking_s - steps * frame_s) / sound_frames,
        "text_s": (seconds - speaking_s) / steps,
    }


def _request(engine: Engine, seed: int) -> Request:
    from tilerank.runtime.engine import Request
    from tilerank.runtime.params import SpeechParams
    from tilerank.runtime.prompt import Prompt
    from tilerank.runtime.sampling import SamplingParams
    from tilerank.runtime.speech.speech_settings import read_speech_settings

    settings = read_speech_settings(engine.card)
    assert settings is not None
    turn = [settings.start, settings.user, *(TEXT_ID + seed + i for i in range(PROMPT_TOKENS))]
    prompt = Prompt([*turn, settings.start, settings.assistant, TEXT_ID])
    speech = SpeechParams(next(iter(settings.voices)))
    return Request(
        prompt,
        SamplingParams(max_new_tokens=TEXT_TOKENS, temperature=1.0, ignore_eos=True, seed=seed, speech=speech),
    )
