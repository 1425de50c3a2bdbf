"""The settings by which a model's processor prepares pictures and videos. No torch, no code from the directory."""

from pathlib import Path

from .errors import ConfigError
from .fields import Fields
from .files import is_listed, read_json_object

_FILES = {
    "image": ("preprocessor_config.json",),
    "video": ("video_preprocessor_config.json", "preprocessor_config.json"),
}
_NESTED = "processor_config.json"
"""One file for all kinds, with an object for each, as transformers 5 writes it; other settings in it do not count."""


def read_processor_config(model_dir: Path, kind: str) -> Fields | None:
    """Return the settings for "image" or "video"; None if no file of the directory has any. Raises ConfigError."""
    if is_listed(model_dir, _NESTED):
        nested = Fields(model_dir / _NESTED, read_json_object(model_dir, _NESTED, ConfigError))
        if nested.has(f"{kind}_processor"):
            return nested.object(f"{kind}_processor")
    for name in _FILES[kind]:
        if is_listed(model_dir, name):
            return Fields(model_dir / name, read_json_object(model_dir, name, ConfigError))
    return None
