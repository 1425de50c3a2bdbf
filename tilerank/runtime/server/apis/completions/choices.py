"""Formats answers as the JSON of the OpenAI API: chunks of a stream, and whole choices put together from chunks."""

import codecs
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar

from tilerank.loader.tokenizer import Tokenizer

from ....protocol.events import TokenEvent
from ....protocol.params import Logprobs
from ...chat.deltas import Delta
from ...chat.tools import ToolCall, ToolParser, split
from ..answer import Json


class TokenText:
    """The bytes of the tokens of one choice.

    offset: index of the next token's first character in the text. A token that continues a character has the index of
    that character. by_id: tokens are named by their ids, because the bytes of some are the same.
    """

    def __init__(self, tokenizer: Tokenizer, by_id: bool = False) -> None:
        self.offset = 0
        self._by_id = by_id
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._first = True

    def bytes_of(self, id: int) -> bytes:
        """Return the bytes that a token would add if it came next."""
        return self._tokenizer.token_bytes(id, first=self._first)

    def name(self, id: int) -> str:
        """Return the name of a token in lists of log-probabilities."""
        return f"token_id:{id}" if self._by_id else self.bytes_of(id).decode(errors="replace")

    def advance(self, id: int) -> None:
        """Append a token."""
        data = self.bytes_of(id)
        self._first = self._first and not data
        self.offset += len(self._utf8.decode(data))


class Formatter(ABC):
    """Formats the choices of one API request.

    prefix: of the answer's id. objects: the JSON "object" field of chunks and of the full response. costly: whether
    `choice` takes long.
    """

    prefix: str
    objects: tuple[str, str]
    costly = False

    @abstractmethod
    def chunk(self, delta: Delta) -> Json | None:
        """Return the chunk for a delta; None if it has nothing to show yet."""

    @abstractmethod
    def choice(self, chunks: Sequence[Json]) -> Json:
        """Return a whole choice, put together from all of its chunks."""


class TextFormatter(Formatter):
    """Formats answers of /v1/completions.

    top: alternatives to list for each token; None for no log-probabilities. by_id: as in TokenText.
    """

    prefix = "cmpl"
    objects = ("text_completion", "text_completion")

    def __init__(self, tokenizer: Tokenizer, top: int | None, by_id: bool = False) -> None:
        self._tokenizer = tokenizer
        self._top = top
        self._by_id = by_id
        self._token_texts: dict[int, TokenText] = {}

    def chunk(self, delta: Delta) -> Json:
        return {
            "index": delta.index,
            "text": delta.text,
            "logprobs": None if self._top is None else self._logprobs(delta, self._top),
            "finish_reason": delta.finish_reason,
        }

    def choice(self, chunks: Sequence[Json]) -> Json:
        return chunks[-1] | {
            "text": "".join(chunk["text"] for chunk in chunks),
            "logprobs": _concatenated(chunk["logprobs"] for chunk in chunks),
        }

    def _logprobs(self, delta: Delta, top: int) -> Json:
        if (token_text := self._token_texts.get(delta.index)) is None:
            token_text = self._token_texts[delta.index] = TokenText(self._tokenizer, self._by_id)
        found: Json = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token in delta.tokens:
            logprobs = token.logprobs  # None for the first token of a prompt
            found["tokens"].append(token_text.name(token.token_id))
            found["token_logprobs"].append(None if logprobs is None else logprobs.chosen)
            alternatives: dict[str, float] = {}
            for id, value in () if logprobs is None else logprobs.top[:top]:
                # Parts of characters have the same text. The most likely one is kept.
                alternatives.setdefault(token_text.name(id), value)
            found["top_logprobs"].append(None if logprobs is None else alternatives)
            found["text_offset"].append(token_text.offset)
            token_text.advance(token.token_id)
        return found


