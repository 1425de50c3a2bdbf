"""vocab.json with merges.txt: GPT-2's files, which Qwen's models have as well."""

from pathlib import Path

from ..errors import TokenizerError, show
from ..files import read_json_object, read_text
from ..special_tokens import read_described_tokens
from .byte_level import tokenizer_of
from .loaded import LoadedVocabulary, add_described
from .splits import split_of

NAME = "vocab.json"
_MERGES = "merges.txt"


def read(model_dir: Path) -> LoadedVocabulary:
    vocabulary = read_json_object(model_dir, NAME, TokenizerError)
    merges = []
    for number, line in enumerate(read_text(model_dir, _MERGES, TokenizerError).split("\n"), start=1):
        parts = line.rstrip("\r").split(" ")
        if line.strip() and not line.startswith("#version"):
            if len(parts) != 2:
                raise TokenizerError(f"{model_dir / _MERGES}: line {number}: expected two tokens, found {show(line)}")
            merges.append((parts[0], parts[1]))
    tokenizer = tokenizer_of(vocabulary, merges, split_of(model_dir))
    add_described(model_dir / NAME, tokenizer, read_described_tokens(model_dir))
    return LoadedVocabulary(tokenizer)
