"""The processor of mllama (Llama-3.2-Vision): like MllamaProcessor of transformers 5.23.

A picture takes one token of the prompt. Its encoding is not inserted there: the tokens see it by cross-attention.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from tilerank.loader.card import ModelCard, read_config_fields
from tilerank.loader.fields import Fields
from tilerank.loader.tokenizer import Tokenizer

from ..protocol.prompt import Medium, Prompt, Segment, VisibleRange
from .decoder import DecodedMedium
from .family import Family, FamilyOption
from .picture_processor import PictureProcessor
from .settings import PICTURES, channels, check_steps, find_section, resampling

_MAX_SIDE = 1 << 13
_MAX_TILES = 64


@dataclass(frozen=True)
class TileSettings:
    """The settings by which pictures become tiles.

    tile: the side of a tile, in pixels. patch: that of a patch. most: tiles of a picture. mean, std: of red, green and
    blue, from 0 to 1.
    """

    tile: int
    patch: int
    most: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    resample: str

    @property
    def tokens(self) -> int:
        """Tokens of the encoding of a tile: its patches and a class token."""
        return (self.tile // self.patch) ** 2 + 1


def read_tile_settings(model_dir: Path) -> TileSettings:
    """Read the settings. Raises ConfigError, also if config.json says otherwise."""
    fields = find_section(model_dir, "image_processor", PICTURES)
    if fields.has("image_processor_type") and not fields.text("image_processor_type").startswith(
        "MllamaImageProcessor"
    ):
        raise fields.fail("image_processor_type", "MllamaImageProcessor")
    check_steps(fields, "do_pad")
    size, vision = fields.object("size"), read_config_fields(model_dir).object("vision_config")
    tile, most = size.integer("height", 1, _MAX_SIDE), fields.integer("max_image_tiles", 1, _MAX_TILES)
    if size.integer("width", 1, _MAX_SIDE) != tile:
        raise size.fail("width", f"the {tile} of height")
    for key, ours, value in (("image_size", "size", tile), ("max_num_tiles", "max_image_tiles", most)):
        if vision.integer(key, 1, _MAX_SIDE) != value:
            raise fields.fail(ours, f"{vision.values[key]} like vision_config.{key} of config.json")
    patch = vision.integer("patch_size", 1, tile)
    if tile % patch:
        raise vision.fail("patch_size", f"a divisor of image_size ({tile})")
    mean, std = channels(fields, "image_mean"), channels(fields, "image_std")
    return TileSettings(tile, patch, most, mean, std, resampling(fields, "bilinear"))


class MllamaProcessor(PictureProcessor):
    """Reads the settings of a model directory. Raises ConfigError."""

    def __init__(self, model_dir: Path, tokenizer: Tokenizer) -> None:
        token = tokenizer.special_tokens.get("image_token", "<|image|>")
        super().__init__(tokenizer, read_config_fields(model_dir), "image_token_index", token)
        self._settings = read_tile_settings(model_dir)

    def write(self, text: str, media: Sequence[DecodedMedium]) -> str:
        """Put the token that begins a text behind leading pictures, if the text has none."""
        begin = self._tokenizer.special_tokens.get("bos_token", "")
        if begin in text:
            return text
        pictures = re.match(f"(?:{re.escape(self._token)})*", text)
        assert pictures is not None, "an empty text matches"
        return text[: pictures.end()] + begin + text[pictures.end() :]

    def expand(self, token_ids: list[int], media: Sequence[DecodedMedium]) -> Prompt:
        places = [index for index, id in enumerate(token_ids) if id == self._id]
        self._check_marks(len(places), media)
        if not media:
            return Prompt(token_ids)
        s = self._settings
        pictures, counts = [], []
        for frames in media:
            rows, columns = choose_tiling(*frames.size[1:], s.tile, s.most)
            side = s.tile // s.patch
            pictures.append(Medium("image", frames.data, frames.size, (1, rows * side, columns * side)))
            counts.append(rows * columns * s.tokens)
        visible = _visible_ranges(places, counts, s)
        return Prompt(token_ids, pictures, source=_source(counts, s.most * s.tokens), visible_ranges=visible)

    def most_tokens(self, kind: str) -> int:
        return self._settings.most * self._settings.tokens if kind == "image" else 0


def _source(counts: list[int], whole: int) -> list[Segment]:
    """Return the tiles with pixels of all pictures, `counts` tokens each, and then the empty tiles of all, so that what
    a token may see is one range. whole: tokens of the encoding of a picture."""
    tiles = [Segment(medium, 0, count) for medium, count in enumerate(counts)]
    empty = [Segment(medium, count, whole - count) for medium, count in enumerate(counts) if count < whole]
    return tiles + empty


def _visible_ranges(places: list[int], counts: list[int], settings: TileSettings) -> list[VisibleRange]:
    """Return what the tokens see: those from a picture on that picture, and those behind several pictures in a row all
    of these. get_cross_attention_token_mask of processing_mllama.py.

    Those before the first picture see everything, empty tiles as well, and leave out the MLP of cross-attention layers:
    transformers clears a row of its mask that would hide everything.
    """
    starts = [sum(counts[:medium]) for medium in range(len(counts) + 1)]
    first = 0
    visible = [VisibleRange(0, 0, len(counts) * settings.most * settings.tokens, False)] if places[0] else []
    for medium, (before, place) in enumerate(pairwise([-2, *places])):
        if place != before + 1:
            first = medium
        visible.append(VisibleRange(place, starts[first], starts[medium + 1] - starts[first], True))
    return visible


def tilings(most: int) -> list[tuple[int, int]]:
    """Return the rows and columns of every tiling of at most `most` tiles, in the order of the aspect ratio ids, which
    begin with 1."""
    sides = range(1, most + 1)
    return [(rows, columns) for rows in sides for columns in sides if rows * columns <= most]


def choose_tiling(height: int, width: int, tile: int, most: int) -> tuple[int, int]:
    """Return rows and columns of tiles for a picture: get_optimal_tiled_canvas of image_processing_mllama.py.

    That is the smallest magnification, or else the least reduction; among equals the tiling of the fewest tiles.
    """
    scales = {(rows, columns): min(rows * tile / height, columns * tile / width) for rows, columns in tilings(most)}
    larger = [scale for scale in scales.values() if scale >= 1]
    chosen = min(larger) if larger else max(scales.values())
    return min((tiling for tiling, scale in scales.items() if scale == chosen), key=math.prod)


def fit(height: int, width: int, rows: int, columns: int, tile: int) -> tuple[int, int]:
    """Return the height and width to which a picture is resized within rows x columns tiles, its aspect ratio about
    kept: get_image_size_fit_to_canvas of image_processing_mllama.py."""
    most_height, most_width = min(max(height, tile), rows * tile), min(max(width, tile), columns * tile)
    vertical, horizontal = most_height / height, most_width / width
    if horizontal < vertical:
        return min(math.floor(height * horizontal) or 1, most_height), most_width
    return most_height, min(math.floor(width * vertical) or 1, most_width)


_TAKEN = "intermediate_layers_indices"


def read_taken_layers(vision: Fields, layers: int) -> tuple[int, ...]:
    """Read the layers of the tower whose inputs become part of an encoding; `layers`, the number of layers, stands for
    the output of the last."""
    listed = vision.values.get(_TAKEN)
    if not isinstance(listed, list) or any(type(i) is not int or not 0 <= i <= layers for i in listed):
        raise vision.fail(_TAKEN, f"a list of layers from 0 to {layers}")
    return tuple(listed)


def _with_intermediate(card: ModelCard, rule: str) -> ModelCard:
    """Return the card of a model whose encodings have these values. Raises ConfigError for other families.

    The model was trained with the inputs of the layers (Meta's `ImageTransformer`). transformers 5.23 takes their
    outputs (huggingface/transformers#40083), which are the inputs of the next layers.
    """
    if card.model_type not in FAMILIES:
        raise card.fields.fail("model_type", f"'mllama' with --mllama-intermediate {rule}")
    if rule == "meta":
        return card
    vision = card.fields.object("vision_config")
    layers = read_taken_layers(vision, vision.integer("num_hidden_layers", 1, 1 << 10) - 1)
    values = {**card.fields.values, "vision_config": {**vision.values, _TAKEN: [layer + 1 for layer in layers]}}
    return replace(card, fields=Fields(card.fields.path, values))


_INTERMEDIATE = FamilyOption(
    "--mllama-intermediate",
    "Llama-3.2-Vision: take the inputs of the tower's intermediate layers, with which it was trained, or "
    "their outputs, as transformers 5.23 does, to compare with it (default: meta)",
    _with_intermediate,
    choices=("meta", "transformers"),
)
FAMILIES = {"mllama": Family(MllamaProcessor, tool_calls="llama", options=(_INTERMEDIATE,))}
