"""Byte-level byte-pair encoding: tokenizers whose tokens are strings of bytes."""

from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from .splits import Split


def _alphabet() -> dict[str, int]:
    """Return GPT-2's map of printable characters to bytes.

    Printable Latin-1 characters stand for themselves, characters from U+0100 on for the other bytes.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(rest)}


BYTES = _alphabet()
_CHARACTERS = {byte: character for character, byte in BYTES.items()}


def text_of(token: bytes) -> str:
    """Return a token in GPT-2's alphabet."""
    return token.decode("latin-1").translate(_CHARACTERS)


def tokenizer_of(
    vocabulary: Mapping[str, int], merges: Sequence[tuple[str, str]], split: Split, *, ignore_merges: bool = False
) -> tokenizers.Tokenizer:
    """Return the tokenizer of a vocabulary in GPT-2's alphabet, and of its merges in order of priority.

    ignore_merges: a piece of text that is a token is not cut at all.
    """
    return _tokenizer(models.BPE(dict(vocabulary), list(merges), ignore_merges=ignore_merges), split)


def tokenizer_of_ranks(ranks: Mapping[bytes, int], split: Split, first: Sequence[str] = ()) -> tokenizers.Tokenizer:
    """Return the tokenizer of a vocabulary without merges, such as tiktoken's: two neighbours are merged if they
    make a token, that with the lowest rank first, and a piece of text that is a token is not cut at all.

    first: tokens whose ids come before all others; the id of a token of `ranks` is its rank and their number.
    """
    text = {token: text_of(token) for token in ranks}
    merges = []
    for token, _ in sorted(ranks.items(), key=lambda item: item[1]):
        halves = ((token[:i], token[i:]) for i in range(1, len(token)))
        pairs = [pair for pair in halves if pair[0] in ranks and pair[1] in ranks]
        pairs.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        merges += [(text[left], text[right]) for left, right in pairs]
    ids = {text[token]: len(first) + rank for token, rank in ranks.items()}
    # One of `first` hides a token with the same text, which no text becomes: added tokens are cut out before.
    ids |= {token: id for id, token in enumerate(first)}
    return _tokenizer(models.BPE(ids, merges, ignore_merges=True), split)


def pre_tokenizer_of(split: Split) -> Any:
    """Return what splits texts before their pieces are encoded."""
    splits: list[Any] = [
        pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in split.patterns if pattern is not None
    ]
    usual = None in split.patterns
    splits.append(pre_tokenizers.ByteLevel(add_prefix_space=split.add_prefix_space, use_regex=usual))
    return pre_tokenizers.Sequence(splits) if len(splits) > 1 else splits[0]


def _tokenizer(model: models.BPE, split: Split) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(model)
    if split.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizer_of(split)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
