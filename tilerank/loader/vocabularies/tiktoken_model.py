"""tiktoken.model: a line a token, its bytes in base64 and its rank, which is its id. Kimi's models have it."""

import binascii
from base64 import b64decode
from pathlib import Path

from ..errors import TokenizerError, show
from ..files import read_bytes
from ..special_tokens import read_described_tokens
from .byte_level import tokenizer_of_ranks
from .loaded import LoadedVocabulary, add_described
from .splits import split_of

NAME = "tiktoken.model"


def read(model_dir: Path) -> LoadedVocabulary:
    tokenizer = tokenizer_of_ranks(read_ranks(model_dir, NAME), split_of(model_dir))
    add_described(model_dir / NAME, tokenizer, read_described_tokens(model_dir))
    return LoadedVocabulary(tokenizer)


def read_ranks(model_dir: Path, name: str) -> dict[bytes, int]:
    """Return the tokens of a file with their ranks. Raises TokenizerError."""
    where = model_dir / name
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(read_bytes(model_dir, name, TokenizerError).splitlines(), start=1):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[b64decode(token, validate=True)] = int(rank)
        except (binascii.Error, ValueError):
            raise TokenizerError(
                f"{where}: line {number}: expected a token in base64 and its rank, found {show(line)}"
            ) from None
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise TokenizerError(f"{where}: expected the ranks 0 to {len(ranks) - 1}, each once")
    return ranks
