"""generation_config.json: the token ids and sampling values that a model's makers advise. The file is optional."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import ConfigError
from .fields import Fields
from .files import is_listed, read_json_object

NAME = "generation_config.json"


def read_generation_config(model_dir: Path) -> Fields:
    """Return the fields of the file, none if there is no such file. Raises ConfigError."""
    values = read_json_object(model_dir, NAME, ConfigError) if is_listed(model_dir, NAME) else {}
    return Fields(model_dir / NAME, values)


@dataclass(frozen=True)
class SamplingDefaults:
    """Sampling values for requests that do not set them. top_k 0, top_p 1, min_p 0 and repetition_penalty 1 are off."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


def read_sampling_defaults(model_dir: Path, override: Mapping[str, float] | None = None) -> SamplingDefaults:
    """Return the sampling values of the file, whatever its `do_sample` is, as other servers do. Raises ConfigError.

    override: values of --override-generation-config, in place of those of the file.
    """
    given = Fields(Path("--override-generation-config"), override or {})
    for name in given.values:
        if name not in SamplingDefaults.__dataclass_fields__:
            raise given.fail(name, f"one of {', '.join(SamplingDefaults.__dataclass_fields__)}")
    return SamplingDefaults(**(_sampling_values(read_generation_config(model_dir)) | _sampling_values(given)))


def _sampling_values(c: Fields) -> dict[str, Any]:
    """Return the sampling values that the fields give."""
    bounds = {
        "temperature": (0.0, 100.0),
        "top_p": (0.0, 1.0),
        "min_p": (0.0, 1.0),
        "repetition_penalty": (0.01, 100.0),
    }
    numbers = {key: c.number(key, low, high, above=False) for key, (low, high) in bounds.items() if c.has(key)}
    top_k = {"top_k": max(c.integer("top_k", -1, (1 << 31) - 1), 0)} if c.has("top_k") else {}  # -1 is off as well
    return {**numbers, **top_k}
