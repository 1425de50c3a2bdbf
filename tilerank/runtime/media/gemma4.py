"""The processor of Gemma 4: like Gemma4Processor of transformers 5.23.

A picture keeps its aspect and is resized, up or down, to as many patches as a token budget holds. Videos and sound are
not taken.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tilerank.loader.card import read_config_fields
from tilerank.loader.fields import Fields
from tilerank.loader.tokenizer import Tokenizer

from ..protocol.errors import MediaError
from ..protocol.prompt import Medium, PlaceholderRange, Prompt
from .decoder import DecodedMedium
from .family import Family
from .picture_processor import PictureProcessor
from .qwen_vl import Preprocessing
from .settings import NESTED, PICTURES, check_steps, check_types, find_section, resampling, settings_file

_MAX_SIDE = 1 << 13
_BUDGETS = (70, 140, 280, 560, 1120)
_USUAL_BUDGET = 280
_MIDDLE = (0.5, 0.5, 0.5)
_TYPES = {
    "image_processor_type": ("Gemma4ImageProcessor", "Gemma4ImageProcessorPil"),
    "processor_class": ("Gemma4Processor",),
}


@dataclass(frozen=True)
class Gemma4Settings:
    """How a picture becomes tokens. most: tokens of a picture."""

    preprocessing: Preprocessing
    most: int

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Return the rows and columns of patches of a picture (get_aspect_ratio_preserving_size).

        Raises MediaError for a picture of which no side would be as long as a token.
        """
        p = self.preprocessing
        token = p.patch * p.merge
        budget = self.most * p.merge**2 * p.patch**2
        factor = math.sqrt(budget / (height * width))
        rows, columns = (math.floor(factor * side / token) for side in (height, width))
        if not rows and not columns:
            raise MediaError(f"expected a picture of which a side fills a token, found {height} by {width} pixels")
        if not rows:
            rows, columns = 1, min(width // height, self.most)
        elif not columns:
            rows, columns = min(height // width, self.most), 1
        return rows * p.merge, columns * p.merge


def read_gemma4_settings(model_dir: Path) -> Gemma4Settings:
    """Read the settings. Raises ConfigError that names the file and the field."""
    vision, fields = (
        read_config_fields(model_dir).object("vision_config"),
        find_section(model_dir, "image_processor", PICTURES),
    )
    for found in (settings_file(model_dir, NESTED), fields):
        check_types(found, _TYPES)
    check_steps(fields, normalizes=False)
    key = "max_soft_tokens"
    most = fields.integer(key, 1, 1 << 16) if fields.has(key) else _USUAL_BUDGET
    if most not in _BUDGETS:
        raise fields.fail(key, f"one of {', '.join(map(str, _BUDGETS))}")
    patch, pooled = patches_of_token(vision)
    for key, expected in (("patch_size", patch), ("pooling_kernel_size", pooled)):
        if fields.has(key) and fields.integer(key, 1, _MAX_SIDE) != expected:
            raise fields.fail(key, f"the {expected} of vision_config.{key} of config.json")
    # The model maps values from 0 to 1 to -1 to 1.
    preprocessing = Preprocessing(patch, pooled, 1, _MIDDLE, _MIDDLE, resampling(fields, "bicubic"))
    return Gemma4Settings(preprocessing, most)


def patches_of_token(vision: Fields) -> tuple[int, int]:
    """Return the pixels of a side of a patch and the patches of a side of a token. vision: the fields of the tower."""
    c = vision.with_defaults({"patch_size": 16, "pooling_kernel_size": 3})
    return c.integer("patch_size", 1, _MAX_SIDE), c.integer("pooling_kernel_size", 1, _MAX_SIDE)


class Gemma4Processor(PictureProcessor):
    """Reads the settings of a model directory. Raises ConfigError."""

    def __init__(self, model_dir: Path, tokenizer: Tokenizer) -> None:
        names = tokenizer.special_tokens
        config = read_config_fields(model_dir).with_defaults({"image_token_id": 258880})
        super().__init__(tokenizer, config, "image_token_id", names.get("image_token", "<|image|>"))
        self._settings = read_gemma4_settings(model_dir)
        self._begin, self._end = names.get("boi_token", "<|image>"), names.get("eoi_token", "<image|>")

    def write(self, text: str, media: Sequence[DecodedMedium]) -> str:
        self._check_marks(text.count(self._mark), media)
        return text.replace(self._token, f"{self._begin}{self._token}{self._end}")

    def expand(self, token_ids: list[int], media: Sequence[DecodedMedium]) -> Prompt:
        self._check_tokens(token_ids, len(media))
        expanded: list[int] = []
        pictures: list[Medium] = []
        places: list[PlaceholderRange] = []
        for id in token_ids:
            tokens = 1
            if id == self._id:
                frames = media[len(pictures)]
                grid = (1, *self._settings.grid(*frames.size[1:]))
                tokens = grid[1] * grid[2] // self._settings.preprocessing.merge**2
                places.append(PlaceholderRange(len(expanded), tokens, len(pictures), 0))
                pictures.append(Medium("image", frames.data, frames.size, grid))
            expanded += [id] * tokens
        return Prompt(expanded, pictures, places)

    def most_tokens(self, kind: str) -> int:
        return self._settings.most if kind == "image" else 0


def _processor(model_dir: Path, tokenizer: Tokenizer) -> Gemma4Processor | None:
    """Return None for a model without a tower of pictures."""
    has_tower = read_config_fields(model_dir).has("vision_config")
    return Gemma4Processor(model_dir, tokenizer) if has_tower else None


FAMILIES = {"gemma4": Family(_processor, tool_calls="gemma4")}
