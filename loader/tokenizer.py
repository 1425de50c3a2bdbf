"""Text <-> token ids by the directory's tokenizer.json, and the chat template beside it."""

import codecs
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from .chat import ChatTemplate
from .errors import TokenizerError
from .files import is_listed, read_bytes, read_json_object, show

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Decoders under which what precedes a token matters only at the start of the text and inside a run of byte tokens.
_LOCAL_DECODERS = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}


class Tokenizer:
    """The tokenizer of a model directory. Raises TokenizerError where a file is missing, malformed or unsupported."""

    def __init__(self, model_dir: Path) -> None:
        self.model_dir = model_dir
        if not is_listed(model_dir, "tokenizer.json"):
            raise TokenizerError(f"{model_dir}: expected a tokenizer.json, found no tokenizer that can be read")
        raw = read_bytes(model_dir, "tokenizer.json", TokenizerError)
        with _refusing(f"{model_dir / 'tokenizer.json'}: not a valid tokenizer"):
            self._inner = tokenizers.Tokenizer.from_buffer(raw)
        # Some published files carry the truncation and padding of a training run.
        self._inner.no_truncation()
        self._inner.no_padding()
        added = self._inner.get_added_tokens_decoder()
        self._special_ids = frozenset(id for id, token in added.items() if token.special)
        self._decoder = _decoder_type(model_dir / "tokenizer.json", self._inner)

    @property
    def num_tokens(self) -> int:
        """How many rows of the vocabulary have a token: one more than the highest id."""
        return max(self._inner.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @cached_property
    def special_tokens(self) -> dict[str, str]:
        """bos_token, eos_token and so on, from tokenizer_config.json, special_tokens_map.json where that is silent."""
        found: dict[str, str] = {}
        for name in ("special_tokens_map.json", "tokenizer_config.json"):
            if is_listed(self.model_dir, name):
                values = read_json_object(self.model_dir, name, TokenizerError)
                found |= _token_names(self.model_dir / name, values)
        return found

    @cached_property
    def chat_template(self) -> ChatTemplate:
        return ChatTemplate(self.model_dir, self.special_tokens)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Returns the token ids of `text`, which may spell special tokens.

        `add_special_tokens` adds what the post-processor does (Llama: the begin-of-text token). Text from
        apply_chat_template has its own and is encoded without.
        """
        try:
            text.encode()
        except UnicodeEncodeError as failure:
            # A command line that is not UTF-8 arrives with lone surrogates.
            raise TokenizerError(f"text to encode: expected valid Unicode, found {show(text)}") from failure
        with _refusing(f"{self.model_dir / 'tokenizer.json'}: cannot encode {show(text)}"):
            # A batch of one: it lets other threads run meanwhile, and leaves out the offsets, most of the time.
            return list(self._inner.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of `ids`, special and unknown ones left out; incomplete characters become U+FFFD."""
        if any(not 0 <= id < 1 << 32 for id in ids):
            raise TokenizerError(f"token ids: expected integers from 0 to {(1 << 32) - 1}, found {show(list(ids))}")
        return str(self._inner.decode(list(ids), skip_special_tokens=True))

    def spelled(self, id: int, *, first: bool = False) -> bytes:
        """Returns what a token adds to a text, maybe a part of a character; nothing if it is special or unknown.

        first: at the beginning of the text, where sentencepiece-style vocabularies leave out a space.
        """
        token = self.token(id)
        if token is None:
            return b""
        if self._decoder == "ByteLevel":
            return _token_bytes(token)
        if _is_byte(token):
            return bytes([int(token[3:5], 16)])
        alone = self.decode([id])
        return (alone if first else self.decode([id, id])[len(alone) :]).encode()

    def stream(self) -> "TokenStream":
        """Returns an incremental decoder, one for each generated text."""
        return ByteStream(self) if self._decoder == "ByteLevel" else PieceStream(self)

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """Returns the text of a conversation (see ChatTemplate.render), to be encoded with add_special_tokens=False."""
        return self.chat_template.render(messages, **variables)

    def token(self, id: int) -> str | None:
        """The token as the vocabulary spells it; None for a special token or an id without a token."""
        return None if id in self._special_ids else self._inner.id_to_token(id)


class TokenStream(ABC):
    """Decodes a text token by token: all that `push` and the closing `flush` return is `decode` of all the ids.

    Nothing that a later token could change is returned, so no half of a character ever is.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @abstractmethod
    def push(self, id: int) -> str:
        """Returns the text that is certain now: often one token's, sometimes none."""

    @abstractmethod
    def flush(self) -> str:
        """Returns what was held back, incomplete characters as U+FFFD; the stream starts anew."""


class ByteStream(TokenStream):
    """For byte-level vocabularies, whose every token is a string of bytes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, id: int) -> str:
        token = self._tokenizer.token(id)
        return "" if token is None else self._utf8.decode(_token_bytes(token))

    def flush(self) -> str:
        text = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return text


class PieceStream(TokenStream):
    """For sentencepiece-style vocabularies: runs of byte tokens (<0xE2>) are one unit, all other tokens stand alone."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        self._context: list[int] = []  # one decoded token, so that the rest is not taken for the start of the text
        self._held: list[int] = []

    def push(self, id: int) -> str:
        token = self._tokenizer.token(id)
        if token is None:
            return ""
        self._held.append(id)
        return "" if _is_byte(token) else self._release(id)

    def flush(self) -> str:
        text = self._release(None)
        self._context = []
        return text

    def _release(self, context: int | None) -> str:
        before = self._tokenizer.decode(self._context)
        text = self._tokenizer.decode(self._context + self._held)[len(before) :]
        self._held = []
        if context is not None:
            self._context = [context]
        return text


@contextmanager
def _refusing(what: str) -> Iterator[None]:
    """Turns whatever the library raises into a TokenizerError: plain Exception, and where a file breaks what its Rust
    code takes for granted, a PanicException, which is not even an Exception and cannot be imported."""
    try:
        yield
    except BaseException as failure:
        if isinstance(failure, Exception) or type(failure).__name__ == "PanicException":
            raise TokenizerError(f"{what}: {failure}") from failure
        raise


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's one printable character for each byte: printable Latin-1 is itself, the others follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(rest)}


_BYTES = _byte_alphabet()


def _token_bytes(token: str) -> bytes:
    """As the ByteLevel decoder does: a token with a character outside the alphabet (an added one) is its own UTF-8."""
    try:
        return bytes(_BYTES[character] for character in token)
    except KeyError:
        return token.encode()


def _is_byte(token: str) -> bool:
    return len(token) == 6 and token.startswith("<0x") and token.endswith(">")


def _decoder_type(where: Path, inner: tokenizers.Tokenizer) -> str:
    """ "ByteLevel" or "Sequence"; any other decoder is refused, because its text cannot be streamed exactly."""
    decoder: dict[str, Any] = {"type": None} if inner.decoder is None else json.loads(inner.decoder.__getstate__())
    parts = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    if [part["type"] for part in parts] == ["ByteLevel"]:
        return "ByteLevel"
    if _is_local(parts):
        return "Sequence"
    names = ", ".join(str(part["type"]) for part in parts)
    raise TokenizerError(
        f"{where}: decoder: expected ByteLevel or a sequence that decodes a token by the one before it, found {names}"
    )


def _is_local(decoders: list[dict[str, Any]]) -> bool:
    """Whether text can be decoded with one token before it: `Strip` may want no more than that one has, and what spans
    tokens is no business of `Replace`."""
    types = [decoder["type"] for decoder in decoders]
    joined = types.index("Fuse") if "Fuse" in types else len(types)
    return (
        _LOCAL_DECODERS.issuperset(types)
        and sum(decoder.get("start", 0) for decoder in decoders) <= 1
        and not any(decoder.get("stop") for decoder in decoders)
        and "Replace" not in types[joined:]
    )


def _token_names(where: Path, values: Mapping[str, Any]) -> dict[str, str]:
    """A special token is a string, or an object with its `content`."""
    found: dict[str, str] = {}
    for key in SPECIAL_TOKENS:
        value = values.get(key)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            found[key] = value
        elif values.get(key) is not None:
            raise TokenizerError(f"{where}: {key}: expected a token, found {show(values[key])}")
    return found
