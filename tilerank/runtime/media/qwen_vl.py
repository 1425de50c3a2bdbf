"""The processor of Qwen3-VL and Qwen3.5, dense and MoE: like Qwen3VLProcessor of transformers 5.23."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tilerank.loader.card import read_config_fields
from tilerank.loader.errors import ConfigError
from tilerank.loader.fields import Fields
from tilerank.loader.tokenizer import Tokenizer

from ..protocol.errors import MediaError
from ..protocol.prompt import Medium, PlaceholderRange, Prompt
from .decoder import DecodedMedium
from .family import Family
from .placeholders import PlaceholderProcessor, name_medium
from .processor import Processor
from .settings import NESTED, PICTURES, channels, check_steps, check_types, find_section, resampling, settings_file

VIDEOS = "video_preprocessor_config.json"
_TYPES = {
    "image_processor_type": ("Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast"),
    "video_processor_type": ("Qwen3VLVideoProcessor",),
    "processor_class": ("Qwen3VLProcessor",),
}
_MAX_SIDE = 1 << 10
_MAX_AREA = 1 << 40
_MAX_RATIO = 200
UNKNOWN_FPS = 24.0
"""Frames per second of a video that does not give them."""


@dataclass(frozen=True)
class Preprocessing:
    """The settings by which pixels become patches; the same for pictures and videos.

    patch: side of a patch. merge: side of a token, in patches. temporal: frames of a patch. resample: "bicubic" or
    "bilinear". mean, std: of red, green and blue, from 0 to 1.
    """

    patch: int
    merge: int
    temporal: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    resample: str

    @property
    def token(self) -> int:
        """Side of a token, in pixels."""
        return self.patch * self.merge


@dataclass(frozen=True)
class Area:
    """Bounds of the pixels after resizing: of a picture, or of all frames of a video together."""

    least: int
    most: int


@dataclass(frozen=True)
class FrameSampling:
    """The number of frames taken of a video: `fps` of a second, from `least` to `most`.

    frame_tokens: bound of the tokens of a frame; None for no bound.
    """

    fps: float
    least: int
    most: int
    frame_tokens: int | None


@dataclass(frozen=True)
class QwenVLSettings:
    """keeps_markers: whether the vision_start and vision_end around a video placeholder stay around its frames."""

    preprocessing: Preprocessing
    picture: Area
    video: Area
    sampling: FrameSampling
    keeps_markers: bool


def read_settings(model_dir: Path) -> QwenVLSettings:
    """Read the settings. Raises ConfigError that names the file and the field."""
    nested = settings_file(model_dir, NESTED)
    pictures = find_section(model_dir, "image_processor", PICTURES)
    videos = find_section(model_dir, "video_processor", VIDEOS, PICTURES)
    for fields in (nested, pictures, videos):
        check_types(fields, _TYPES)
    preprocessing = read_patches(pictures)
    for_videos = read_patches(videos)
    if for_videos != preprocessing:
        raise ConfigError(f"{videos.path}: expected the patches of {pictures.path}, found {for_videos}")
    check_vision_config(model_dir, preprocessing, pictures)
    return QwenVLSettings(
        preprocessing=preprocessing,
        picture=read_area(pictures, old_keys=True),
        video=read_area(videos, old_keys=False),
        sampling=_sampling(videos),
        keeps_markers=not any(_is_version_4(fields) for fields in (nested, videos) if fields is not None),
    )


def read_patches(fields: Fields) -> Preprocessing:
    """Read how pixels become patches."""
    check_steps(fields)
    return Preprocessing(
        patch=fields.integer("patch_size", 1, _MAX_SIDE),
        merge=fields.integer("merge_size", 1, _MAX_SIDE),
        temporal=fields.integer("temporal_patch_size", 1, _MAX_SIDE),
        mean=channels(fields, "image_mean"),
        std=channels(fields, "image_std"),
        resample=resampling(fields, "bicubic"),
    )


def read_area(fields: Fields, *, old_keys: bool) -> Area:
    """Read `size`. Its keys are areas, in spite of their names; older files have min_pixels and max_pixels."""
    size = fields.object("size") if fields.has("size") else None
    bounds = []
    for key, old in (("shortest_edge", "min_pixels"), ("longest_edge", "max_pixels")):
        if old_keys and fields.has(old):
            bounds.append(fields.integer(old, 1, _MAX_AREA))
        elif size is None:
            raise fields.fail(
                "size", f"an object with shortest_edge and longest_edge{', or ' + old if old_keys else ''}"
            )
        else:
            bounds.append(size.integer(key, 1, _MAX_AREA))
    if bounds[0] > bounds[1]:
        raise ConfigError(f"{fields.path}: size: expected at most {bounds[1]} as the least area, found {bounds[0]}")
    return Area(*bounds)


def _sampling(fields: Fields) -> FrameSampling:
    if fields.has("do_sample_frames") and not fields.flag("do_sample_frames"):
        raise fields.fail("do_sample_frames", "true")
    if fields.has("num_frames"):
        raise fields.fail("num_frames", "fps instead")
    most = fields.integer("max_frames", 2, 1 << 16) if fields.has("max_frames") else 768
    cap = fields.integer("max_video_tokens", 1, 1 << 20) if fields.has("max_video_tokens") else 768
    return FrameSampling(
        fps=fields.number("fps", 0, 1e6) if fields.has("fps") else 2.0,
        least=fields.integer("min_frames", 1, most) if fields.has("min_frames") else min(4, most),
        most=most,
        frame_tokens=cap if fields.flag("cap_pixels_per_frame") else None,
    )


def _is_version_4(fields: Fields) -> bool:
    return fields.has("transformers_version") and fields.text("transformers_version").startswith("4.")


def check_vision_config(model_dir: Path, found: Preprocessing, fields: Fields) -> None:
    """Raise ConfigError unless config.json has the patches `found` in `fields`."""
    config = read_config_fields(model_dir)
    vision = (config.object("thinker_config") if config.has("thinker_config") else config).object("vision_config")
    keys = (
        ("patch_size", "patch_size", found.patch),
        ("spatial_merge_size", "merge_size", found.merge),
        ("temporal_patch_size", "temporal_patch_size", found.temporal),
    )
    for key, ours, value in keys:
        if vision.integer(key, 1, _MAX_SIDE) != value:
            raise fields.fail(ours, f"{vision.values[key]} like vision_config.{key} of config.json")


class _Grid(NamedTuple):
    """The tokens from `first` on of medium `medium`: a picture, or a group of frames of a video."""

    medium: int
    first: int
    rows: int
    columns: int


class QwenVLProcessor(PlaceholderProcessor):
    """Reads the settings of a model directory. Raises ConfigError."""

    def __init__(self, model_dir: Path, tokenizer: Tokenizer) -> None:
        super().__init__(model_dir, tokenizer)
        settings = read_settings(model_dir)
        self._preprocessing, self._keeps_markers = settings.preprocessing, settings.keeps_markers
        self._picture, self._volume, self._sampling = settings.picture, settings.video, settings.sampling
        version = "5.23" if self._keeps_markers else "4.57"
        self.convention = f"videos are written into prompts as by transformers {version}"

    def write(self, text: str, media: Sequence[DecodedMedium]) -> str:
        pieces = self._split(text, media)
        for index, frames in enumerate(media):
            if frames.kind == "video":
                self._write_groups(pieces, 2 * index + 1, frames)
        return "".join(pieces)

    def expand(self, token_ids: list[int], media: Sequence[DecodedMedium]) -> Prompt:
        converted, grids = [], list[_Grid]()
        for index, frames in enumerate(media):
            try:
                medium = Medium(frames.kind, frames.data, frames.size, self._grid(frames))
            except MediaError as failure:
                raise MediaError(f"{name_medium(media, index)}: {failure}") from None
            converted.append(medium)
            rows, columns = (side // self._preprocessing.merge for side in medium.grid[1:])
            grids += [_Grid(index, group * rows * columns, rows, columns) for group in range(medium.grid[0])]
        self._check_places(token_ids, len(grids))
        return _expand(token_ids, self._kinds, grids, converted)

    def sample(self, total: int, fps: float | None) -> list[int]:
        return sample_frames(total, fps, self._sampling)

    def most_tokens(self, kind: str) -> int:
        if kind == "image":
            return most_picture_tokens(self._preprocessing.token, self._picture)
        return most_video_tokens(self._preprocessing.token, self._preprocessing.temporal, self._volume, self._sampling)

    def _grid(self, frames: DecodedMedium) -> tuple[int, int, int]:
        count, height, width = frames.size
        p = self._preprocessing
        if frames.kind == "image":
            new_height, new_width = picture_size(height, width, p.token, self._picture)
            return 1, new_height // p.patch, new_width // p.patch
        if count > self._sampling.most:
            raise MediaError(f"expected at most {self._sampling.most} frames, found {count}")
        new_height, new_width = video_size(count, height, width, p.token, p.temporal, self._volume, self._sampling)
        return -(-count // p.temporal), new_height // p.patch, new_width // p.patch

    def _write_groups(self, pieces: list[str], at: int, video: DecodedMedium) -> None:
        """Replace the placeholder of a video by the time and the placeholder of each group of frames."""
        if not self._keeps_markers and pieces[at - 1].endswith(self._start) and pieces[at + 1].startswith(self._end):
            pieces[at - 1] = pieces[at - 1].removesuffix(self._start)
            pieces[at + 1] = pieces[at + 1].removeprefix(self._end)
        group = f"{self._start}{self._tokens['video']}{self._end}"
        times = timestamps(video.indices, video.fps, self._preprocessing.temporal)
        pieces[at] = "".join(f"<{time:.1f} seconds>{group}" for time in times)


def _expand(ids: list[int], kinds: dict[int, str], grids: list[_Grid], media: list[Medium]) -> Prompt:
    """Repeat each placeholder as its grid has tokens."""
    if not grids:
        return Prompt(ids)
    expanded: list[int] = []
    places = []
    left: Iterator[_Grid] = iter(grids)
    positions: list[list[int]] = [[], [], []]
    position = 0
    for id in ids:
        if id not in kinds:
            expanded.append(id)
            for axis in positions:
                axis.append(position)
            position += 1
            continue
        grid = next(left)
        count = grid.rows * grid.columns
        places.append(PlaceholderRange(len(expanded), count, grid.medium, grid.first))
        expanded += [id] * count
        positions[0] += [position] * count
        positions[1] += [position + row for row in range(grid.rows) for _ in range(grid.columns)]
        positions[2] += list(range(position, position + grid.columns)) * grid.rows
        position += max(grid.rows, grid.columns)
    return Prompt(expanded, media, places, positions)


def picture_size(height: int, width: int, token: int, area: Area) -> tuple[int, int]:
    """Return height and width after resizing: multiples of `token`, the side of a token in pixels.

    smart_resize of image_processing_qwen2_vl.py. `round` rounds halves to even, there too.
    """
    check_ratio(height, width)
    new_height, new_width = round(height / token) * token, round(width / token) * token
    if new_height * new_width > area.most:
        return shrink(height, width, token, math.sqrt((height * width) / area.most))
    if new_height * new_width < area.least:
        return grow(height, width, token, math.sqrt(area.least / (height * width)))
    return new_height, new_width


def video_size(
    frames: int, height: int, width: int, token: int, temporal: int, area: Area, sampling: FrameSampling
) -> tuple[int, int]:
    """Return height and width of the frames after resizing: smart_resize of video_processing_qwen3_vl.py."""
    if frames < temporal:
        raise MediaError(f"expected a video of at least {temporal} frames, found {frames}")
    most = area.most
    if sampling.frame_tokens is not None:
        cap = min(sampling.frame_tokens * token * token, area.most // frames)
        most = max(cap, int(area.least * 1.05)) * frames
    if height < token or width < token:
        scale = max(token / height, token / width)
        height, width = int(height * scale), int(width * scale)
    check_ratio(height, width)
    new_height, new_width = round(height / token) * token, round(width / token) * token
    volume = round(frames / temporal) * temporal * new_height * new_width
    if volume > most:
        return shrink(height, width, token, math.sqrt((frames * height * width) / most))
    if volume < area.least:
        return grow(height, width, token, math.sqrt(area.least / (frames * height * width)))
    return new_height, new_width


def sample_frames(total: int, fps: float | None, sampling: FrameSampling) -> list[int]:
    """Return the numbers of the frames that are taken of a video of `total` frames."""
    count = int(total / (fps or UNKNOWN_FPS) * sampling.fps)
    count = min(max(count, sampling.least), sampling.most, total)
    if count == 1:
        return [0]
    step = (total - 1) / (count - 1)
    return [*(round(i * step) for i in range(count - 1)), total - 1]


def timestamps(indices: list[int], fps: float | None, temporal: int) -> list[float]:
    """Return the time of each group of `temporal` frames in seconds: the mean of its first and last frame."""
    padded = [*indices, *[indices[-1]] * (-len(indices) % temporal)]
    times = [index / (fps or UNKNOWN_FPS) for index in padded]
    return [(times[i] + times[i + temporal - 1]) / 2 for i in range(0, len(times), temporal)]


def most_picture_tokens(token: int, area: Area) -> int:
    """Return an upper bound of the tokens of a picture, whatever its size."""
    # A side of a very long picture is not shrunk below one token; growing rounds both sides up.
    longest = token * math.sqrt(_MAX_RATIO * area.most)
    grown = area.least + token * (_MAX_RATIO + 1) * math.sqrt(area.least / _MAX_RATIO) + token * token
    return int(max(area.most, longest, grown)) // (token * token)


def most_video_tokens(token: int, temporal: int, area: Area, sampling: FrameSampling) -> int:
    """Return an upper bound of the tokens of a video, whatever its size and number of frames."""
    most = 0
    for frames in range(temporal, sampling.most + 1):
        groups = -(-frames // temporal)
        # The volume is that of frames rounded to even.
        volume = Area(-(-area.least // frames), area.most // max(round(frames / temporal) * temporal, 1))
        most = max(most, groups * most_picture_tokens(token, volume))
    return most


def check_ratio(height: int, width: int) -> None:
    if max(height, width) / min(height, width) > _MAX_RATIO:
        raise MediaError(f"expected sides of a ratio up to {_MAX_RATIO}, found {width} x {height} pixels")


def shrink(height: int, width: int, token: int, by: float) -> tuple[int, int]:
    return (
        max(token, math.floor(height / by / token) * token),
        max(token, math.floor(width / by / token) * token),
    )


def grow(height: int, width: int, token: int, by: float) -> tuple[int, int]:
    return math.ceil(height * by / token) * token, math.ceil(width * by / token) * token


def _if_it_sees(model_dir: Path, tokenizer: Tokenizer) -> Processor | None:
    """Return the processor of Qwen3.5; None for a checkpoint of its language model alone."""
    return QwenVLProcessor(model_dir, tokenizer) if read_config_fields(model_dir).has("vision_config") else None


FAMILIES = dict.fromkeys(("qwen3_vl", "qwen3_vl_moe"), Family(QwenVLProcessor, tool_calls="hermes"))
FAMILIES |= dict.fromkeys(("qwen3_5", "qwen3_5_moe"), Family(_if_it_sees, tool_calls="hermes"))
