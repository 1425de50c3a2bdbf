"""Pictures for benchmarks: random ones of any size, and prompts that begin with a picture."""

import argparse
import io
import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from msgspec.structs import replace

from tilerank.loader.tokenizer import Tokenizer
from tilerank.runtime.media.decoder import Frames
from tilerank.runtime.media.errors import MediaError
from tilerank.runtime.media.registry import load_processor
from tilerank.runtime.prompt import Prompt

from ..errors import LaunchError
from .rank_job import model_card

MAX_SIDE = 1 << 14
_DETAIL = 16
"""Pixels between the random values of a JPEG; its pixels are interpolated, as a photograph is smooth."""

Size = tuple[int, int]
"""Width and height in pixels."""


def size_of(text: str) -> Size:
    """An argparse type: "1024x768"."""
    width, x, height = text.partition("x")
    if not (x and width.isdecimal() and height.isdecimal() and all(0 < int(n) <= MAX_SIDE for n in (width, height))):
        raise argparse.ArgumentTypeError(
            f"expected a width and a height up to {MAX_SIDE}, like 1024x768, found {text!r}"
        )
    return int(width), int(height)


def size_text(size: Size) -> str:
    return f"{size[0]}x{size[1]}"


def sizes_of(text: str) -> list[Size]:
    """An argparse type: distinct sizes, separated by commas."""
    return list(dict.fromkeys(size_of(part) for part in text.split(",")))


def random_frames(size: Size, seed: str) -> Frames:
    """Return a decoded picture of random pixels."""
    width, height = size
    return _frames(size, random.Random(seed).randbytes(3 * width * height))


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


class PicturePrompts:
    """Makes prompts that begin with a picture, for the model in `model_dir`. LaunchError if it takes text only."""

    def __init__(self, model_dir: Path) -> None:
        model_card(model_dir)
        self._tokenizer = Tokenizer(model_dir)
        processor = load_processor(model_dir, self._tokenizer)
        if processor is None:
            raise LaunchError(f"{model_dir} takes text only; expected a model that takes pictures")
        self._processor = processor

    def text(self, question: str) -> str:
        """Return the text of a conversation in which the user sends a picture and a question."""
        content = [{"type": "image"}, {"type": "text", "text": question}]
        return self._tokenizer.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)

    def prompt(self, text: str, frames: Frames) -> Prompt:
        """Return the prompt of a text from `text` and its picture. LaunchError if the model cannot take it."""
        try:
            return self._processor.prompt(text, [frames])
        except MediaError as e:
            raise LaunchError(f"a picture of {frames.size[2]}x{frames.size[1]}: {e}") from e

    def before(self, token_ids: Sequence[int], frames: Frames) -> Prompt:
        """Return the prompt of a picture, with what the chat template writes around it, before `token_ids`."""
        start = self.prompt(self.text(""), frames)
        if not start.positions:  # those of tokens count up
            return replace(start, token_ids=[*start.token_ids, *token_ids])
        position = max(map(max, start.positions)) + 1
        more = range(position, position + len(token_ids))
        positions = [[*axis, *more] for axis in start.positions]
        return Prompt([*start.token_ids, *token_ids], start.media, start.places, positions)

    def tokens_before(self, size: Size, question: str = "") -> int:
        """Return how many tokens `before` puts in front; with a question, those of the whole prompt."""
        return len(self.prompt(self.text(question), _frames(size, b"")).token_ids)

    def grid(self, size: Size) -> tuple[int, int, int]:
        """Return the patches of a picture, as in prompt.py: Medium."""
        return self.prompt(self.text(""), _frames(size, b"")).media[0].grid

    def source_tokens(self, size: Size) -> int:
        """Return how many tokens of the encoding of a picture the last token of a prompt sees by cross-attention."""
        sights = self.prompt(self.text(""), _frames(size, b"")).sights
        return sights[-1].count if sights else 0

    def sample(self, total: int, fps: float | None) -> list[int]:
        """The argument of a decoder."""
        return self._processor.sample(total, fps)


@cache
def picture_prompts(model_dir: Path) -> PicturePrompts:
    """Return the only `PicturePrompts` of a model, which takes time to make."""
    return PicturePrompts(model_dir)


def _frames(size: Size, data: bytes) -> Frames:
    width, height = size
    return Frames("image", (1, height, width), data, [0], None)
