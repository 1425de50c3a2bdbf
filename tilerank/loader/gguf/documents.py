"""Makes the small JSON files of a model directory from the metadata of a GGUF file. No torch."""

import json
from collections.abc import Callable, Collection
from functools import lru_cache
from pathlib import Path
from typing import Any

from .architectures import architecture_of, config_of, tower_of
from .file import GGUFFile, has_mmproj

_TOKENS = "tokenizer.ggml."
_CONTROL, _USER_DEFINED = 3, 4
_IDS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
    "mask_token": "mask_token_id",
}
_LLAMA_IDS = {"bos_token": 1, "eos_token": 2, "unk_token": 0}
"""The defaults of SentencePiece vocabularies (model "llama"), whose files may omit them."""
_SAMPLING = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
_BOS_SPLITS = ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "tekken")
"""Pre-tokenizers (`pre`) whose texts begin with bos_token unless add_bos_token is set."""
_BOS_MODELS = ("llama", "gemma4")
"""Kinds of vocabularies (`model`) whose texts begin with bos_token unless add_bos_token is set."""


def _generation_config(gguf: GGUFFile) -> dict[str, Any]:
    fields, tokens = gguf.fields(_TOKENS), gguf.texts(f"{_TOKENS}tokens")
    types = gguf.numbers(f"{_TOKENS}token_type") if gguf.has_items(f"{_TOKENS}token_type") else []
    named = [fields.values.get(f"{name}_token_id") for name in ("eos", "eot", "eom")]
    ends = architecture_of(gguf).ends
    by_text = [id for id, token in enumerate(tokens) if token in ends]
    by_text = [id for id in by_text if not types or types[id] in (_CONTROL, _USER_DEFINED)]  # no ordinary text
    if fields.values.get("model") == "llama" and named[0] is None:
        named[0] = _LLAMA_IDS["eos_token"]
    ids = [id for id in (*named, *by_text) if type(id) is int and id < len(tokens)]
    sampling = gguf.fields("general.sampling.")
    advised = {name: sampling.values[key] for key, name in _SAMPLING.items() if sampling.has(key)}
    begin = fields.values.get("bos_token_id")
    known = {"bos_token_id": begin} if type(begin) is int and 0 <= begin < len(tokens) else {}
    return {"eos_token_id": list(dict.fromkeys(ids))} | known | advised


def _tokenizer_config(gguf: GGUFFile) -> dict[str, Any]:
    fields, tokens = gguf.fields(_TOKENS), gguf.texts(f"{_TOKENS}tokens")
    model, split = fields.values.get("model"), fields.values.get("pre")
    is_llama = model == "llama"
    usual = _LLAMA_IDS if is_llama else {}
    ids = {name: fields.values.get(key, usual.get(name)) for name, key in _IDS.items()}
    config: dict[str, Any] = {name: tokens[id] for name, id in ids.items() if type(id) is int and 0 <= id < len(tokens)}
    for name, default in (("add_bos_token", model in _BOS_MODELS or split in _BOS_SPLITS), ("add_eos_token", False)):
        config[name] = fields.flag(name) if fields.has(name) else default
    return config | _templates(gguf)


def _templates(gguf: GGUFFile) -> dict[str, Any]:
    """Return the field chat_template. A name of a template that is built into llama.cpp is no template and ignored."""
    listed = gguf.texts("tokenizer.chat_templates") if gguf.has_items("tokenizer.chat_templates") else []
    keys = {"default": "tokenizer.chat_template"} | {name: f"tokenizer.chat_template.{name}" for name in listed}
    found = {name: gguf.metadata.get(key) for name, key in keys.items()}
    programs = [
        {"name": name, "template": text} for name, text in found.items() if isinstance(text, str) and "{" in text
    ]
    return {"chat_template": programs} if programs else {}


def _processor_config(gguf: GGUFFile) -> dict[str, Any]:
    pictures = tower_of(gguf)
    assert pictures is not None  # the file is listed for no other model
    tower, mmproj = pictures
    return tower.processor(mmproj)


_DOCUMENTS: dict[str, Callable[[GGUFFile], dict[str, Any]]] = {
    "config.json": config_of,
    "generation_config.json": _generation_config,
    "tokenizer_config.json": _tokenizer_config,
}

_WITH_PICTURES: dict[str, Callable[[GGUFFile], dict[str, Any]]] = {"processor_config.json": _processor_config}


def documents_of(model: Path) -> Collection[str]:
    """Return the names of the files that a GGUF file stands in for."""
    return [*_DOCUMENTS, *(_WITH_PICTURES if has_mmproj(model) else ())]


@lru_cache(maxsize=8)
def document(gguf: GGUFFile, name: str) -> str:
    """Return the content of the file `name`, one of documents_of. Raises CheckpointError or ConfigError."""
    return json.dumps((_DOCUMENTS | _WITH_PICTURES)[name](gguf))