class ChatFormatter(Formatter):
    """Formats answers of /v1/chat/completions.

    top, by_id: as in TextFormatter. new_parser: makes the parser that finds tool calls in the text of a choice; None if
    there are no tools to call. first: what the first delta of a choice has in any case.
    """

    prefix = "chatcmpl"
    objects = ("chat.completion.chunk", "chat.completion")
    first: ClassVar[Json] = {"role": "assistant", "content": ""}

    def __init__(
        self, tokenizer: Tokenizer, top: int | None, new_parser: Callable[[], ToolParser] | None, by_id: bool = False
    ) -> None:
        self._tokenizer = tokenizer
        self._top = top
        self._by_id = by_id
        self._new_parser = new_parser
        self._parsers: dict[int, ToolParser | None] = {}
        self._num_calls: dict[int, int] = {}
        self._pending: dict[int, list[TokenEvent]] = {}  # tokens whose text the parser holds back
        self._token_texts: dict[int, TokenText] = {}

    def chunk(self, delta: Delta) -> Json | None:
        is_first = delta.index not in self._parsers
        if is_first:
            self._parsers[delta.index] = self._new_parser() if self._new_parser else None
            self._num_calls[delta.index] = 0
            self._pending[delta.index] = []
            self._token_texts[delta.index] = TokenText(self._tokenizer, self._by_id)
        self._pending[delta.index] += delta.tokens
        content = self._content(delta)
        reason = delta.finish_reason
        if reason == "stop" and self._num_calls[delta.index]:
            reason = "tool_calls"
        if not (content or is_first or reason):
            return None
        if is_first:
            content = self.first | content
        tokens, self._pending[delta.index] = self._pending[delta.index], []
        logprobs = None
        if self._top is not None:
            entries = token_entries(tokens, self._top, self._token_texts[delta.index])
            logprobs = {"content": entries, "refusal": None}
        return {"index": delta.index, "delta": content, "logprobs": logprobs, "finish_reason": reason}

    def choice(self, chunks: Sequence[Json]) -> Json:
        text, reasoning = (
            "".join(chunk["delta"].get(field) or "" for chunk in chunks) for field in ("content", "reasoning_content")
        )
        calls = [call for chunk in chunks for call in chunk["delta"].get("tool_calls", [])]
        message: Json = {"role": "assistant", "content": text or (None if calls else ""), "refusal": None}
        message |= reasoning_fields(reasoning)
        if calls:
            message["tool_calls"] = [{key: call[key] for key in ("id", "type", "function")} for call in calls]
        return {
            "index": chunks[0]["index"],
            "message": message,
            "logprobs": _concatenated(chunk["logprobs"] for chunk in chunks),
            "finish_reason": chunks[-1]["finish_reason"],
        }

    def _content(self, delta: Delta) -> Json:
        parser = self._parsers[delta.index]
        content = reasoning_fields(delta.reasoning)
        found = split(parser, delta.text, last=delta.finish_reason is not None)
        text = "".join(piece for piece in found if isinstance(piece, str))
        calls = [self._call(delta.index, piece) for piece in found if isinstance(piece, ToolCall)]
        return content | ({"content": text} if text else {}) | ({"tool_calls": calls} if calls else {})

    def _call(self, index: int, call: ToolCall) -> Json:
        number = self._num_calls[index]
        self._num_calls[index] += 1
        function = {"name": call.name, "arguments": call.arguments}
        return {"index": number, "id": call.id, "type": "function", "function": function}


def token_entries(tokens: Sequence[TokenEvent], top: int, token_text: TokenText) -> list[Json]:
    """Return the log-probabilities of tokens, and of the `top` likeliest alternatives of each, as chats list them."""

    def entry(id: int, value: float) -> Json:
        return {"token": token_text.name(id), "logprob": value, "bytes": list(token_text.bytes_of(id))}

    entries = []
    for token in tokens:
        logprobs = _logprobs(token)
        alternatives = [entry(id, value) for id, value in logprobs.top[:top]]
        entries.append(entry(token.token_id, logprobs.chosen) | {"top_logprobs": alternatives})
        token_text.advance(token.token_id)
    return entries


def reasoning_fields(text: str) -> Json:
    """Return the fields of a reasoning, if there is any: DeepSeek's name, which most clients read, and that of newer
    servers."""
    return {"reasoning_content": text, "reasoning": text} if text else {}


def _logprobs(token: TokenEvent) -> Logprobs:
    assert token.logprobs is not None, "the request asked for log-probabilities"
    return token.logprobs


def _concatenated(parts: Iterable[Json | None]) -> Json | None:
    """Return the parts as one object whose lists are concatenated; None if all parts are None."""
    whole: Json | None = None
    for part in parts:
        if part is not None:
            before = whole or {}
            whole = {
                name: before.get(name, []) + values if isinstance(values, list) else values
                for name, values in part.items()
            }
    return whole
