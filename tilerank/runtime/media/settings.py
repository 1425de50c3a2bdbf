"""The fields that the settings files of image processors share, as transformers writes them."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from tilerank.loader.errors import ConfigError
from tilerank.loader.fields import Fields
from tilerank.loader.files import is_listed, read_json_object

NESTED = "processor_config.json"
PICTURES = "preprocessor_config.json"
T = TypeVar("T")
_RESAMPLE = {2: "bilinear", 3: "bicubic"}  # numbers of Pillow


def settings_file(model_dir: Path, name: str) -> Fields | None:
    """Return the fields of a file of the model directory, or None if there is no such file."""
    if not is_listed(model_dir, name):
        return None
    return Fields(model_dir / name, read_json_object(model_dir, name, ConfigError))


def read_if_listed(read: Callable[[Path], T], model_dir: Path) -> T | None:
    """Return what `read` reads of the settings of pictures in a model directory, or None if it has none."""
    return read(model_dir) if any(is_listed(model_dir, name) for name in (NESTED, PICTURES)) else None


def section(fields: Fields | None, key: str) -> Fields | None:
    """Return the object under `key`, or None."""
    return fields.object(key) if fields is not None and fields.has(key) else None


def find_section(model_dir: Path, key: str, *files: str) -> Fields:
    """Return the object `key` of the nested file, or else the first of `files` that exists. Raises ConfigError."""
    found = section(settings_file(model_dir, NESTED), key)
    for name in files:
        found = found or settings_file(model_dir, name)
    if found is None:
        raise ConfigError(f"{model_dir}: expected {files[0]}, or {NESTED} with {key}, found neither")
    return found


def check_types(fields: Fields | None, types: Mapping[str, Sequence[str]]) -> None:
    """Raise ConfigError unless each of these keys, if it is there, has one of the values."""
    for key, names in types.items():
        if fields is not None and fields.has(key) and fields.text(key) not in names:
            raise fields.fail(key, " or ".join(names))


def check_steps(fields: Fields, *more: str, normalizes: bool = True) -> None:
    """Raise ConfigError if one of the steps of preprocessing is switched off. more: further steps of a family.
    normalizes: whether pixels are normalised by means and deviations of the file."""
    if not normalizes and fields.flag("do_normalize"):
        raise fields.fail("do_normalize", "false")
    for key in ("do_resize", "do_rescale", *(("do_normalize",) if normalizes else ()), "do_convert_rgb", *more):
        if fields.has(key) and not fields.flag(key):
            raise fields.fail(key, "true")
    if fields.has("rescale_factor") and abs(fields.number("rescale_factor", 0, 1) * 255 - 1) > 1e-6:
        raise fields.fail("rescale_factor", "1/255")


def resampling(fields: Fields, default: str) -> str:
    """Return "bilinear" or "bicubic"."""
    if not fields.has("resample"):
        return default
    if (number := fields.integer("resample", 0, 5)) not in _RESAMPLE:
        raise fields.fail("resample", "2 (bilinear) or 3 (bicubic)")
    return _RESAMPLE[number]


def channels(fields: Fields, key: str) -> tuple[float, float, float]:
    """Return the mean or the deviation of red, green and blue, from 0 to 1."""
    value = fields.values.get(key)
    numbers = [float(v) for v in value if type(v) in (int, float)] if isinstance(value, list) else []
    if len(numbers) != 3 or len(value or []) != 3 or not all(0 <= v <= 1 for v in numbers):
        raise fields.fail(key, "three numbers from 0 to 1")
    if key == "image_std" and 0 in numbers:
        raise fields.fail(key, "three numbers above 0")
    return numbers[0], numbers[1], numbers[2]
