"""The vocabulary in the metadata of a GGUF file: byte-level byte pairs, or pieces with scores or merges."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, models, normalizers

from ..errors import CheckpointError, TokenizerError, show
from ..gguf.file import GGUFFile, open_gguf
from .byte_level import tokenizer_of
from .loaded import LoadedVocabulary
from .sentencepiece_model import merges_of, piece_decoder, spaces_as_pieces
from .splits import (
    DEEPSEEK3,
    DEEPSEEK_CODER,
    DEEPSEEK_LLM,
    DIGITS_GPT2,
    GPT2,
    LLAMA3,
    O200K,
    QWEN2,
    QWEN3_5,
    TEKKEN,
    Split,
)

_KEYS = "tokenizer.ggml."
_MAX_TOKENS = 1 << 22
# Types of tokens.
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
_PIECES = {"llama": True, "gemma4": False}
"""Kinds of vocabularies of pieces, and whether a text begins with a space unless a key says otherwise."""

_SPLITS: dict[str, Split] = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2"), LLAMA3),
    **dict.fromkeys(("glm4", "glm5", "chatglm-bpe"), LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), QWEN2),
    "qwen35": QWEN3_5,
    **dict.fromkeys(("smollm", "starcoder", "command-r", "refact"), DIGITS_GPT2),
    "deepseek-v3": DEEPSEEK3,
    "deepseek-llm": DEEPSEEK_LLM,
    "deepseek-coder": DEEPSEEK_CODER,
    "tekken": TEKKEN,
    **dict.fromkeys(("gpt-4o", "minimax-m2"), O200K),
    "gpt-2": GPT2,
}
"""How texts are split before bytes are merged, by `tokenizer.ggml.pre`."""
_MERGED = frozenset(name for name, split in _SPLITS.items() if split not in (LLAMA3, TEKKEN)) | {"chatglm-bpe"}
"""Those that merge the bytes of a piece even if it is a token."""


def read(path: Path) -> LoadedVocabulary:
    """Return the tokenizer of a file. Raises TokenizerError for one of a kind that is not read."""
    try:
        gguf = open_gguf(path)
        model = gguf.fields(_KEYS).values.get("model")
        tokens = gguf.texts(f"{_KEYS}tokens")
        types = gguf.numbers(f"{_KEYS}token_type") if gguf.has_items(f"{_KEYS}token_type") else [_NORMAL] * len(tokens)
        if len(tokens) > _MAX_TOKENS or len(set(tokens)) < len(tokens) or len(types) != len(tokens):
            raise TokenizerError(
                f"{path}: {_KEYS}tokens: expected up to {_MAX_TOKENS} tokens that differ, with a type for each"
            )
        if model == "gpt2":
            tokenizer = _byte_level(gguf, tokens)
        elif model in _PIECES:
            tokenizer = _pieces(gguf, tokens, types)
        else:
            raise TokenizerError(f"{path}: {_KEYS}model: expected gpt2, llama or gemma4, found {show(model)}")
    except CheckpointError as failure:
        raise TokenizerError(str(failure)) from failure
    kinds = zip(tokens, types, strict=True)
    tokenizer.add_tokens(
        [
            AddedToken(token, special=type == _CONTROL, normalized=False)
            for token, type in kinds
            if type in (_CONTROL, _USER_DEFINED) and token
        ]
    )
    return LoadedVocabulary(tokenizer)


def _byte_level(gguf: GGUFFile, tokens: Sequence[str]) -> tokenizers.Tokenizer:
    name = str(gguf.fields(_KEYS).values.get("pre"))
    if name not in _SPLITS:
        known = ", ".join(_SPLITS)
        raise TokenizerError(f"{gguf.path}: {_KEYS}pre: expected one of {known}, found {show(name)}")
    ids = {token: id for id, token in enumerate(tokens)}
    return tokenizer_of(ids, _merges(gguf), _SPLITS[name], ignore_merges=name not in _MERGED)


def _merges(gguf: GGUFFile) -> list[tuple[str, str]]:
    merges = []
    for merge in gguf.texts(f"{_KEYS}merges"):
        cut = merge.find(" ", 1)
        if cut < 0:
            raise TokenizerError(f"{gguf.path}: {_KEYS}merges: expected two tokens, found {show(merge)}")
        merges.append((merge[:cut], merge[cut + 1 :]))
    return merges


def _pieces(gguf: GGUFFile, tokens: Sequence[str], types: Sequence[float]) -> tokenizers.Tokenizer:
    fields = gguf.fields(_KEYS)
    unknown = fields.values.get("unknown_token_id", 0)
    if type(unknown) is not int or not 0 <= unknown < len(tokens):
        raise TokenizerError(f"{gguf.path}: {_KEYS}unknown_token_id: expected a token, found {show(unknown)}")
    ids = {token: id for id, token in enumerate(tokens)}
    merges = _merges(gguf) if gguf.has_items(f"{_KEYS}merges") else _merges_by_score(gguf, ids, types)
    model = models.BPE(ids, merges, unk_token=tokens[unknown], fuse_unk=True, byte_fallback=True)
    tokenizer = tokenizers.Tokenizer(model)
    prefix = fields.flag("add_space_prefix") if fields.has("add_space_prefix") else _PIECES[fields.text("model")]
    tokenizer.normalizer = normalizers.Sequence(spaces_as_pieces(prefix))
    tokenizer.decoder = piece_decoder(prefix)
    return tokenizer


def _merges_by_score(gguf: GGUFFile, ids: Mapping[str, int], types: Sequence[float]) -> list[tuple[str, str]]:
    scores = gguf.numbers(f"{_KEYS}scores")
    if len(scores) != len(types):
        raise TokenizerError(f"{gguf.path}: {_KEYS}scores: expected {len(types)}, found {len(scores)}")
    return merges_of({token: id for token, id in ids.items() if types[id] == _NORMAL}, scores)
