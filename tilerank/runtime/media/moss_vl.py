"""The processor of MOSS-VL (arXiv 2608.15045): like the remote code of its checkpoints.

A picture or a frame of a video takes one token of the prompt. Its encoding is not inserted there: this token and those
after it see it by cross-attention, together with the pictures and frames before it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from tilerank.loader.errors import ConfigError
from tilerank.loader.fields import Fields
from tilerank.loader.tokenizer import Tokenizer

from ..protocol.errors import MediaError
from ..protocol.prompt import Medium, Prompt, Segment, VisibleRange
from .decoder import DecodedMedium, Sampler
from .family import Family
from .placeholders import PlaceholderProcessor, name_medium
from .qwen_vl import (
    UNKNOWN_FPS,
    VIDEOS,
    Area,
    FrameSampling,
    Preprocessing,
    check_ratio,
    check_vision_config,
    grow,
    most_picture_tokens,
    picture_size,
    read_area,
    read_patches,
    shrink,
)
from .settings import NESTED, PICTURES, check_types, find_section, settings_file

_WRITTEN = {"image": "<|image|>", "video": "<|video|>"}
"""The text that chat templates write for a medium; the token of the vocabulary is another one."""

_TYPES = {
    "image_processor_type": ("MossVLImageProcessorFast", "MossVLImageProcessor"),
    "video_processor_type": ("MossVLVideoProcessor",),
    "processor_class": ("MossVLProcessor",),
}
_MAX_AREA = 1 << 40
_MAX_FRAMES = 1 << 16


@dataclass(frozen=True)
class MossVLSettings:
    """picture, frame: bounds of the pixels of a picture and of a frame of a video. pictures, volume: the most pixels of
    all pictures, and of all frames of all videos of a prompt, which share them by size. sampling: of one video alone.
    frames: the most of all videos of a prompt, which share them by duration."""

    preprocessing: Preprocessing
    picture: Area
    pictures: int
    frame: Area
    volume: int
    sampling: FrameSampling
    frames: int


def read_settings(model_dir: Path) -> MossVLSettings:
    """Read the settings. Raises ConfigError that names the file and the field."""
    nested = settings_file(model_dir, NESTED)
    pictures = find_section(model_dir, "image_processor", PICTURES)
    videos = find_section(model_dir, "video_processor", VIDEOS)
    for fields in (nested, pictures, videos):
        check_types(fields, _TYPES)
    preprocessing = read_patches(pictures)
    if preprocessing.temporal != 1:
        raise pictures.fail("temporal_patch_size", "1")
    for_videos = read_patches(videos)
    if for_videos != preprocessing:
        raise ConfigError(f"{videos.path}: expected the patches of {pictures.path}, found {for_videos}")
    check_vision_config(model_dir, preprocessing, pictures)
    picture, frame = read_area(pictures, old_keys=True), read_area(videos, old_keys=False)
    volume = _budget(videos, "video_max_pixels")
    frames = videos.integer("max_frames", 1, _MAX_FRAMES) if videos.has("max_frames") else 256
    return MossVLSettings(
        preprocessing=preprocessing,
        picture=picture,
        pictures=_budget(pictures, "multi_image_max_pixels") or picture.most,
        frame=frame,
        volume=volume or frame.most,
        sampling=_sampling(videos, frames, volume // frame.least if volume else frames),
        frames=frames,
    )


def _budget(fields: Fields, key: str) -> int | None:
    return fields.integer(key, 1, _MAX_AREA) if fields.has(key) else None


def _sampling(fields: Fields, frames: int, room: int) -> FrameSampling:
    """frames: the most that may be taken. room: the frames for which there are pixels."""
    if fields.has("do_sample_frames") and not fields.flag("do_sample_frames"):
        raise fields.fail("do_sample_frames", "true")
    return FrameSampling(
        fps=fields.number("video_fps", 0, 1e6) if fields.has("video_fps") else 1.0,
        least=fields.integer("min_frames", 1, frames) if fields.has("min_frames") else 1,
        most=max(min(frames, room), 1),
        frame_tokens=None,
    )


class MossVLProcessor(PlaceholderProcessor):
    """Reads the settings of a model directory. Raises ConfigError."""

    shares_frames = True

    def __init__(self, model_dir: Path, tokenizer: Tokenizer) -> None:
        super().__init__(model_dir, tokenizer)
        self._settings = read_settings(model_dir)
        self.placeholders = (*_WRITTEN.values(), *self._tokens.values())

    def write(self, text: str, media: Sequence[DecodedMedium]) -> str:
        for kind, written in _WRITTEN.items():
            text = text.replace(written, self._tokens[kind])
        pieces = self._split(text, media)
        for index, frames in enumerate(media):
            if frames.kind == "video":
                pieces[2 * index + 1] = self._write_frames(frames)
        return "".join(pieces)

    def expand(self, token_ids: list[int], media: Sequence[DecodedMedium]) -> Prompt:
        converted = self._media(media)
        self._check_places(token_ids, sum(medium.grid[0] for medium in converted))
        return _with_source(token_ids, self._kinds, converted, self._settings.preprocessing.merge)

    def sample(self, total: int, fps: float | None) -> list[int]:
        return sample_frames(total, fps, self._settings.sampling)

    def sample_together(self, videos: Sequence[tuple[int, float | None]]) -> list[Sampler]:
        sampling = self._settings.sampling
        shares = share_frames([total / (fps or UNKNOWN_FPS) for total, fps in videos], self._settings.frames)
        return [partial(sample_frames, sampling=replace(sampling, most=min(sampling.most, share))) for share in shares]

    def most_tokens(self, kind: str) -> int:
        s = self._settings
        if kind == "image":
            return most_picture_tokens(s.preprocessing.token, s.picture) + 1
        return most_video_tokens(s.preprocessing.token, s.frame, s.volume, s.sampling)

    def _media(self, media: Sequence[DecodedMedium]) -> list[Medium]:
        patch = self._settings.preprocessing.patch
        pixels = [math.prod(frames.size) for frames in media]
        converted = []
        for index, frames in enumerate(media):
            total = sum(own for own, other in zip(pixels, media, strict=True) if other.kind == frames.kind)
            try:
                height, width = self._size(frames, pixels[index], total)
            except MediaError as failure:
                raise MediaError(f"{name_medium(media, index)}: {failure}") from None
            grid = (frames.size[0], height // patch, width // patch)
            converted.append(Medium(frames.kind, frames.data, frames.size, grid))
        return converted

    def _size(self, frames: DecodedMedium, pixels: int, total: int) -> tuple[int, int]:
        """Return height and width after resizing. pixels, total: of the medium, and of all media of its kind."""
        s = self._settings
        count, height, width = frames.size
        if frames.kind == "image":
            area = picture_share(pixels, total, s.picture, s.pictures)
            return picture_size(height, width, s.preprocessing.token, area)
        if count > s.sampling.most:
            raise MediaError(f"expected at most {s.sampling.most} frames, found {count}")
        return video_size(frames.size, s.preprocessing.token, s.frame, int(s.volume * pixels / total))

    def _write_frames(self, video: DecodedMedium) -> str:
        """Return the time and the placeholder of each frame."""
        times = [index / (video.fps or UNKNOWN_FPS) for index in video.indices]
        frames = (f"<|time_start|>{time:.1f} seconds<|time_end|>{self._tokens['image']}" for time in times)
        return f"{self._start}{''.join(frames)}{self._end}"


def _with_source(ids: list[int], kinds: dict[int, str], media: list[Medium], merge: int) -> Prompt:
    """Return the prompt with positions, and with all frames as its source.

    A frame whose placeholder would have position t has its tokens at (t, t + row, t + column). The separator after
    them and the placeholder are at t + max(rows, columns) on all axes.
    """
    if not media:
        return Prompt(ids)
    grids = iter([(side // merge for side in medium.grid[1:]) for medium in media for _ in range(medium.grid[0])])
    positions: list[int] = []
    source_positions: list[list[int]] = [[], [], []]
    visible_ranges = []
    position = 0
    for id in ids:
        if id in kinds:
            rows, columns = next(grids)
            end = position + max(rows, columns)
            source_positions[0] += [position] * (rows * columns)
            source_positions[1] += [position + row for row in range(rows) for _ in range(columns)]
            source_positions[2] += list(range(position, position + columns)) * rows
            for axis in source_positions:
                axis.append(end)
            visible_ranges.append(VisibleRange(len(positions), 0, len(source_positions[0]), True))
            position = end
        positions.append(position)
        position += 1
    tokens_of = [t * (rows * columns // merge**2 + 1) for t, rows, columns in (medium.grid for medium in media)]
    source = [Segment(index, 0, count) for index, count in enumerate(tokens_of)]
    return Prompt(ids, media, [], [positions] * 3, source, visible_ranges, source_positions)


def picture_share(pixels: int, total: int, area: Area, budget: int) -> Area:
    """Return the bounds of a picture after resizing. All pictures of a prompt share `budget` pixels in proportion to
    their own. pixels, total: those of the picture and of all pictures. area: the bounds of any picture."""
    return Area(area.least, min(max(int(budget * (pixels / total)), area.least), area.most))


def video_size(video: tuple[int, int, int], token: int, frame: Area, budget: int) -> tuple[int, int]:
    """Return height and width of the frames of a video after resizing.

    video: the number of frames, their height and their width. frame: bounds of the pixels of a frame. budget: the most
    of all frames together.
    """
    count, height, width = video
    if min(height, width) < token:
        raise MediaError(f"expected frames of at least {token} x {token} pixels, found {width} x {height}")
    check_ratio(height, width)
    new_height, new_width = round(height / token) * token, round(width / token) * token
    if new_height * new_width > frame.most:
        new_height, new_width = shrink(height, width, token, math.sqrt(height * width / frame.most))
    volume = count * new_height * new_width
    if volume > budget:
        new_height, new_width = shrink(height, width, token, math.sqrt(count * height * width / budget))
    elif volume < frame.least:
        new_height, new_width = grow(height, width, token, math.sqrt(frame.least / (count * height * width)))
    if new_height * new_width < frame.least:
        new_height, new_width = grow(height, width, token, math.sqrt(frame.least / (height * width)))
    return new_height, new_width


def sample_frames(total: int, fps: float | None, sampling: FrameSampling) -> list[int]:
    """Return the numbers of the frames that are taken of a video of `total` frames."""
    count = math.ceil(total / (fps or UNKNOWN_FPS) * sampling.fps - 1e-6)
    count = min(max(count, sampling.least), sampling.most, total)
    if count == 1:
        return [0]
    step = (total - 1) / (count - 1)
    return [*(int(i * step) for i in range(count - 1)), total - 1]


def share_frames(durations: Sequence[float], most: int) -> list[int]:
    """Return how many frames each of several videos may have, `most` together but at least one each.

    Beside the one, videos get frames in proportion to their durations in seconds; those left over by rounding down go
    to the largest fractions.
    """
    rest = most - len(durations)
    if rest <= 0:
        return [1] * len(durations)
    total = sum(durations)
    shares = [rest * (duration / total) for duration in durations]
    counts = [math.floor(share) for share in shares]
    by_fraction = sorted(range(len(shares)), key=lambda i: counts[i] - shares[i])
    for i in by_fraction[: rest - sum(counts)]:
        counts[i] += 1
    return [1 + count for count in counts]


def most_video_tokens(token: int, frame: Area, budget: int, sampling: FrameSampling) -> int:
    """Return an upper bound of the tokens of a video, with a separator after each frame."""
    most = 0
    for frames in range(1, sampling.most + 1):
        area = Area(frame.least, max(min(frame.most, budget // frames), frame.least))
        most = max(most, frames * (most_picture_tokens(token, area) + 1))
    return most


FAMILIES = {"moss_vl": Family(MossVLProcessor)}
