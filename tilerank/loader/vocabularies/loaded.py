"""What a reader of a vocabulary file returns, and what readers share."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import tokenizers
from tokenizers import AddedToken

from ..errors import TokenizerError, show

_MAX_ID = 1 << 24


@dataclass(frozen=True)
class LoadedVocabulary:
    """A tokenizer made from one vocabulary file.

    names: name ("bos_token") -> content of the special tokens that the file names itself; other files win.
    """

    tokenizer: tokenizers.Tokenizer
    names: Mapping[str, str] = field(default_factory=dict)


def add_described(where: Path, tokenizer: tokenizers.Tokenizer, described: Mapping[int, AddedToken]) -> None:
    """Add the tokens that other files describe behind those of the vocabulary file `where`, each with its id.

    An id between them that no file describes becomes a special token without a meaning, as it is in the tokenizers of
    the families whose files have such gaps. Raises TokenizerError if a token cannot have its id.
    """
    first, last = tokenizer.get_vocab_size(), max(described, default=-1)
    if last > _MAX_ID:
        raise TokenizerError(f"{where}: expected added tokens with ids up to {_MAX_ID}, found {last}")
    reserved = {id: AddedToken(f"<|reserved_token_{id}|>", special=True, normalized=False) for id in range(first, last)}
    tokenizer.add_tokens([token for _, token in sorted((reserved | dict(described)).items())])
    for id, token in described.items():
        if (found := tokenizer.token_to_id(token.content)) != id:
            raise TokenizerError(f"{where}: expected the added token {show(token.content)} to be {id}, found {found}")
