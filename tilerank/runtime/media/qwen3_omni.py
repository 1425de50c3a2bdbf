"""The processor of Qwen3-Omni: like Qwen3OmniMoeProcessor of transformers 5.23."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from tilerank.loader.card import read_config_fields
from tilerank.loader.errors import ConfigError
from tilerank.loader.fields import Fields
from tilerank.loader.tokenizer import Tokenizer

from ..protocol.errors import MediaError
from ..protocol.prompt import Medium, PlaceholderRange, Prompt
from ..protocol.speech_settings import silenced
from .decoder import DecodedMedium
from .family import Family, FamilyOption
from .placeholders import PlaceholderProcessor, name_medium
from .qwen_vl import (
    UNKNOWN_FPS,
    Area,
    Preprocessing,
    check_vision_config,
    most_picture_tokens,
    picture_size,
    read_area,
    read_patches,
)
from .settings import NESTED, PICTURES, check_types, section, settings_file
from .streams import MAX_SECONDS, RATE

_TYPES = {
    "image_processor_type": ("Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast"),
    "feature_extractor_type": ("WhisperFeatureExtractor",),
    "processor_class": ("Qwen3OmniMoeProcessor",),
}
_FRAME = Area(128 * 32 * 32, 768 * 32 * 32)
"""Bounds of the pixels of a frame of a video: transformers' processor of Qwen3-Omni, whatever the files say."""
HOP = 160
"""Samples from one frame of a spectrogram to the next."""
CHUNK = 100
"""Frames of a spectrogram that are convolved together."""
CHUNK_STEPS = 13
"""Tokens that a whole chunk becomes."""
_SOUND = {"sampling_rate": RATE, "n_fft": 400, "hop_length": HOP}


@dataclass(frozen=True)
class OmniSettings:
    """picture: bounds of the pixels of a picture. per_second: positions of a second of a video."""

    preprocessing: Preprocessing
    picture: Area
    per_second: int


def read_settings(model_dir: Path) -> OmniSettings:
    """Read the settings. Raises ConfigError that names the file and the field."""
    nested, plain = settings_file(model_dir, NESTED), settings_file(model_dir, PICTURES)
    pictures = section(nested, "image_processor") or plain
    sound = section(nested, "feature_extractor") or plain
    if pictures is None or sound is None:
        raise ConfigError(
            f"{model_dir}: expected {PICTURES}, or {NESTED} with image_processor and feature_extractor, found neither"
        )
    for fields in (nested, pictures, sound):
        check_types(fields, _TYPES)
    preprocessing = read_patches(pictures)
    check_vision_config(model_dir, preprocessing, pictures)
    thinker = read_config_fields(model_dir).object("thinker_config")
    _check_sound(sound, thinker.object("audio_config").integer("num_mel_bins", 1, 1 << 10))
    return OmniSettings(
        preprocessing=preprocessing,
        picture=read_area(pictures, old_keys=True),
        per_second=thinker.integer("position_id_per_seconds", 1, 1 << 10),
    )


def _check_sound(fields: Fields, mels: int) -> None:
    for key, value in {**_SOUND, "feature_size": mels}.items():
        if fields.integer(key, 1, 1 << 20) != value:
            raise fields.fail(key, str(value))
    if fields.has("dither") and fields.values["dither"] != 0:
        raise fields.fail("dither", "0")


_FPS = 2.0
_MOST_FRAMES = 768
_LEAST_FRAMES = 4
_SECONDS_OF_FRAME = 1
"""The time between two frames of a video that transformers assumes by default."""

Point = tuple[int, int, int]


@dataclass(frozen=True)
class _Token:
    """A token of a medium: its number in the medium and its position from the beginning of the expansion."""

    medium: int
    number: int
    point: Point
    id: int


@dataclass(frozen=True)
class _Expansion:
    """The tokens that replace a placeholder. length: of the positions, after which the text goes on."""

    tokens: list[_Token]
    length: int


