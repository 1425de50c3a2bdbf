"""The processor of Mistral Small 3.1 and its successors: like PixtralProcessor of transformers 5.23.

A picture keeps its aspect and is made smaller, if it is too long, but never larger. Its tokens are written row by row;
a mark follows each row, another one the last.
"""

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
from .settings import (
    NESTED,
    PICTURES,
    channels,
    check_steps,
    check_types,
    find_section,
    read_if_listed,
    resampling,
    settings_file,
)

_MAX_SIDE = 1 << 13
_USUAL_MERGE, _USUAL_ID = 2, 10
_TYPES = {
    "image_processor_type": ("PixtralImageProcessor", "PixtralImageProcessorFast"),
    "processor_class": ("PixtralProcessor",),
}


@dataclass(frozen=True)
class Mistral3Settings:
    """How a picture becomes tokens. longest: pixels of its longer side, at most."""

    preprocessing: Preprocessing
    longest: int

    def tokens(self, height: int, width: int) -> tuple[int, int]:
        """Return the rows and columns of tokens of a picture (get_resize_output_image_size).

        Raises MediaError for a picture that would lose a side.
        """
        ratio, sides = max(height, width) / self.longest, (height, width)
        if ratio > 1:
            sides = int(height / ratio), int(width / ratio)
        if not all(sides):
            raise MediaError(
                f"expected a picture of which a side is at most {self.longest} times the other, found {height} by "
                f"{width} pixels"
            )
        rows, columns = (-(-side // self.preprocessing.token) for side in sides)
        return rows, columns

    @property
    def most(self) -> int:
        """Tokens of a picture, at most."""
        return (-(-self.longest // self.preprocessing.token)) ** 2


def read_mistral3_settings(model_dir: Path) -> Mistral3Settings:
    """Read the settings. Raises ConfigError that names the file and the field."""
    nested, fields = settings_file(model_dir, NESTED), find_section(model_dir, "image_processor", PICTURES)
    for found in (nested, fields):
        check_types(found, _TYPES)
    check_steps(fields)
    config = read_config_fields(model_dir)
    patch, merge = patches_of_token(config, config.object("vision_config"))
    if nested is not None:
        for key, expected in (("patch_size", patch), ("spatial_merge_size", merge)):
            if nested.has(key) and nested.integer(key, 1, _MAX_SIDE) != expected:
                raise nested.fail(key, f"the {expected} of config.json")
    preprocessing = Preprocessing(
        patch=patch,
        merge=merge,
        temporal=1,
        mean=channels(fields, "image_mean"),
        std=channels(fields, "image_std"),
        resample=resampling(fields, "bicubic"),
    )
    return Mistral3Settings(preprocessing, fields.object("size").integer("longest_edge", 1, _MAX_SIDE))


def patches_of_token(config: Fields, vision: Fields) -> tuple[int, int]:
    """Return the pixels of a side of a patch and the patches of a side of a token.

    config, vision: the fields of config.json and those of the tower.
    """
    c = config.with_defaults({"spatial_merge_size": _USUAL_MERGE})
    return vision.integer("patch_size", 1, _MAX_SIDE), c.integer("spatial_merge_size", 1, _MAX_SIDE)


class Mistral3Processor(PictureProcessor):
    """Reads the settings of a model directory. Raises ConfigError."""

    def __init__(self, settings: Mistral3Settings, model_dir: Path, tokenizer: Tokenizer) -> None:
        names = settings_file(model_dir, NESTED)
        key = "image_token_index"
        config = read_config_fields(model_dir).with_defaults({key: _USUAL_ID})

        def token(part: str, usual: str) -> str:
            name = f"image_{part}token"
            return names.text(name) if names is not None and names.has(name) else usual

        def id_of(name: str) -> int:
            if (found := tokenizer.token_id(name)) is None:
                raise config.fail(key, f"a tokenizer with {name}")
            return found

        super().__init__(tokenizer, config, key, token("", "[IMG]"))
        self._settings = settings
        self._break, self._end = id_of(token("break_", "[IMG_BREAK]")), id_of(token("end_", "[IMG_END]"))

    def write(self, text: str, media: Sequence[DecodedMedium]) -> str:
        self._check_marks(text.count(self._mark), media)
        return text

    def expand(self, token_ids: list[int], media: Sequence[DecodedMedium]) -> Prompt:
        self._check_tokens(token_ids, len(media))
        expanded: list[int] = []
        pictures: list[Medium] = []
        places: list[PlaceholderRange] = []
        merge = self._settings.preprocessing.merge
        for id in token_ids:
            if id != self._id:
                expanded.append(id)
                continue
            frames = media[len(pictures)]
            rows, columns = self._settings.tokens(*frames.size[1:])
            for row in range(rows):
                places.append(PlaceholderRange(len(expanded), columns, len(pictures), row * columns))
                expanded += [*[id] * columns, self._end if row == rows - 1 else self._break]
            pictures.append(Medium("image", frames.data, frames.size, (1, rows * merge, columns * merge)))
        return Prompt(expanded, pictures, places)

    def most_tokens(self, kind: str) -> int:
        return self._settings.most if kind == "image" else 0


def _processor(model_dir: Path, tokenizer: Tokenizer) -> Mistral3Processor | None:
    """Return None for a model without a tower, or without settings of pictures."""
    if not read_config_fields(model_dir).has("vision_config"):
        return None
    settings = read_if_listed(read_mistral3_settings, model_dir)
    return None if settings is None else Mistral3Processor(settings, model_dir, tokenizer)


FAMILIES = {"mistral3": Family(_processor)}
