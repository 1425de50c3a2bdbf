"""`--audio-out FILE.wav`: the answer of `tilerank generate` is spoken as well. No torch in here."""

from __future__ import annotations

import argparse
import os
import wave
from pathlib import Path

from tilerank.loader.card import ModelCard, read_card
from tilerank.runtime.media.registry import with_options
from tilerank.runtime.protocol.params import SpeechParams
from tilerank.runtime.protocol.speech_settings import SAMPLE_RATE, voices_of

from ..errors import LaunchError
from ..options import model

_USUAL = "ethan"
"""The voice by default, where the model has it (transformers: the `generate` of Qwen3-Omni)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    speech = parser.add_argument_group("speech")
    speech.add_argument(
        "--audio-out",
        type=Path,
        metavar="FILE",
        help="write the spoken answer to a WAV file; the prompt goes through the chat template (Qwen3-Omni)",
    )
    speech.add_argument("--voice", metavar="NAME", help=f"with --audio-out (default: {_USUAL}, or the model's first)")


def read_speech(args: argparse.Namespace, card: ModelCard, prompts: int) -> SpeechParams | None:
    """Return how the answer is spoken; None if it is not. card: with the options of the model. Raises LaunchError for a
    model that does not speak, an unknown voice, several prompts, or a file that cannot be written."""
    if args.audio_out is None:
        if args.voice is not None:
            raise LaunchError("--voice needs --audio-out")
        return None
    voices = voices_of(card)
    if not voices:
        plain, options = read_card(model.model_directory(args)), model.model_options(args).family
        silencing = [name for name, value in options.items() if not voices_of(with_options(plain, {name: value}))]
        found = ", ".join(silencing) if voices_of(plain) else f"{card.model_type}, which does not"
        raise LaunchError(f"--audio-out: expected a model that speaks, found {found}")
    if prompts != 1:
        raise LaunchError(f"--audio-out: expected one prompt, found {prompts}")
    voice = (args.voice or (_USUAL if _USUAL in voices else voices[0])).lower()
    if voice not in voices:
        raise LaunchError(f"--voice: expected one of {', '.join(voices)}, found {voice}")
    path = args.audio_out
    if path.is_dir() or not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise LaunchError(f"--audio-out: {path} cannot be written")
    return SpeechParams(voice)


def write_wav(path: Path, samples: bytes) -> None:
    """Write samples of 16 bits to a file. Raises LaunchError."""
    try:
        with wave.open(str(path), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(SAMPLE_RATE)
            file.writeframes(samples)
    except OSError as e:
        raise LaunchError(f"--audio-out: {path} cannot be written: {e.strerror}") from e
