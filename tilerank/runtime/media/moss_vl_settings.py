"""Reads the settings of the processors of MOSS-VL from the files of a model directory."""

from dataclasses import dataclass
from pathlib import Path

from tilerank.loader.errors import ConfigError
from tilerank.loader.fields import Fields

from .qwen_vl_settings import (
    VIDEOS,
    Area,
    Preprocessing,
    Sampling,
    check_types,
    check_vision_config,
    read_area,
    read_patches,
)
from .settings import NESTED, PICTURES, section, settings_file

_TYPES = {
    "image_processor_type": ("MossVLImageProcessorFast", "MossVLImageProcessor"),
    "video_processor_type": ("MossVLVideoProcessor",),
    "processor_class": ("MossVLProcessor",),
}
_MAX_AREA = 1 << 40
_MAX_FRAMES = 1 << 16


@dataclass(frozen=True)
class Settings:
    """picture, frame: bounds of the pixels of a picture and of a frame of a video. pictures, volume: the most pixels of
    all pictures, and of all frames of all videos of a prompt, which share them by size. sampling: of one video alone.
    frames: the most of all videos of a prompt, which share them by duration."""

    preprocessing: Preprocessing
    picture: Area
    pictures: int
    frame: Area
    volume: int
    sampling: Sampling
    frames: int


def read_preprocessing(model_dir: Path) -> Preprocessing:
    """Return how pixels become patches. Raises ConfigError, also if config.json says otherwise."""
    return read_settings(model_dir).preprocessing


def read_settings(model_dir: Path) -> Settings:
    """Read the settings. Raises ConfigError that names the file and the field."""
    nested = settings_file(model_dir, NESTED)
    pictures = section(nested, "image_processor") or settings_file(model_dir, PICTURES)
    if pictures is None:
        raise ConfigError(f"{model_dir}: expected {PICTURES}, or {NESTED} with image_processor, found neither")
    videos = section(nested, "video_processor") or settings_file(model_dir, VIDEOS)
    if videos is None:
        raise ConfigError(f"{model_dir}: expected {VIDEOS}, or {NESTED} with video_processor, found neither")
    for fields in (nested, pictures, videos):
        if fields is not None:
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
    return Settings(
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


def _sampling(fields: Fields, frames: int, room: int) -> Sampling:
    """frames: the most that may be taken. room: the frames for which there are pixels."""
    if fields.has("do_sample_frames") and not fields.flag("do_sample_frames"):
        raise fields.fail("do_sample_frames", "true")
    return Sampling(
        fps=fields.number("video_fps", 0, 1e6) if fields.has("video_fps") else 1.0,
        least=fields.integer("min_frames", 1, frames) if fields.has("min_frames") else 1,
        most=max(min(frames, room), 1),
        frame_tokens=None,
    )
