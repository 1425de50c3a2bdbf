"""Formats the choices of chats and of plain prompts: chunks of a stream, and whole choices put together from chunks."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import ClassVar

from tilerank.loader.tokenizer import Tokenizer

from ...chat.deltas import Delta
from ...chat.logprobs import TokenText, token_entries
from ...chat.tools.calls import MoreArguments, ToolCall
from ..answer import Json


class Formatter(ABC):
    """Formats the choices of one API request.

    prefix: of the answer's id. objects: the JSON "object" field of chunks and of the full response. shared: fields that
    all choices of an answer share. costly: whether `choice` takes long. top: alternatives to list for each token; None
    for no log-probabilities. by_id: as in TokenText.
    """

    prefix: str
    objects: tuple[str, str]
    shared: tuple[str, ...] = ()
    costly = False

    def __init__(self, tokenizer: Tokenizer, top: int | None, by_id: bool = False) -> None:
        self._tokenizer = tokenizer
        self._top = top
        self._by_id = by_id
        self._token_texts: dict[int, TokenText] = {}

    @abstractmethod
    def chunk(self, delta: Delta) -> Json:
        """Return the chunk for a delta."""

    @abstractmethod
    def merged(self, chunks: Sequence[Json]) -> Json:
        """Return one chunk for several that follow each other, the first of a choice among them."""

    @abstractmethod
    def choice(self, chunks: Sequence[Json]) -> Json:
        """Return a whole choice, put together from all of its chunks."""

    def _token_text(self, index: int) -> TokenText:
        if index not in self._token_texts:
            self._token_texts[index] = TokenText(self._tokenizer, self._by_id)
        return self._token_texts[index]


class TextFormatter(Formatter):
    """Formats answers of /v1/completions."""

    prefix = "cmpl"
    objects = ("text_completion", "text_completion")

    def chunk(self, delta: Delta) -> Json:
        return {
            "index": delta.index,
            "text": delta.text,
            "logprobs": None if self._top is None else self._logprobs(delta, self._top),
            "finish_reason": delta.finish_reason,
        }

    def merged(self, chunks: Sequence[Json]) -> Json:
        return chunks[0] | self._content(chunks)

    def choice(self, chunks: Sequence[Json]) -> Json:
        return chunks[-1] | self._content(chunks)

    def _content(self, chunks: Sequence[Json]) -> Json:
        return {
            "text": "".join(chunk["text"] for chunk in chunks),
            "logprobs": _concatenated(chunk["logprobs"] for chunk in chunks),
        }

    def _logprobs(self, delta: Delta, top: int) -> Json:
        token_text = self._token_text(delta.index)
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
    """Formats answers of /v1/chat/completions. first: what the first delta of a choice has in any case."""

    prefix = "chatcmpl"
    objects = ("chat.completion.chunk", "chat.completion")
    shared = ("prompt_token_ids",)  # all choices of a chat have the same prompt
    first: ClassVar[Json] = {"role": "assistant", "content": ""}

    def __init__(self, tokenizer: Tokenizer, top: int | None, by_id: bool = False) -> None:
        super().__init__(tokenizer, top, by_id)
        self._num_calls: dict[int, int] = {}

    def chunk(self, delta: Delta) -> Json:
        content = self._content(delta)
        if delta.opening is not None:
            content = self.first | content
        reason = delta.finish_reason
        if reason == "stop" and self._num_calls.get(delta.index):
            reason = "tool_calls"
        logprobs = None
        if self._top is not None:
            entries = token_entries(delta.tokens, self._top, self._token_text(delta.index))
            logprobs = {"content": entries, "refusal": None}
        return {"index": delta.index, "delta": content, "logprobs": logprobs, "finish_reason": reason}

    def merged(self, chunks: Sequence[Json]) -> Json:
        text, reasoning, calls = _parts(chunks)
        delta = chunks[0]["delta"] | reasoning_fields(reasoning) | ({"content": text} if text else {})
        logprobs = _concatenated(chunk["logprobs"] for chunk in chunks)
        return chunks[0] | {"delta": delta | ({"tool_calls": calls} if calls else {}), "logprobs": logprobs}

    def choice(self, chunks: Sequence[Json]) -> Json:
        text, reasoning, calls = _parts(chunks)
        content = text or (None if calls or reasoning else "")
        message: Json = {"role": "assistant", "content": content, "refusal": None}
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
        calls = _joined([self._call(delta.index, piece) for piece in delta.pieces if not isinstance(piece, str)])
        content = reasoning_fields(delta.reasoning) | ({"content": delta.text} if delta.text else {})
        return content | ({"tool_calls": calls} if calls else {})

    def _call(self, index: int, piece: ToolCall | MoreArguments) -> Json:
        number = self._num_calls.get(index, 0)
        if isinstance(piece, MoreArguments):
            return {"index": number - 1, "function": {"arguments": piece.text}}
        self._num_calls[index] = number + 1
        function = {"name": piece.name, "arguments": piece.arguments}
        return {"index": number, "id": piece.id, "type": "function", "function": function}


def _parts(chunks: Sequence[Json]) -> tuple[str, str, list[Json]]:
    """Return the text, the reasoning and the tool calls of the chunks of a chat."""
    deltas = [chunk["delta"] for chunk in chunks]
    text, reasoning = ("".join(one.get(field) or "" for one in deltas) for field in ("content", "reasoning_content"))
    return text, reasoning, _joined([call for one in deltas for call in one.get("tool_calls", [])])


def _joined(calls: Sequence[Json]) -> list[Json]:
    """Return the calls, with parts of one call that follow each other as one."""
    joined: list[Json] = []
    for _, group in groupby(calls, key=lambda call: call["index"]):
        first, *rest = group
        arguments = "".join(call["function"]["arguments"] for call in (first, *rest))
        joined.append(first | {"function": first["function"] | {"arguments": arguments}})
    return joined


def reasoning_fields(text: str) -> Json:
    """Return the fields of a reasoning, if there is any: DeepSeek's name, which most clients read, and that of newer
    servers."""
    return {"reasoning_content": text, "reasoning": text} if text else {}


def _concatenated(parts: Iterable[Json | None]) -> Json | None:
    """Return the parts as one object whose lists are concatenated; None if all parts are None."""
    whole: Json = {}
    for part in filter(None, parts):
        for name, values in part.items():
            if isinstance(values, list):
                whole.setdefault(name, []).extend(values)
            else:
                whole[name] = values
    return whole or None
