"""tokenizer.model, the format of SentencePiece: pieces with scores, for byte pairs or a unigram model."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from ..errors import TokenizerError, show
from ..files import read_bytes
from ..special_tokens import read_described_tokens, read_tokenizer_config
from .loaded import LoadedVocabulary, add_described

NAME = "tokenizer.model"
_SPACE = "▁"
# Piece.Type and TrainerSpec.ModelType of sentencepiece_model.proto.
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
_UNIGRAM, _BPE = 1, 2
_LLAMA = {"LlamaTokenizer", "CodeLlamaTokenizer"}


def read(model_dir: Path) -> LoadedVocabulary:
    from sentencepiece import sentencepiece_model_pb2 as schema  # imported late: few directories have such a file

    where = model_dir / NAME
    model_type: Any = schema.ModelProto  # type: ignore[attr-defined]  # made when it is imported
    file = model_type.FromString(read_bytes(model_dir, NAME, TokenizerError))
    trainer, config = file.trainer_spec, read_tokenizer_config(model_dir)
    if trainer.treat_whitespace_as_suffix:
        raise TokenizerError(f"{where}: expected whitespace before words, found treat_whitespace_as_suffix")
    described = read_described_tokens(model_dir)
    pieces = _renamed([piece.piece for piece in file.pieces], described)
    tokenizer = tokenizers.Tokenizer(_model(where, file, pieces))
    _set_spaces(tokenizer, file.normalizer_spec, config)
    tokenizer.add_tokens(
        [
            AddedToken(piece, special=entry.type == _CONTROL, normalized=False)
            for piece, entry in zip(pieces, file.pieces, strict=True)
            if entry.type in (_CONTROL, _USER_DEFINED)
        ]
    )
    add_described(where, tokenizer, described)
    ids = {"bos_token": trainer.bos_id, "eos_token": trainer.eos_id, "unk_token": trainer.unk_id}
    return LoadedVocabulary(tokenizer, {name: pieces[id] for name, id in ids.items() if 0 <= id < len(pieces)})


def _renamed(pieces: list[str], described: dict[int, AddedToken]) -> list[str]:
    """Return the pieces, with those that other files give another name, such as <unused7>, under that name."""
    known = set(pieces)
    return [
        described[id].content if id in described and described[id].content not in known else piece
        for id, piece in enumerate(pieces)
    ]


def _model(where: Path, file: Any, pieces: Sequence[str]) -> models.Model:
    trainer, scores = file.trainer_spec, [piece.score for piece in file.pieces]
    if len(set(pieces)) < len(pieces) or not 0 <= trainer.unk_id < len(pieces):
        raise TokenizerError(f"{where}: expected pieces that differ, among them the unknown piece {trainer.unk_id}")
    if trainer.model_type == _UNIGRAM:
        vocabulary = list(zip(pieces, scores, strict=True))
        return models.Unigram(vocabulary, unk_id=trainer.unk_id, byte_fallback=trainer.byte_fallback)
    if trainer.model_type != _BPE:
        raise TokenizerError(f"{where}: model_type: expected 1 (unigram) or 2 (BPE), found {show(trainer.model_type)}")
    ids = {piece: id for id, piece in enumerate(pieces)}
    mergeable = {
        piece: id for id, (piece, entry) in enumerate(zip(pieces, file.pieces, strict=True)) if entry.type == _NORMAL
    }
    merges = merges_of(mergeable, scores)
    unknown = pieces[trainer.unk_id]
    return models.BPE(ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=trainer.byte_fallback)


def merges_of(ids: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Return the merges of pieces with scores: any two pieces that make a third, the third with the best score first.

    ids: of the pieces that take part. scores: by id.
    """
    merges: list[tuple[str, str]] = []
    for piece, _ in sorted(ids.items(), key=lambda item: (-scores[item[1]], item[1])):
        cuts = range(1, len(piece))
        pairs = [(left, right) for i in cuts if (left := piece[:i]) in ids and (right := piece[i:]) in ids]
        if len(pairs) > 1:
            pairs.sort(key=lambda pair: (ids[pair[0]], ids[pair[1]]))
        merges += pairs
    return merges


def _set_spaces(tokenizer: tokenizers.Tokenizer, spec: Any, config: dict[str, Any]) -> None:
    """Set how texts are normalised, how spaces become a part of pieces, and how they are decoded."""
    is_llama = str(config.get("tokenizer_class")).removesuffix("Fast") in _LLAMA
    prefix = spec.add_dummy_prefix if config.get("add_prefix_space") is None else config["add_prefix_space"] is True
    steps: list[Any] = []
    if spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
    if spec.remove_extra_whitespaces:
        steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if is_llama:
        # As transformers: without `legacy` only the text begins with a space, else what follows a special token too.
        scheme = ("always" if config.get("legacy") is True else "first") if prefix else "never"
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, scheme, split=False)
    else:
        steps += spaces_as_pieces(prefix)
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = piece_decoder(prefix)


def spaces_as_pieces(prefix: bool) -> list[normalizers.Normalizer]:
    """Return what writes the spaces of a text as "▁". prefix: one more is put before the text."""
    return [*([normalizers.Prepend(_SPACE)] if prefix else []), normalizers.Replace(" ", _SPACE)]


def piece_decoder(prefix: bool) -> decoders.Decoder:
    """Return the decoder of pieces. prefix: the space before a text is no part of it."""
    return decoders.Sequence(
        [
            decoders.Replace(_SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *([decoders.Strip(" ", 1, 0)] if prefix else []),
        ]
    )
