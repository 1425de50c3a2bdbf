"""Reads the settings of the processors of Qwen3-Omni from the files of a model directory."""

from dataclasses import dataclass
from pathlib import Path

from tilerank.loader.card import read_config_fields
from tilerank.loader.errors import ConfigError
from tilerank.loader.fields import Fields

from .qwen_vl_settings import Area, Preprocessing, check_types, check_vision_config, read_area, read_patches
from .settings import NESTED, PICTURES, section, settings_file

_TYPES = {
    "image_processor_type": ("Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast"),
    "feature_extractor_type": ("WhisperFeatureExtractor",),
    "processor_class": ("Qwen3OmniMoeProcessor",),
}
FRAME = Area(128 * 32 * 32, 768 * 32 * 32)
"""Bounds of the pixels of a frame of a video: transformers' processor of Qwen3-Omni, whatever the files say."""
SOUND = {"sampling_rate": 16000, "n_fft": 400, "hop_length": 160}


@dataclass(frozen=True)
class Settings:
    """picture: bounds of the pixels of a picture. per_second: positions of a second of a video."""

    preprocessing: Preprocessing
    picture: Area
    per_second: int


def read_preprocessing(model_dir: Path) -> Preprocessing:
    """Return how pixels become patches. Raises ConfigError, also if config.json says otherwise."""
    return read_settings(model_dir).preprocessing


def read_settings(model_dir: Path) -> Settings:
    """Read the settings. Raises ConfigError that names the file and the field."""
    nested, plain = settings_file(model_dir, NESTED), settings_file(model_dir, PICTURES)
    pictures = section(nested, "image_processor") or plain
    sound = section(nested, "feature_extractor") or plain
    if pictures is None or sound is None:
        raise ConfigError(
            f"{model_dir}: expected {PICTURES}, or {NESTED} with image_processor and feature_extractor, found neither"
        )
    for fields in (nested, pictures, sound):
        if fields is not None:
            check_types(fields, _TYPES)
    preprocessing = read_patches(pictures)
    check_vision_config(model_dir, preprocessing, pictures)
    thinker = read_config_fields(model_dir).object("thinker_config")
    _check_sound(sound, thinker.object("audio_config").integer("num_mel_bins", 1, 1 << 10))
    return Settings(
        preprocessing=preprocessing,
        picture=read_area(pictures, old_keys=True),
        per_second=thinker.integer("position_id_per_seconds", 1, 1 << 10),
    )


def _check_sound(fields: Fields, mels: int) -> None:
    for key, value in {**SOUND, "feature_size": mels}.items():
        if fields.integer(key, 1, 1 << 20) != value:
            raise fields.fail(key, str(value))
    if fields.has("dither") and fields.values["dither"] != 0:
        raise fields.fail("dither", "0")
