"""How answers are worded: deltas of choices as the pieces of a stream, and pieces put together to a whole choice."""

import codecs
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

from tilerank.loader.tokenizer import Tokenizer

from ..params import Logprobs
from .completions import Delta
from .messages import Token
from .tools import ToolCall, ToolParser

Words = dict[str, Any]


class _Spelling:
    """How the tokens of one choice are spelled, and the character of its text at which the next one begins: one that
    continues a character begins where that does."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.offset = 0
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._first = True

    def spell(self, id: int) -> bytes:
        """A token that could come next."""
        return self._tokenizer.spelled(id, first=self._first)

    def take(self, id: int) -> None:
        """The token that does come next."""
        spelled = self.spell(id)
        self._first = self._first and not spelled
        self.offset += len(self._utf8.decode(spelled))


class Wording(ABC):
    """Of one request of the API. `objects`: what a piece and the whole call themselves."""

    prefix: str
    objects: tuple[str, str]

    @abstractmethod
    def piece(self, delta: Delta) -> Words | None:
        """None: nothing is certain yet."""

    @abstractmethod
    def whole(self, pieces: Sequence[Words]) -> Words:
        """One choice of all of its pieces."""


class TextWording(Wording):
    """/v1/completions. `top`: likeliest tokens to tell of each, None for no log-probabilities."""

    prefix = "cmpl"
    objects = ("text_completion", "text_completion")

    def __init__(self, tokenizer: Tokenizer, top: int | None) -> None:
        self._tokenizer = tokenizer
        self._top = top
        self._spellings: dict[int, _Spelling] = {}

    def piece(self, delta: Delta) -> Words:
        spelling = self._spellings.setdefault(delta.index, _Spelling(self._tokenizer))
        logprobs = None if self._top is None else self._logprobs(delta.tokens, self._top, spelling)
        return {
            "index": delta.index,
            "text": delta.text,
            "logprobs": logprobs,
            "finish_reason": delta.finish_reason,
        }

    def whole(self, pieces: Sequence[Words]) -> Words:
        return pieces[-1] | {
            "text": "".join(piece["text"] for piece in pieces),
            "logprobs": _joined(piece["logprobs"] for piece in pieces),
        }

    def _logprobs(self, tokens: Sequence[Token], top: int, spelling: _Spelling) -> Words:
        told: Words = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token in tokens:
            probabilities = _logprobs(token)
            told["tokens"].append(_text(spelling.spell(token.token_id)))
            told["token_logprobs"].append(probabilities.chosen)
            likeliest: dict[str, float] = {}
            for id, value in probabilities.top[:top]:
                likeliest.setdefault(_text(spelling.spell(id)), value)  # parts of characters read alike
            told["top_logprobs"].append(likeliest)
            told["text_offset"].append(spelling.offset)
            spelling.take(token.token_id)
        return told


class ChatWording(Wording):
    """/v1/chat/completions. `top` as in TextWording; `tools`: who finds tool calls, None where none are to be found."""

    prefix = "chatcmpl"
    objects = ("chat.completion.chunk", "chat.completion")

    def __init__(self, tokenizer: Tokenizer, top: int | None, tools: type[ToolParser] | None) -> None:
        self._tokenizer = tokenizer
        self._top = top
        self._tools = tools
        self._parsers: dict[int, ToolParser | None] = {}
        self._calls: dict[int, int] = {}
        self._held: dict[int, list[Token]] = {}  # of text that the parser holds
        self._spellings: dict[int, _Spelling] = {}

    def piece(self, delta: Delta) -> Words | None:
        begins = delta.index not in self._parsers
        if begins:
            self._parsers[delta.index] = self._tools() if self._tools else None
            self._calls[delta.index] = 0
            self._held[delta.index] = []
            self._spellings[delta.index] = _Spelling(self._tokenizer)
        self._held[delta.index] += delta.tokens
        said = self._said(delta)
        reason = delta.finish_reason
        if reason == "stop" and self._calls[delta.index]:
            reason = "tool_calls"
        if not (said or begins or reason):
            return None
        if begins:
            said = {"role": "assistant", "content": ""} | said
        tokens, self._held[delta.index] = self._held[delta.index], []
        logprobs = None if self._top is None else self._logprobs(tokens, self._top, self._spellings[delta.index])
        return {"index": delta.index, "delta": said, "logprobs": logprobs, "finish_reason": reason}

    def whole(self, pieces: Sequence[Words]) -> Words:
        text = "".join(piece["delta"].get("content", "") for piece in pieces)
        calls = [call for piece in pieces for call in piece["delta"].get("tool_calls", [])]
        message: Words = {"role": "assistant", "content": text or (None if calls else ""), "refusal": None}
        if calls:
            message["tool_calls"] = [{key: call[key] for key in ("id", "type", "function")} for call in calls]
        return {
            "index": pieces[0]["index"],
            "message": message,
            "logprobs": _joined(piece["logprobs"] for piece in pieces),
            "finish_reason": pieces[-1]["finish_reason"],
        }

    def _said(self, delta: Delta) -> Words:
        parser = self._parsers[delta.index]
        if parser is None:
            return {"content": delta.text} if delta.text else {}
        found = parser.push(delta.text) + (parser.flush() if delta.finish_reason else [])
        text = "".join(piece for piece in found if isinstance(piece, str))
        calls = [self._call(delta.index, piece) for piece in found if isinstance(piece, ToolCall)]
        return ({"content": text} if text else {}) | ({"tool_calls": calls} if calls else {})

    def _call(self, index: int, call: ToolCall) -> Words:
        number = self._calls[index]
        self._calls[index] += 1
        function = {"name": call.name, "arguments": call.arguments}
        return {"index": number, "id": call.id, "type": "function", "function": function}

    def _logprobs(self, tokens: Sequence[Token], top: int, spelling: _Spelling) -> Words:
        def one(id: int, value: float) -> Words:
            spelled = spelling.spell(id)
            return {"token": _text(spelled), "logprob": value, "bytes": list(spelled)}

        content = []
        for token in tokens:
            probabilities = _logprobs(token)
            likeliest = [one(id, value) for id, value in probabilities.top[:top]]
            content.append(one(token.token_id, probabilities.chosen) | {"top_logprobs": likeliest})
            spelling.take(token.token_id)
        return {"content": content, "refusal": None}


def _text(spelled: bytes) -> str:
    return spelled.decode(errors="replace")


def _logprobs(token: Token) -> Logprobs:
    assert token.logprobs is not None, "they were asked for"
    return token.logprobs


def _joined(parts: Iterable[Words | None]) -> Words | None:
    """Lists of the same names, one after the other."""
    whole: Words | None = None
    for part in parts:
        if part is not None:
            before = whole or {}
            whole = {
                name: before.get(name, []) + values if isinstance(values, list) else values
                for name, values in part.items()
            }
    return whole
