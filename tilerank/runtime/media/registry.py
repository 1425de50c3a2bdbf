"""The processors of the families that take media: files of this folder with a table PROCESSORS.

PROCESSORS maps a `model_type` of config.json to a function (model_dir, tokenizer) -> processor, or None for a model
directory that takes text only.
"""

import importlib
import pkgutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

from tilerank.loader.card import read_config_fields
from tilerank.loader.tokenizer import Tokenizer

from .processor import Processor

Builder = Callable[[Path, Tokenizer], Processor | None]


def load_processor(model_dir: Path, tokenizer: Tokenizer) -> Processor | None:
    """Return the processor of a model directory; None if it takes text only. Raises ConfigError."""
    build = _builders().get(read_config_fields(model_dir).text("model_type"))
    return build(model_dir, tokenizer) if build else None


@cache
def _builders() -> dict[str, Builder]:
    found: dict[str, Builder] = {}
    for info in pkgutil.iter_modules([str(Path(__file__).parent)]):
        module = importlib.import_module(f"{__package__}.{info.name}")
        found |= getattr(module, "PROCESSORS", {})
    return found
