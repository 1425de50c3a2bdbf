"""Converts text to token ids and back with the vocabulary file of a model directory, and applies its chat template."""

import codecs
import json
import threading
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import processors

from .chat.jinja import JinjaTemplate
from .chat.template import GEMMA_THINK, REASONING_MARKS, ChatTemplate, ReasoningMarks, Segment
from .errors import TokenizerError, show, tokenizer_errors
from .harmony.marks import CHANNEL, MARKS, TURN_ENDS
from .harmony.template import HarmonyTemplate
from .linear_time import is_linear, makes_longer
from .special_tokens import read_special_tokens, read_tokenizer_config
from .vocabularies.byte_level import BYTES
from .vocabularies.table import find_vocabulary

# With these decoders a token's text depends on earlier tokens only at the start of the text and in runs of byte tokens.
_LOCAL_DECODERS = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}

_RESULT = "<|tool_response>"
"""Begins the result of a tool of Gemma 4, which stands in the model's turn: a turn with a call ends before it."""


class Tokenizer:
    """The tokenizer of a model directory.

    template_file: a chat template in place of the directory's. special_tokens: name ("bos_token") -> content. Raises
    TokenizerError if a file is missing, malformed or unsupported.
    """

    def __init__(self, model_dir: Path, template_file: Path | None = None) -> None:
        self.model_dir = model_dir
        self.template_file = template_file
        self._file, read = find_vocabulary(model_dir)
        with tokenizer_errors(f"{self._file}: not a valid tokenizer"):
            vocabulary = read(model_dir)
        self._inner = vocabulary.tokenizer
        added = self._inner.get_added_tokens_decoder()
        special_tokens = read_special_tokens(model_dir, added)
        with tokenizer_errors(f"{model_dir}: cannot add special tokens"):
            self._inner.add_tokens(special_tokens.added)
        self.special_tokens = {**vocabulary.names, **special_tokens.names}
        if self._inner.post_processor is None:
            self._inner.post_processor = _begin_and_end(model_dir, self._inner, self.special_tokens)
        # A token that has once been special is left out of decoded text, whatever flags the library gives it later.
        tokens = (*added.items(), *self._inner.get_added_tokens_decoder().items())
        self._special_ids = frozenset(id for id, token in tokens if token.special)
        self._decoder = _decoder_type(self._file, self._inner)
        self._encoding = threading.Lock()  # the library has one setting for all threads
        self._bytes_of: dict[tuple[int, bool], bytes] = {}  # what token_bytes has returned, at most the vocabulary

    @cached_property
    def num_tokens(self) -> int:
        """Return the highest token id plus 1."""
        return max(self._inner.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def first_difference(self, other: "Tokenizer") -> tuple[int, str, str] | None:
        """Return the first id that stands for different tokens in two vocabularies, its token here and there; None if
        all that both have are the same."""
        own, others = (
            {id: token for token, id in one._inner.get_vocab(with_added_tokens=True).items()} for one in (self, other)
        )
        id = min((id for id in own.keys() & others.keys() if own[id] != others[id]), default=None)
        return None if id is None else (id, own[id], others[id])

    @cached_property
    def longest_token(self) -> int:
        """The most characters of a text that one token stands for.

        A vocabulary writes a token in at least as many characters: byte-level ones in one for each byte.
        """
        return max(map(len, self._inner.get_vocab(with_added_tokens=True)), default=0)

    @cached_property
    def appended_ids(self) -> tuple[int, ...]:
        """The tokens that are added after a text (Qwen3-Embedding: the end-of-text token)."""
        plain, whole = (self.encode("a", add_special_tokens) for add_special_tokens in (False, True))
        before = next((i for i in range(len(whole)) if whole[i : i + len(plain)] == plain), len(whole))
        return tuple(whole[before + len(plain) :])

    @cached_property
    def is_linear(self) -> bool:
        """Whether `encode` is known to take linear time and memory, whatever the text."""
        return is_linear(self._inner)

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """That of the model directory, or of `template_file`. For the vocabulary of harmony it is harmony's own, unless
        there is a template that writes no channels."""
        found = JinjaTemplate(self.model_dir, self.special_tokens, self.reasoning_marks, self.template_file)
        writes_channels = not found.source or CHANNEL in found.source
        return HarmonyTemplate() if self.has_channels and writes_channels else found

    @cached_property
    def reasoning_marks(self) -> ReasoningMarks | None:
        """The marks of reasoning of which both are tokens."""
        return next((marks for marks in REASONING_MARKS if None not in map(self.token_id, marks[:2])), None)

    @cached_property
    def has_channels(self) -> bool:
        """Whether the vocabulary is that of harmony, in which every message has a channel."""
        return all(self.token_id(mark) in self._special_ids for mark in MARKS)

    def end_token_ids(self, after_answer: str = "") -> tuple[int, ...]:
        """Return the tokens that end a text: eos_token, the added token with which `after_answer` begins, the text
        that the chat template prints after an answer (ChatTemplate.after_answer), and those of harmony and of Gemma 4,
        some of which released files leave out."""
        added = {token.content: id for id, token in self._inner.get_added_tokens_decoder().items()}
        after = after_answer.lstrip()
        turn_end = max((content for content in added if content and after.startswith(content)), key=len, default=None)
        eos = self.special_tokens.get("eos_token")
        ids = (None if eos is None else self._inner.token_to_id(eos), None if turn_end is None else added[turn_end])
        of_harmony = [self.token_id(mark) for mark in TURN_ENDS] if self.has_channels else []
        of_gemma = self.token_id(_RESULT) if self.reasoning_marks is GEMMA_THINK else None
        return tuple(dict.fromkeys(id for id in (*ids, *of_harmony, of_gemma) if id is not None))

    def to_json(self) -> str:
        """Return the tokenizer in the format of tokenizer.json, with the special tokens that other files add."""
        return str(self._inner.to_str())

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`. Special tokens in the text become their ids.

        add_special_tokens: also add the tokens of the post-processor (Llama: the begin-of-text token). Text from
        apply_chat_template contains them already.
        """
        return self._encode([text], add_special_tokens, marks=True)[0]

    def encode_segments(self, segments: Sequence[Segment], add_special_tokens: bool = False) -> list[int]:
        """Return the token ids of a text in segments, each of which is tokenised by itself.

        add_special_tokens: as in `encode`; a text in several segments has all of its special tokens already.
        """
        added = add_special_tokens and len(segments) == 1
        ids = {
            marks: iter(self._encode([one.text for one in segments if one.marks is marks], added, marks))
            for marks in (True, False)
        }
        return [id for segment in segments for id in next(ids[segment.marks])]

    def _encode(self, texts: Sequence[str], add_special_tokens: bool, marks: bool) -> list[list[int]]:
        """Return the token ids of each text. marks: special tokens in a text become their ids."""
        for text in texts:
            try:
                text.encode()
            except UnicodeEncodeError as failure:
                # Python decodes a command line that is not UTF-8 to lone surrogates.
                raise TokenizerError(f"text to encode: expected valid Unicode, found {show(text)}") from failure
        # The name of the file and not its path, because clients of the server see this error.
        with self._encoding, tokenizer_errors(f"{self._file.name}: cannot encode {show(' '.join(texts))}"):
            self._inner.encode_special_tokens = not marks
            # A batch omits the offsets, which take most of the time.
            return [
                list(one.ids) for one in self._inner.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
            ]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids` without special and unknown tokens. Incomplete characters become U+FFFD."""
        if any(not 0 <= id < 1 << 32 for id in ids):
            raise TokenizerError(f"token ids: expected integers from 0 to {(1 << 32) - 1}, found {show(list(ids))}")
        return str(self._inner.decode(list(ids), skip_special_tokens=True))

    def token_bytes(self, id: int, *, first: bool = False) -> bytes:
        """Return the bytes that a token adds to a text, maybe part of a character; none if it is special or unknown.

        first: the token begins the text, where sentencepiece-style vocabularies omit a space.
        """
        known = self._bytes_of.get((id, first))
        if known is not None:
            return known
        token = self.token(id)
        if token is None:
            return b""
        if self._decoder == "ByteLevel":
            data = _token_bytes(token)
        elif _is_byte(token):
            data = bytes([int(token[3:5], 16)])
        else:
            alone = self.decode([id])
            data = (alone if first else self.decode([id, id])[len(alone) :]).encode()
        self._bytes_of[id, first] = data
        return data

    def stream(self, *, special: bool = False, marks: Sequence[str] = ()) -> "TokenStream":
        """Return a new incremental decoder for one text. special: special tokens are part of it. marks: special
        tokens that are part of it in any case."""
        ids = {id for mark in marks if (id := self.token_id(mark)) is not None}
        shown = self._special_ids if special else self._special_ids & ids
        return ByteStream(self, shown) if self._decoder == "ByteLevel" else PieceStream(self, shown)

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """Return the text of a conversation (see ChatTemplate.render). Encode it with add_special_tokens=False."""
        return self.chat_template.render(messages, **variables).text

    def token_id(self, token: str) -> int | None:
        """Return the id of an entry of the vocabulary; None if there is none."""
        id: int | None = self._inner.token_to_id(token)
        return id

    def token(self, id: int) -> str | None:
        """Return the token's entry in the vocabulary; None for a special token or an unknown id."""
        return None if id in self._special_ids else self._inner.id_to_token(id)

    def special_token(self, id: int) -> str:
        """Return the text of a special token; an empty one for any other id."""
        return (self._inner.id_to_token(id) or "") if id in self._special_ids else ""


class TokenStream(ABC):
    """Decodes a text token by token. The results of all `push` calls and of `flush` add up to `decode` of all ids.

    No later token can change a result, so that it never contains part of a character. shown: special tokens that are
    part of the text; `decode` leaves out all of them.
    """

    def __init__(self, tokenizer: Tokenizer, shown: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._shown = shown

    @abstractmethod
    def push(self, id: int) -> str:
        """Append a token and return the text that has become certain, which may be empty."""

    @abstractmethod
    def flush(self) -> str:
        """Return the rest of the text, with U+FFFD for incomplete characters, and begin a new text."""


class ByteStream(TokenStream):
    """The decoder of byte-level vocabularies, in which every token is a string of bytes."""

    def __init__(self, tokenizer: Tokenizer, shown: Collection[int]) -> None:
        super().__init__(tokenizer, shown)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, id: int) -> str:
        token = self._tokenizer.token(id)
        if token is None:
            return self._utf8.decode(self._tokenizer.special_token(id).encode()) if id in self._shown else ""
        return self._utf8.decode(_token_bytes(token))

    def flush(self) -> str:
        text = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return text


class PieceStream(TokenStream):
    """The decoder of sentencepiece-style vocabularies: a run of byte tokens (<0xE2>) is decoded as a whole."""

    def __init__(self, tokenizer: Tokenizer, shown: Collection[int]) -> None:
        super().__init__(tokenizer, shown)
        self._context: list[int] = []  # the last decoded token, because the start of a text is decoded differently
        self._pending: list[int] = []

    def push(self, id: int) -> str:
        token = self._tokenizer.token(id)
        if token is None:
            return self._release(None) + self._tokenizer.special_token(id) if id in self._shown else ""
        self._pending.append(id)
        return "" if _is_byte(token) else self._release(id)

    def flush(self) -> str:
        text = self._release(None)
        self._context = []
        return text

    def _release(self, context: int | None) -> str:
        before = self._tokenizer.decode(self._context)
        text = self._tokenizer.decode(self._context + self._pending)[len(before) :]
        self._pending = []
        if context is not None:
            self._context = [context]
        return text


def _token_bytes(token: str) -> bytes:
    """Decode like the ByteLevel decoder: a token with characters outside the alphabet (an added one) is plain UTF-8."""
    try:
        return bytes(BYTES[character] for character in token)
    except KeyError:
        return token.encode()


def _begin_and_end(
    model_dir: Path, inner: tokenizers.Tokenizer, names: Mapping[str, str]
) -> processors.TemplateProcessing:
    """Return what adds the tokens at the begin and the end of a text that tokenizer_config.json asks for.

    For vocabulary files that do not say it: tokenizer.json does, and wins, as in transformers.
    """
    config = read_tokenizer_config(model_dir)
    begin = names.get("bos_token") if config.get("add_bos_token") is True else None
    end = names.get("eos_token") if config.get("add_eos_token") is True else None
    added = [token for token in (begin, end) if token is not None]
    ids = [inner.token_to_id(token) for token in added]
    # A list and not a text, in which a token with a colon or a space would have another meaning.
    single = [*([] if begin is None else [begin]), "$A", *([] if end is None else [end])]
    return processors.TemplateProcessing(single, ["$A", "$B"], list(zip(added, ids, strict=True)))


def _is_byte(token: str) -> bool:
    return len(token) == 6 and token.startswith("<0x") and token.endswith(">")


def _decoder_type(where: Path, inner: tokenizers.Tokenizer) -> str:
    """Return "ByteLevel" or "Sequence". Any other decoder is refused, because its text cannot be streamed exactly."""
    decoder: dict[str, Any] = {"type": None} if inner.decoder is None else json.loads(inner.decoder.__getstate__())
    parts = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    if [part["type"] for part in parts] == ["ByteLevel"]:
        return "ByteLevel"
    if _is_local(parts):
        return "Sequence"
    names = ", ".join(str(part["type"]) for part in parts)
    raise TokenizerError(
        f"{where}: decoder: expected ByteLevel, or a sequence in which a token's text depends on the previous token "
        f"alone, found {names}"
    )


def _is_local(decoders: list[dict[str, Any]]) -> bool:
    """Return whether a token's text depends on the previous token alone.

    `Strip` may remove at most one character from the start of the text and none from its end, and `Replace` may not
    work on joined tokens. It also may not make a text longer or take more than linear time, because answers are decoded
    where nothing limits it.
    """
    types = [decoder["type"] for decoder in decoders]
    joined = types.index("Fuse") if "Fuse" in types else len(types)
    return (
        _LOCAL_DECODERS.issuperset(types)
        and sum(decoder.get("start", 0) for decoder in decoders) <= 1
        and not any(decoder.get("stop") for decoder in decoders)
        and "Replace" not in types[joined:]
        and not any(makes_longer(decoder) for decoder in decoders if decoder["type"] == "Replace")
    )
