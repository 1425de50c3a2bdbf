"""tekken.json, Mistral's own format: tokens by rank in base64, the split, and the special tokens before all others."""

import binascii
from base64 import b64decode
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, processors

from ..errors import ConfigError, TokenizerError, show
from ..fields import Fields
from ..files import is_listed, read_json_object
from .byte_level import pre_tokenizer_of, text_of, tokenizer_of_ranks
from .loaded import LoadedVocabulary
from .splits import Split

NAME = "tekken.json"
_MAX_TOKENS = 1 << 24
_NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
# The special tokens of files that list none, such as Mistral-Nemo's, as mistral-common has them.
_FIRST_SPECIAL = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"),
    *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)


@dataclass(frozen=True)
class _Tekken:
    """The content of a file. special: the tokens before all others. ranks: of those, in order."""

    split: Split
    special: Sequence[str]
    ranks: dict[bytes, int]


def read(model_dir: Path) -> LoadedVocabulary:
    found = _read(model_dir)
    special = found.special
    tokenizer = tokenizer_of_ranks(found.ranks, found.split, special)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    names = {name: token for name, token in _NAMES.items() if token in special}
    if "<s>" in special:  # every text of these models begins with it
        begin = special.index("<s>")
        tokenizer.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A $B", [("<s>", begin)])
    return LoadedVocabulary(tokenizer, names)


def correct_split(model_dir: Path, tokenizer: tokenizers.Tokenizer) -> None:
    """Give the tokenizer of a tokenizer.json the split of the tekken.json beside it, if both have the same tokens.

    tokenizer.json of many releases splits texts in another way than the models were trained with. Those of fine-tuned
    models have more tokens, or those of other models.
    """
    if not is_listed(model_dir, NAME):
        return
    found, ids = _read(model_dir), tokenizer.get_vocab(with_added_tokens=False)
    first, special = len(found.special), set(found.special)
    texts = ((text_of(token), first + rank) for token, rank in found.ranks.items())
    if all(ids.get(text) == id for text, id in texts if text not in special):
        tokenizer.pre_tokenizer = pre_tokenizer_of(found.split)


def _read(model_dir: Path) -> _Tekken:
    """Raises TokenizerError for a file that is malformed."""
    where = model_dir / NAME
    file = Fields(where, read_json_object(model_dir, NAME, TokenizerError))
    try:
        config = file.object("config")
        pattern = config.text("pattern")
        special = _special_tokens(file)
        number = len(special)
        if config.has("default_num_special_tokens"):
            number = config.integer("default_num_special_tokens", number, _MAX_TOKENS)
        vocabulary = _entries(file, "vocab")
        if config.has("default_vocab_size"):  # entries beyond it are not tokens of the model
            vocabulary = vocabulary[: config.integer("default_vocab_size", number, _MAX_TOKENS) - number]
    except ConfigError as e:
        raise TokenizerError(str(e)) from e
    special += [f"<SPECIAL_{i}>" for i in range(len(special), number)]
    ranks = {_bytes(where, entry): rank for rank, entry in enumerate(vocabulary)}
    if len(ranks) < len(vocabulary):
        raise TokenizerError(f"{where}: vocab: expected every token once")
    return _Tekken(Split((pattern,)), special, ranks)


def _special_tokens(file: Fields) -> list[str]:
    """Return the special tokens in order of their ids."""
    if not file.has("special_tokens"):
        return list(_FIRST_SPECIAL)
    tokens = {entry.get("rank"): entry.get("token_str") for entry in _entries(file, "special_tokens")}
    found = [tokens.get(rank) for rank in range(len(tokens))]
    if not all(isinstance(token, str) and token for token in found) or len(set(found)) < len(found):
        raise file.fail("special_tokens", "tokens with the ranks 0, 1, 2 ...")
    return [str(token) for token in found]


def _entries(file: Fields, key: str) -> list[dict[str, Any]]:
    value = file.values.get(key)
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise file.fail(key, "a list of tokens")
    return value


def _bytes(where: Path, entry: dict[str, Any]) -> bytes:
    try:
        return b64decode(entry["token_bytes"], validate=True)
    except (binascii.Error, KeyError, TypeError, ValueError):
        raise TokenizerError(f"{where}: vocab: expected token_bytes in base64, found {show(entry)}") from None