class QwenOmniProcessor(PlaceholderProcessor):
    """Reads the settings of a model directory. Raises ConfigError."""

    kinds = ("image", "video", "audio")
    convention = "the pairs of frames of a video count as two seconds, as in transformers without an fps"

    def __init__(self, model_dir: Path, tokenizer: Tokenizer) -> None:
        super().__init__(model_dir, tokenizer)
        settings = read_settings(model_dir)
        self._preprocessing, self._picture = settings.preprocessing, settings.picture
        self._step = settings.per_second * self._preprocessing.temporal * _SECONDS_OF_FRAME
        names = tokenizer.special_tokens
        self._audio_start = names.get("audio_bos_token", "<|audio_start|>")
        self._audio_end = names.get("audio_eos_token", "<|audio_end|>")
        self._ids = {kind: id for id, kind in self._kinds.items()}

    def write(self, text: str, media: Sequence[DecodedMedium]) -> str:
        pieces = self._split(text, media)
        for index, frames in enumerate(media):
            if frames.sound:
                pieces[2 * index + 1] = f"{self._audio_start}{pieces[2 * index + 1]}{self._audio_end}"
        return "".join(pieces)

    def expand(self, token_ids: list[int], media: Sequence[DecodedMedium]) -> Prompt:
        converted, expansions = list[Medium](), list[_Expansion]()
        for index, frames in enumerate(media):
            try:
                medium = self._medium(frames)
                sound = _sound(frames.sound) if frames.sound else None
            except MediaError as failure:
                raise MediaError(f"{name_medium(media, index)}: {failure}") from None
            number = len(converted)
            converted.append(medium)
            if sound is None:
                expansions.append(self._expansion(medium, number))
                continue
            converted.append(sound)
            expansions.append(_interleaved(self._tokens_of(medium, number), self._tokens_of(sound, number + 1)))
        self._check_places(token_ids, len(expansions))
        return _expand(token_ids, self._kinds, expansions, converted)

    def sample(self, total: int, fps: float | None) -> list[int]:
        """As Qwen2VLVideoProcessor with fps=2."""
        count = total / (fps or UNKNOWN_FPS) * _FPS
        most = min(_MOST_FRAMES, total) // 2 * 2
        pairs = int(min(max(count, _LEAST_FRAMES), most, total)) // 2
        if not pairs:
            return [0]
        return [int(i * (total / (2 * pairs))) for i in range(2 * pairs)]

    def most_tokens(self, kind: str) -> int:
        if kind == "image":
            return most_picture_tokens(self._preprocessing.token, self._picture)
        if kind == "audio":
            return audio_tokens(MAX_SECONDS * RATE // HOP)
        groups = _MOST_FRAMES // self._preprocessing.temporal
        return groups * most_picture_tokens(self._preprocessing.token, _FRAME)

    def _medium(self, frames: DecodedMedium) -> Medium:
        if frames.kind == "audio":
            return _sound(frames.data)
        count, height, width = frames.size
        p = self._preprocessing
        if count > _MOST_FRAMES:
            raise MediaError(f"expected at most {_MOST_FRAMES} frames, found {count}")
        area = self._picture if frames.kind == "image" else _FRAME
        new_height, new_width = picture_size(height, width, p.token, area)
        grid = (-(-count // p.temporal), new_height // p.patch, new_width // p.patch)
        return Medium(frames.kind, frames.data, frames.size, grid)

    def _tokens_of(self, medium: Medium, number: int) -> list[_Token]:
        id = self._ids[medium.kind]
        if medium.kind == "audio":
            return [_Token(number, i, (i, i, i), id) for i in range(audio_tokens(medium.grid[0]))]
        groups, rows, columns = medium.grid[0], *(side // self._preprocessing.merge for side in medium.grid[1:])
        points = [
            (group * self._step, row, column)
            for group in range(groups)
            for row in range(rows)
            for column in range(columns)
        ]
        return [_Token(number, i, point, id) for i, point in enumerate(points)]

    def _expansion(self, medium: Medium, number: int) -> _Expansion:
        tokens = self._tokens_of(medium, number)
        return _Expansion(tokens, _end(tokens))


def audio_tokens(frames: int) -> int:
    """Return the tokens of a spectrogram of so many frames: three convolutions halve each chunk, rounding up."""
    whole, rest = divmod(frames, CHUNK)
    for _ in range(3):
        rest = -(-rest // 2)
    return whole * CHUNK_STEPS + rest


def _sound(samples: bytes) -> Medium:
    count = len(samples) // 4
    if count < HOP:
        raise MediaError(f"expected at least {HOP} samples of sound ({RATE} a second), found {count}")
    return Medium("audio", samples, (count, 1, 1), (count // HOP, 1, 1))


def _end(tokens: Sequence[_Token]) -> int:
    """Return the position after the largest of these."""
    return max(max(token.point) for token in tokens) + 1


def _interleaved(video: list[_Token], sound: list[_Token]) -> _Expansion:
    """Merge tokens by time, those of a video first where it is equal.

    When one of both has ended, the rest of the other is one piece, and text goes on after the largest position of it.
    """
    merged, v, a = list[_Token](), 0, 0
    while v < len(video) and a < len(sound):
        if video[v].point[0] <= sound[a].point[0]:
            merged.append(video[v])
            v += 1
        else:
            merged.append(sound[a])
            a += 1
    rest = video[v:] + sound[a:]
    return _Expansion(merged + rest, _end(rest))


def _expand(ids: list[int], kinds: dict[int, str], expansions: list[_Expansion], media: list[Medium]) -> Prompt:
    """Put expansions in the place of placeholders. Without pictures and videos, tokens are counted."""
    expanded, places, points = list[int](), list[PlaceholderRange](), list[Point]()
    position = 0
    left: Iterator[_Expansion] = iter(expansions)
    for id in ids:
        if id not in kinds:
            expanded.append(id)
            points.append((position,) * 3)
            position += 1
            continue
        expansion = next(left)
        for number, run in groupby(expansion.tokens, lambda token: token.medium):
            tokens = list(run)
            places.append(PlaceholderRange(len(expanded), len(tokens), number, tokens[0].number))
            expanded += [token.id for token in tokens]
            points += [(position + t, position + h, position + w) for t, h, w in (token.point for token in tokens)]
        position += expansion.length
    if all(medium.kind == "audio" for medium in media):
        return Prompt(expanded, media, places)
    return Prompt(expanded, media, places, [list(axis) for axis in zip(*points, strict=True)])


_NO_TALKER = FamilyOption(
    "--no-talker",
    "Qwen3-Omni: leave the weights of speech out; it answers in text alone",
    lambda card, _: silenced(card),
)
FAMILIES = {"qwen3_omni_moe": Family(QwenOmniProcessor, tool_calls="hermes", options=(_NO_TALKER,))}
