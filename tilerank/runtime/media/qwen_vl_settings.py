"""Reads the settings of the processors of Qwen3-VL from the files of a model directory."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tilerank.loader.card import read_config_fields
from tilerank.loader.errors import ConfigError
from tilerank.loader.fields import Fields

from .settings import NESTED, PICTURES, channels, check_steps, resampling, section, settings_file

VIDEOS = "video_preprocessor_config.json"
_TYPES = {
    "image_processor_type": ("Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast"),
    "video_processor_type": ("Qwen3VLVideoProcessor",),
    "processor_class": ("Qwen3VLProcessor",),
}
_MAX_SIDE = 1 << 10
_MAX_AREA = 1 << 40


@dataclass(frozen=True)
class Preprocessing:
    """How pixels become patches; the same for pictures and videos.

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
class Sampling:
    """How many frames of a video are taken: `fps` of a second, from `least` to `most`.

    frame_tokens: bound of the tokens of a frame; None for no bound.
    """

    fps: float
    least: int
    most: int
    frame_tokens: int | None


@dataclass(frozen=True)
class Settings:
    """keeps_markers: whether the vision_start and vision_end around a video placeholder stay around its frames."""

    preprocessing: Preprocessing
    picture: Area
    video: Area
    sampling: Sampling
    keeps_markers: bool


def read_preprocessing(model_dir: Path) -> Preprocessing:
    """Return how pixels become patches. Raises ConfigError, also if config.json says otherwise."""
    return read_settings(model_dir).preprocessing


def read_settings(model_dir: Path) -> Settings:
    """Read the settings. Raises ConfigError that names the file and the field."""
    nested = settings_file(model_dir, NESTED)
    plain = settings_file(model_dir, PICTURES)
    pictures = section(nested, "image_processor") or plain
    if pictures is None:
        raise ConfigError(f"{model_dir}: expected {PICTURES}, or {NESTED} with image_processor, found neither")
    videos = section(nested, "video_processor") or settings_file(model_dir, VIDEOS) or plain
    if videos is None:
        raise ConfigError(f"{model_dir}: expected {VIDEOS}, or {NESTED} with video_processor, found neither")
    for fields in (nested, pictures, videos):
        if fields is not None:
            check_types(fields, _TYPES)
    preprocessing = read_patches(pictures)
    for_videos = read_patches(videos)
    if for_videos != preprocessing:
        raise ConfigError(f"{videos.path}: expected the patches of {pictures.path}, found {for_videos}")
    check_vision_config(model_dir, preprocessing, pictures)
    return Settings(
        preprocessing=preprocessing,
        picture=read_area(pictures, old_keys=True),
        video=read_area(videos, old_keys=False),
        sampling=_sampling(videos),
        keeps_markers=not any(_is_version_4(fields) for fields in (nested, videos) if fields is not None),
    )


def check_types(fields: Fields, types: Mapping[str, Sequence[str]]) -> None:
    """Raise ConfigError unless each of these keys, if it is there, has one of the values."""
    for key, names in types.items():
        if fields.has(key) and fields.text(key) not in names:
            raise fields.fail(key, " or ".join(names))


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


def _sampling(fields: Fields) -> Sampling:
    if fields.has("do_sample_frames") and not fields.flag("do_sample_frames"):
        raise fields.fail("do_sample_frames", "true")
    if fields.has("num_frames"):
        raise fields.fail("num_frames", "fps instead")
    most = fields.integer("max_frames", 2, 1 << 16) if fields.has("max_frames") else 768
    cap = fields.integer("max_video_tokens", 1, 1 << 20) if fields.has("max_video_tokens") else 768
    return Sampling(
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
