"""tokenizer.model as Meta releases Llama 3: the ranks of tiktoken.model, under the name of SentencePiece's files.

The special tokens, which no file of the release names, are those of transformers' conversion.
"""

import re
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, processors

from ..errors import TokenizerError
from ..files import is_listed, read_bytes, read_json_object
from ..generation_config import NAME as GENERATION_CONFIG
from ..special_tokens import read_described_tokens
from .byte_level import tokenizer_of_ranks
from .loaded import LoadedVocabulary, add_described
from .splits import LLAMA3
from .tiktoken_model import read_ranks

NAME = "tokenizer.model"
_FIRST_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} [0-9]+\r?\n")  # a SentencePiece file begins with a line break
_NUM_SPECIAL = 256
_BEGIN, _END = "<|begin_of_text|>", "<|end_of_text|>"
_HEADER = ("<|start_header_id|>", "<|end_header_id|>")
_RESERVED = "<|reserved_special_token_%d|>"
_EOT = 9
# The format that Meta's tokenizer.py writes.
_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n"
    "{{ message.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
# By place; the tokens between and after them are reserved.
_LLAMA_3 = {0: _BEGIN, 1: _END, 6: _HEADER[0], 7: _HEADER[1], _EOT: "<|eot_id|>"}
_LLAMA_3_1 = _LLAMA_3 | {4: "<|finetune_right_pad_id|>", 8: "<|eom_id|>", 10: "<|python_tag|>"}


def is_one(model_dir: Path) -> bool:
    """Is tokenizer.model a file of this kind?"""
    return _FIRST_LINE.match(read_bytes(model_dir, NAME, TokenizerError)) is not None


def read(model_dir: Path) -> LoadedVocabulary:
    ranks = read_ranks(model_dir, NAME)
    tokenizer = tokenizer_of_ranks(ranks, LLAMA3)
    special = dict(enumerate(_special_tokens(model_dir), start=len(ranks)))
    tokens = {id: AddedToken(token, special=True, normalized=False) for id, token in special.items()}
    add_described(model_dir / NAME, tokenizer, tokens | read_described_tokens(model_dir))
    begin = (_BEGIN, tokenizer.token_to_id(_BEGIN))  # every text of these models begins with it
    tokenizer.post_processor = processors.TemplateProcessing([_BEGIN, "$A"], [_BEGIN, "$A", "$B"], [begin])
    return LoadedVocabulary(tokenizer, {"bos_token": _BEGIN, "eos_token": _END})


def _special_tokens(model_dir: Path) -> list[str]:
    """Return the special tokens in order of their ids: those of Llama 3, or of 3.1 and later, which scale RoPE."""
    config = _config(model_dir, "config.json")
    rope = config.get("rope_scaling") or config.get("rope_parameters")
    named = _LLAMA_3_1 if isinstance(rope, dict) and "llama3" in rope.values() else _LLAMA_3
    places = [place for place in range(_NUM_SPECIAL) if place not in named]
    return [token for _, token in sorted((named | {p: _RESERVED % i for i, p in enumerate(places)}).items())]


def chat_template(model_dir: Path) -> str | None:
    """Return the chat template of the instruct models, whose answers end with <|eot_id|>; None for a base model."""
    end = len(read_ranks(model_dir, NAME)) + _EOT
    ends = (_config(model_dir, name).get("eos_token_id") for name in (GENERATION_CONFIG, "config.json"))
    return _TEMPLATE if any(end == one or (isinstance(one, list) and end in one) for one in ends) else None


def _config(model_dir: Path, name: str) -> dict[str, Any]:
    return read_json_object(model_dir, name, TokenizerError) if is_listed(model_dir, name) else {}
