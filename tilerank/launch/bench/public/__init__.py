"""The public models that `bench make-model` imitates, as data: configs/NAME.json and processors.json.

A config has the fields of the model's config.json that affect the computation. A processor is a PublicProcessor.
"""

import json
from pathlib import Path
from typing import Any

import msgspec

_DATA = Path(__file__).parent
PUBLIC_MODELS = tuple(sorted(path.stem for path in (_DATA / "configs").glob("*.json")))


def public_config(name: str) -> dict[str, Any]:
    """Return the config.json of one of PUBLIC_MODELS."""
    config: dict[str, Any] = json.loads((_DATA / "configs" / f"{name}.json").read_text())
    return config


class PublicProcessor(msgspec.Struct):
    """The settings and tokens by which a family processes media.

    files: its settings, by the name of the file. demo_tokens: tokens of the demo model's tokenizer that stand for those
    of the family. tokenizer_config: what the family's processor of transformers reads of tokenizer_config.json.
    """

    model_types: list[str] = []
    files: dict[str, dict[str, Any]] = {}
    demo_tokens: dict[str, str] = {}
    tokenizer_config: dict[str, str] = {}


def public_processor(model_type: str) -> PublicProcessor:
    """Return the processor of a family; an empty one for a family that takes text only."""
    families = msgspec.json.decode((_DATA / "processors.json").read_bytes(), type=list[PublicProcessor])
    return next((family for family in families if model_type in family.model_types), PublicProcessor())
