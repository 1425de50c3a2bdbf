"""tekken.json, Mistral's own format: tokens by rank in base64, the split, and the special tokens before all others."""

import binascii
from base64 import b64decode
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, processors

from ..errors import ConfigError, TokenizerError, show
from ..fields import Fields
from ..files import read_json_object
from .byte_level import tokenizer_of_ranks
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


def read(model_dir: Path) -> LoadedVocabulary:
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
    tokenizer = tokenizer_of_ranks(ranks, Split((pattern,)), special)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    names = {name: token for name, token in _NAMES.items() if token in special}
    if "<s>" in special:  # every text of these models begins with it
        begin = special.index("<s>")
        tokenizer.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A $B", [("<s>", begin)])
    return LoadedVocabulary(tokenizer, names)


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
