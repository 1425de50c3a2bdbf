"""Answers in the form of Anthropic's /v1/messages: content blocks, and the events that build them up."""

from dataclasses import dataclass, field
from typing import Any

from ...chat.deltas import Delta, Usage
from ...chat.generation import Generation
from ...chat.tools.calls import MoreArguments, ToolCall, arguments_from_json
from ...http.errors import ApiError
from ..answer import Answer, Json, ServerSentEvent

UNSIGNED = "unsigned"
"""The signature of reasoning, which clients must send back. This server signs nothing."""
_ERRORS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large"}
_ERRORS |= {429: "rate_limit_error", 503: "overloaded_error"}


@dataclass(frozen=True)
class _Open:
    """The block that is being written. kind: its type. block: as it begins. texts: what it is written in."""

    kind: str
    block: Json
    texts: list[str] = field(default_factory=list)

    def delta(self, text: str) -> Json:
        """Return the delta of an event for new text."""
        if self.kind == "tool_use":
            return {"type": "input_json_delta", "partial_json": text}
        return {"type": f"{self.kind}_delta", self.kind: text}

    def whole(self) -> Json:
        """Return the complete block. The input of a call that was cut off, or that is no object, is empty."""
        text = "".join(self.texts)
        if self.kind == "tool_use":
            return self.block | {"input": arguments_from_json(text) or {}}
        signature = {"signature": UNSIGNED} if self.kind == "thinking" else {}
        return self.block | {self.kind: text} | signature


class MessageAnswer(Answer):
    """A message with one block for the reasoning, each piece of text and each call."""

    KEEP_ALIVE = ServerSentEvent({"type": "ping"}, "ping").encode()

    def __init__(self, generation: Generation, model: str) -> None:
        super().__init__(generation, "msg_")
        self._message: Json = {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }
        self._open: _Open | None = None
        self._has_calls = False
        self._finish_reason: str | None = None
        self._stop_string: str | None = None

    def begin(self) -> list[ServerSentEvent]:
        return [_event("message_start", message=self._message | {"usage": _usage(self._generation.usage)})]

    def add(self, delta: Delta) -> list[ServerSentEvent]:
        events = self._write("thinking", delta.reasoning) if delta.reasoning else []
        for piece in delta.pieces:
            match piece:
                case ToolCall():
                    events += self._begin_call(piece)
                case MoreArguments(text):
                    events += self._append(text)
                case _:
                    events += self._write("text", piece)
        self._finish_reason, self._stop_string = delta.finish_reason, delta.stop_string
        return events

    def end(self) -> list[ServerSentEvent]:
        reason, stop_sequence = "end_turn", self._stop_string
        if self._finish_reason == "length":
            reason = "max_tokens"
        elif stop_sequence is not None:
            reason = "stop_sequence"
        elif self._has_calls:
            reason = "tool_use"
        ended = {"stop_reason": reason, "stop_sequence": stop_sequence}
        events = self._close()
        self._message |= ended
        usage = _usage(self._generation.usage)
        return [*events, _event("message_delta", delta=ended, usage=usage), _event("message_stop")]

    def fail(self, error: ApiError) -> list[ServerSentEvent]:
        return [ServerSentEvent(error_body(error), "error")]

    def whole(self) -> Json:
        return self._message | {"usage": _usage(self._generation.usage)}

    def _write(self, kind: str, text: str) -> list[ServerSentEvent]:
        events = []
        if self._open is None or self._open.kind != kind:
            block = {"type": kind, kind: ""} | ({"signature": ""} if kind == "thinking" else {})
            events = self._begin(kind, block)
        return [*events, *self._append(text)]

    def _begin_call(self, call: ToolCall) -> list[ServerSentEvent]:
        self._has_calls = True
        events = self._begin("tool_use", {"type": "tool_use", "id": call.id, "name": call.name, "input": {}})
        return events + (self._append(call.arguments) if call.arguments else [])

    def _begin(self, kind: str, block: Json) -> list[ServerSentEvent]:
        """End the open block and begin another one."""
        events = self._close()
        self._open = _Open(kind, block)
        return [*events, self._block_event("start", content_block=block)]

    def _append(self, text: str) -> list[ServerSentEvent]:
        assert self._open is not None
        self._open.texts.append(text)
        return [self._block_event("delta", delta=self._open.delta(text))]

    def _close(self) -> list[ServerSentEvent]:
        """End the open block."""
        if self._open is None:
            return []
        opened, self._open = self._open, None
        signed = {"type": "signature_delta", "signature": UNSIGNED}
        events = [self._block_event("delta", delta=signed)] if opened.kind == "thinking" else []
        events.append(self._block_event("stop"))
        self._message["content"].append(opened.whole())
        return events

    def _block_event(self, what: str, **fields: Any) -> ServerSentEvent:
        return _event(f"content_block_{what}", index=len(self._message["content"]), **fields)


def error_body(error: ApiError) -> Json:
    """Return an error in Anthropic's form."""
    kind = _ERRORS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": str(error)}}


def _event(name: str, **fields: Any) -> ServerSentEvent:
    return ServerSentEvent({"type": name, **fields}, name)


def _usage(usage: Usage) -> Json:
    """Return the counts of tokens under Anthropic's names. Cached tokens are not counted among the others."""
    cached = usage.cached_tokens or 0
    return {
        "input_tokens": usage.prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.completion_tokens,
    }
