"""Pictures and sound for benchmarks: random ones of any size, and prompts that begin with one."""

import argparse
import io
import random
import wave
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from tilerank.loader.card import read_card
from tilerank.loader.tokenizer import Tokenizer
from tilerank.runtime.media.decoder import DecodedMedium
from tilerank.runtime.media.registry import load_processor
from tilerank.runtime.media.streams import MAX_SECONDS, RATE
from tilerank.runtime.protocol.errors import MediaError
from tilerank.runtime.protocol.prompt import Prompt

from ..errors import LaunchError

MAX_SIDE = 1 << 14
_DETAIL = 16
"""Pixels between the random values of a JPEG; its pixels are interpolated, as a photograph is smooth."""

Size = tuple[int, int]
"""Width and height in pixels."""


class Clip(NamedTuple):
    """The size of a clip of sound."""

    seconds: int


MediumSize = Size | Clip


def size_of(text: str) -> Size:
    """An argparse type: "1024x768"."""
    width, x, height = text.partition("x")
    if not (x and width.isdecimal() and height.isdecimal() and all(0 < int(n) <= MAX_SIDE for n in (width, height))):
        raise argparse.ArgumentTypeError(
            f"expected a width and a height up to {MAX_SIDE}, like 1024x768, found {text!r}"
        )
    return int(width), int(height)


def size_text(size: MediumSize) -> str:
    return f"{size.seconds} s" if isinstance(size, Clip) else f"{size[0]}x{size[1]}"


def kind_of(size: MediumSize) -> str:
    """Return the kind of a medium of this size, as in DecodedMedium."""
    return "audio" if isinstance(size, Clip) else "image"


def clips_of(text: str) -> list[Clip]:
    """An argparse type: distinct numbers of seconds, separated by commas."""
    found = []
    for part in text.split(","):
        if not part.isdecimal() or not 0 < int(part) <= MAX_SECONDS:
            raise argparse.ArgumentTypeError(f"expected seconds up to {MAX_SECONDS}, found {part!r}")
        found.append(Clip(int(part)))
    return list(dict.fromkeys(found))


def sizes_of(text: str) -> list[Size]:
    """An argparse type: distinct sizes, separated by commas."""
    return list(dict.fromkeys(size_of(part) for part in text.split(",")))


def random_frames(size: Size, seed: str) -> DecodedMedium:
    """Return a decoded picture of random pixels."""
    width, height = size
    return _frames(size, random.Random(seed).randbytes(3 * width * height))


def random_file(size: MediumSize, seed: str) -> bytes:
    """Return a JPEG or WAV file."""
    return random_wav(size, seed) if isinstance(size, Clip) else random_jpeg(size, seed)


def random_wav(size: Clip, seed: str) -> bytes:
    """Return the file of random samples of 16 bits, of one channel in the rate of the models."""
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(RATE)
        out.writeframes(random.Random(seed).randbytes(2 * RATE * size.seconds))
    return file.getvalue()


def random_jpeg(size: Size, seed: str) -> bytes:
    """Return the file of a smooth random picture. LaunchError if Pillow is not installed."""
    try:
        from PIL import Image
    except ImportError as e:
        raise LaunchError(f"making pictures needs Pillow, which cannot be imported: {e}") from e
    columns, rows = (-(-side // _DETAIL) for side in size)
    small = Image.frombytes("RGB", (columns, rows), random.Random(seed).randbytes(3 * columns * rows))
    file = io.BytesIO()
    small.resize(size, Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
    return file.getvalue()


class MediaPrompts:
    """Makes prompts that begin with a picture or sound, for the model in `model_dir`. LaunchError if it takes text
    only."""

    def __init__(self, model_dir: Path) -> None:
        read_card(model_dir)
        self._tokenizer = Tokenizer(model_dir)
        processor = load_processor(model_dir, self._tokenizer)
        if processor is None:
            raise LaunchError(f"{model_dir} takes text only; expected a model that takes pictures")
        self._processor = processor
        self._model_dir = model_dir

    def check(self, size: MediumSize) -> None:
        """Raise LaunchError if the model does not take media of this kind."""
        if (kind := kind_of(size)) not in self._processor.kinds:
            raise LaunchError(f"{self._model_dir} takes {' and '.join(self._processor.kinds)}, not {kind}")

    def text(self, question: str, kind: str = "image") -> str:
        """Return the text of a conversation in which the user sends a medium and a question."""
        content = [{"type": kind}, {"type": "text", "text": question}]
        return self._tokenizer.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)

    def prompt(self, text: str, frames: DecodedMedium) -> Prompt:
        """Return the prompt of a text from `text` and its medium. LaunchError if the model cannot take it."""
        try:
            return self._processor.prompt(text, [frames])
        except MediaError as e:
            raise LaunchError(f"a medium of size {frames.size}: {e}") from e

    def before(self, token_ids: Sequence[int], frames: DecodedMedium) -> Prompt:
        """Return the prompt of a medium, with what the chat template writes around it, before `token_ids`."""
        start = self.prompt(self.text("", frames.kind), frames)
        if not start.positions:  # those of tokens count up
            return replace(start, token_ids=[*start.token_ids, *token_ids])
        position = max(map(max, start.positions)) + 1
        more = range(position, position + len(token_ids))
        positions = [[*axis, *more] for axis in start.positions]
        return Prompt([*start.token_ids, *token_ids], start.media, start.placeholder_ranges, positions)

    def tokens_before(self, size: MediumSize, question: str = "") -> int:
        """Return how many tokens `before` puts in front; with a question, those of the whole prompt."""
        return len(self._empty(size, question).token_ids)

    def grid(self, size: MediumSize) -> tuple[int, int, int]:
        """Return the grid of a medium, as in prompt.py: Medium."""
        return self._empty(size).media[0].grid

    def source_tokens(self, size: Size) -> int:
        """Return how many tokens of the encoding of a picture the last token of a prompt sees by cross-attention."""
        visible_ranges = self._empty(size).visible_ranges
        return visible_ranges[-1].count if visible_ranges else 0

    def _empty(self, size: MediumSize, question: str = "") -> Prompt:
        """Return the prompt of a medium without pixels, or of silence."""
        if isinstance(size, Clip):
            frames = DecodedMedium("audio", (RATE * size.seconds, 1, 1), bytes(4 * RATE * size.seconds), [], None)
        else:
            frames = _frames(size, b"")
        return self.prompt(self.text(question, frames.kind), frames)

    def sample(self, total: int, fps: float | None) -> list[int]:
        """The argument of a decoder."""
        return self._processor.sample(total, fps)


@cache
def media_prompts(model_dir: Path) -> MediaPrompts:
    """Return the only `MediaPrompts` of a model, which takes time to make."""
    return MediaPrompts(model_dir)


def _frames(size: Size, data: bytes) -> DecodedMedium:
    width, height = size
    return DecodedMedium("image", (1, height, width), data, [0], None)
