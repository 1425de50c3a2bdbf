"""The processor of Gemma 3: like Gemma3Processor of transformers 5.23.

The text that stands for a picture has newlines around it, which become tokens together with those of the message. A
picture of any shape is squeezed into a square. With pan and scan, which files may switch on, crops of a long picture
follow it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tilerank.loader.card import read_config_fields
from tilerank.loader.fields import Fields
from tilerank.loader.tokenizer import Tokenizer

from ..protocol.prompt import Medium, PlaceholderRange, Prompt
from .decoder import DecodedMedium
from .family import Family
from .picture_processor import PictureProcessor
from .qwen_vl import Preprocessing
from .settings import NESTED, PICTURES, channels, check_steps, check_types, find_section, resampling, settings_file

_MAX_SIDE = 1 << 13
_TYPES = {
    "image_processor_type": ("Gemma3ImageProcessor", "Gemma3ImageProcessorFast"),
    "processor_class": ("Gemma3Processor",),
}


@dataclass(frozen=True)
class PanAndScan:
    """When a long picture is cropped: its sides have at least this ratio, and crops at least `least` pixels.

    most: the number of crops.
    """

    ratio: float
    least: int
    most: int


@dataclass(frozen=True)
class Gemma3Settings:
    """How a picture becomes tokens.

    side: patches of a side of the square. pan_and_scan: None if it is off.
    """

    preprocessing: Preprocessing
    side: int
    pan_and_scan: PanAndScan | None

    @property
    def tokens(self) -> int:
        """Tokens of a picture, and of each crop."""
        return (self.side // self.preprocessing.merge) ** 2


def read_gemma3_settings(model_dir: Path) -> Gemma3Settings:
    """Read the settings. Raises ConfigError that names the file and the field."""
    config = read_config_fields(model_dir)
    vision, fields = config.object("vision_config"), find_section(model_dir, "image_processor", PICTURES)
    for found in (settings_file(model_dir, NESTED), fields):
        check_types(found, _TYPES)
    check_steps(fields)
    patch, side, pooled = patches_of_token(config, vision)
    size = fields.object("size")
    for key in ("height", "width"):
        if size.integer(key, 1, _MAX_SIDE) != side * patch:
            raise size.fail(key, f"the {side * patch} of vision_config.image_size of config.json")
    preprocessing = Preprocessing(
        patch=patch,
        merge=pooled,
        temporal=1,
        mean=channels(fields, "image_mean"),
        std=channels(fields, "image_std"),
        resample=resampling(fields, "bilinear"),
    )
    return Gemma3Settings(preprocessing, side, _pan_and_scan(fields) if fields.flag("do_pan_and_scan") else None)


def patches_of_token(config: Fields, vision: Fields) -> tuple[int, int, int]:
    """Return the pixels of a patch, the patches of a side of a picture, and those of a side of a token.

    config, vision: the fields of config.json and those of the tower. Raises ConfigError.
    """
    image, patch = vision.integer("image_size", 1, _MAX_SIDE), vision.integer("patch_size", 1, _MAX_SIDE)
    tokens, side = config.integer("mm_tokens_per_image", 1, 1 << 16), image // patch
    across = math.isqrt(tokens)
    if image % patch or across**2 != tokens or side % across:
        raise config.fail("mm_tokens_per_image", f"a square of a divisor of the {side} patches of a side")
    return patch, side, side // across


def _pan_and_scan(fields: Fields) -> PanAndScan:
    def integer(key: str, usual: int) -> int:
        return fields.integer(key, 1, _MAX_SIDE) if fields.has(key) else usual

    key = "pan_and_scan_min_ratio_to_activate"
    ratio = fields.number(key, 0.0, 1e6) if fields.has(key) else 1.2
    return PanAndScan(ratio, integer("pan_and_scan_min_crop_size", 256), integer("pan_and_scan_max_num_crops", 4))


class _Crop(NamedTuple):
    top: int
    left: int
    bottom: int
    right: int


class Gemma3Processor(PictureProcessor):
    """Reads the settings of a model directory. Raises ConfigError."""

    def __init__(self, model_dir: Path, tokenizer: Tokenizer) -> None:
        names, config = tokenizer.special_tokens, read_config_fields(model_dir)
        token, mark = names.get("image_token", "<image_soft_token>"), names.get("boi_token", "<start_of_image>")
        super().__init__(tokenizer, config, "image_token_index", token, mark)
        self._settings = read_gemma3_settings(model_dir)
        self._end = names.get("eoi_token", "<end_of_image>")

    def write(self, text: str, media: Sequence[DecodedMedium]) -> str:
        pieces = text.split(self._mark)
        self._check_marks(len(pieces) - 1, media)
        for number, frames in enumerate(media):
            pieces[number] += self._written(len(self._crops(frames)))
        return "".join(pieces)

    def expand(self, token_ids: list[int], media: Sequence[DecodedMedium]) -> Prompt:
        side, tokens = self._settings.side, self._settings.tokens
        pictures = []
        for frames in media:
            whole = Medium("image", frames.data, frames.size, (1, side, side))
            pictures += [whole, *(_cropped(whole, crop) for crop in self._crops(frames))]
        self._check_tokens(token_ids, len(pictures))
        expanded: list[int] = []
        places: list[PlaceholderRange] = []
        for id in token_ids:
            if id == self._id:
                places.append(PlaceholderRange(len(expanded), tokens, len(places), 0))
            expanded += [id] * (tokens if id == self._id else 1)
        return Prompt(expanded, pictures, places)

    def most_tokens(self, kind: str) -> int:
        pan_and_scan = self._settings.pan_and_scan
        most = 1 + (pan_and_scan.most if pan_and_scan else 0)
        return most * self._settings.tokens if kind == "image" else 0

    def _written(self, crops: int) -> str:
        """Return the text of a picture and its crops."""
        one = f"\n\n{self._mark}{self._token}{self._end}\n\n"
        if not crops:
            return one
        cropped = " ".join([one] * crops)
        return f"Here is the original image {one} and here are some crops to help you see better {cropped}"

    def _crops(self, frames: DecodedMedium) -> list[_Crop]:
        pan_and_scan = self._settings.pan_and_scan
        return choose_crops(*frames.size[1:], pan_and_scan) if pan_and_scan else []


def choose_crops(height: int, width: int, rule: PanAndScan) -> list[_Crop]:
    """Return the crops of a picture, along its long side: pan_and_scan_batched of image_processing_gemma3.py."""
    long, short = max(height, width), min(height, width)
    if long / short < rule.ratio:
        return []
    count = min(max(min(math.floor(long / rule.least), math.floor(long / short + 0.5)), 2), rule.most)
    step = math.ceil(long / count)
    if min(step, short) < rule.least:
        return []
    starts = range(0, step * count, step)
    if width >= height:
        return [_Crop(0, start, height, min(start + step, width)) for start in starts]
    return [_Crop(start, 0, min(start + step, height), width) for start in starts]


def _cropped(picture: Medium, crop: _Crop) -> Medium:
    pixels = np.frombuffer(picture.frames, np.uint8).reshape(*picture.size[1:], 3)
    own = pixels[crop.top : crop.bottom, crop.left : crop.right]
    return Medium("image", own.tobytes(), (1, *own.shape[:2]), picture.grid)


FAMILIES = {"gemma3": Family(Gemma3Processor)}
