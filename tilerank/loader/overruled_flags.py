"""Flags of config.json that the tensors of a checkpoint contradict. The tensors decide, as in tied_head.py.

transformers leaves out biases that config.json denies, and makes a head of random numbers where a file has none. Files
in which tensors and flags differ were converted by other means, and have been used with these tensors.
"""

import re
from collections.abc import Mapping
from typing import Any

from .fields import Fields
from .headers import StoredTensor, stored_tensors

_LAYER = r"(?:thinker\.)?(?:model\.|language_model\.)*layers\.\d+\."
_BIASES = {
    "attention_bias": re.compile(_LAYER + r"self_attn\.[qkvo]_proj\.bias"),
    "mlp_bias": re.compile(_LAYER + r"mlp\.(?:gate|up|down)_proj\.bias"),
}
_PARTS = ("thinker_config", "text_config")


def with_flags_of_tensors(c: Fields) -> tuple[Fields, tuple[str, ...]]:
    """Return the fields of config.json with the flags that the tensors show, and a sentence for each changed one.

    A directory without a whole checkpoint keeps its flags.
    """
    tensors = stored_tensors(c.path.parent) or {}
    text = _text(c.values)
    changes: dict[str, Any] = {}
    notes = []
    for flag, pattern in _BIASES.items():
        biases = [name for name in sorted(tensors) if pattern.fullmatch(name)] if text.get(flag) is False else []
        name = next((name for name in biases if not _is_zero(tensors[name])), None)
        if name is not None:
            changes[flag] = True
            notes.append(f"{c.path}: {flag} is false, but the checkpoint has {name}; its biases are used")
    if tensors and not _is_tied(c.values, text) and not any("lm_head" in name.split(".") for name in tensors):
        changes["tie_word_embeddings"] = True
        notes.append(f"{c.path}: tie_word_embeddings is not true, but no file has lm_head; the embedding is the head")
    return (Fields(c.path, _changed(c.values, changes)), tuple(notes)) if changes else (c, ())


def _text(values: Mapping[str, Any]) -> Mapping[str, Any]:
    for key in _PARTS:
        values = values[key] if isinstance(values.get(key), Mapping) else values
    return values


def _is_tied(values: Mapping[str, Any], text: Mapping[str, Any]) -> bool:
    holder = values if values.get("tie_word_embeddings") is not None else text
    return holder.get("tie_word_embeddings") is True


def _changed(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields with changed flags, at the top and in the parts that hold the language model's."""
    parts = {key: _changed(values[key], changes) for key in _PARTS if isinstance(values.get(key), Mapping)}
    return {**values, **parts, **changes}


def _is_zero(tensor: StoredTensor) -> bool:
    with tensor.file.open("rb") as file:
        file.seek(tensor.begin)
        return not any(file.read(tensor.end - tensor.begin))
