"""Which file of `models/` runs a checkpoint: each has a table MODELS of the `model_type`s that it knows."""

import importlib
import pkgutil
from functools import cache
from pathlib import Path

from tilerank.loader.config import ModelConfig, load_config, read_model_type
from tilerank.loader.errors import ConfigError

from . import models
from .model import Model


def model_class(model_type: str) -> type[Model]:
    """The class for a `model_type` of config.json. Raises ConfigError listing the known ones."""
    known = _known()
    if model_type not in known:
        raise ConfigError(f"model_type: expected one of {', '.join(sorted(known))}, found {model_type!r}")
    return known[model_type]


def read_config(model_dir: Path) -> ModelConfig:
    """The config of a checkpoint; an unknown family is refused as such, not for the keys that it spells otherwise."""
    model_type = read_model_type(model_dir)
    try:
        model_class(model_type)
    except ConfigError as e:
        raise ConfigError(f"{model_dir / 'config.json'}: {e}") from e
    return load_config(model_dir)


@cache
def _known() -> dict[str, type[Model]]:
    found: dict[str, type[Model]] = {}
    for info in pkgutil.iter_modules(models.__path__):
        found |= importlib.import_module(f"{models.__name__}.{info.name}").MODELS
    return found
