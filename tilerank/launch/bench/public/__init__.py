"""The public models that `bench make-model` imitates, as data: configs/NAME.json and processors.json.

A config has the fields of the model's config.json that affect the computation. A processor has the files with the
settings by which a family turns media into what its encoder takes.
"""

import json
from pathlib import Path
from typing import Any

_DATA = Path(__file__).parent
PUBLIC_MODELS = tuple(sorted(path.stem for path in (_DATA / "configs").glob("*.json")))


def public_config(name: str) -> dict[str, Any]:
    """Return the config.json of one of PUBLIC_MODELS."""
    config: dict[str, Any] = json.loads((_DATA / "configs" / f"{name}.json").read_text())
    return config


def processor_files(model_type: str) -> dict[str, dict[str, Any]]:
    """Return the files of a family's processor by their names; none for a family that takes text only."""
    families = json.loads((_DATA / "processors.json").read_text())
    return next((family["files"] for family in families if model_type in family["model_types"]), {})
