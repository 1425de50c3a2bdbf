"""Answers in the form of OpenAI's /v1/responses: output items, and the events that build them up."""

import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ...chat.deltas import Delta, Usage
from ...chat.generation import Generation
from ...chat.logprobs import TokenText, token_entries
from ...chat.tools.calls import MoreArguments, ToolCall
from ...http.errors import ApiError
from ..answer import Answer, Json, ServerSentEvent, as_json
from .tools import CalledTool, custom_input


class _Kind(NamedTuple):
    """The form in which a kind of text is sent. field: of the item, which lists the parts. part_index: name of
    the field that counts them."""

    item: str
    prefix: str
    field: str
    part: str
    part_event: str
    text_event: str
    part_index: str


_MESSAGE = _Kind(
    "message", "msg_", "content", "output_text", "response.content_part", "response.output_text", "content_index"
)
_REASONING = _Kind(
    "reasoning", "rs_", "content", "reasoning_text", "response.content_part", "response.reasoning_text", "content_index"
)
_SUMMARY = _Kind(
    "reasoning",
    "rs_",
    "summary",
    "summary_text",
    "response.reasoning_summary_part",
    "response.reasoning_summary_text",
    "summary_index",
)


class _Open(NamedTuple):
    """The item that is being written. It has one part, of text."""

    kind: _Kind
    id: str
    texts: list[str]
    logprobs: list[Any]  # as JSON


class _OpenCall(NamedTuple):
    """The call that is being written. item: as it begins. texts: of its arguments. Those of a custom
    tool are sent at the end, because its text is a string in them."""

    item: Json
    texts: list[str]
    is_custom: bool


class ResponseAnswer(Answer):
    """A response with one output item for the reasoning, each piece of text and each call.

    about: fields of the response that repeat the request. tools: by the names of their functions. summary: is the
    reasoning sent as a summary? on_end: gets the complete response.
    """

    def __init__(
        self,
        generation: Generation,
        about: Json,
        tools: Mapping[str, CalledTool],
        summary: bool,
        on_end: Callable[[Json], None],
    ) -> None:
        super().__init__(generation, "resp_")
        self.response: Json = {
            "id": self.id,
            "object": "response",
            "created_at": generation.created,
            "status": "in_progress",
            "background": False,
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            **about,
            "output": [],
            "usage": None,
        }
        self._tools = tools
        self._top = generation.body.alternatives
        self._token_text = TokenText(generation.tokenizer)
        self._reasoning = _SUMMARY if summary else _REASONING
        self._on_end = on_end
        self._sequence = 0
        self._open: _Open | None = None
        self._open_call: _OpenCall | None = None  # instead of the other
        self._logprobs: list[Any] = []  # of tokens whose text is still to be written
        self._finish_reason: str | None = None

    def begin(self) -> list[ServerSentEvent]:
        return [self._lifecycle("response.created"), self._lifecycle("response.in_progress")]

    def add(self, delta: Delta) -> list[ServerSentEvent]:
        self._finish_reason = delta.finish_reason
        if self._top is not None:
            entries = as_json(token_entries(delta.tokens, self._top, self._token_text))
            self._logprobs = [] if delta.reasoning else entries
        events = self._write(self._reasoning, delta.reasoning) if delta.reasoning else []
        for piece in delta.pieces:
            match piece:
                case ToolCall():
                    events += [*self._close("completed"), *self._begin_call(piece)]
                case MoreArguments(text):
                    events += self._append_arguments(text)
                case _:
                    events += self._write(_MESSAGE, piece)
        return events

    def end(self) -> list[ServerSentEvent]:
        self.response["usage"] = _usage(self._generation.usage)
        if self._generation.is_stopped:
            self.response["status"] = "cancelled"
        elif self._finish_reason == "length":
            self.response |= {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
        else:
            self.response |= {"status": "completed", "completed_at": int(time.time())}
        completed = self.response["status"] == "completed"
        events = self._close("completed" if completed else "incomplete")
        self._on_end(self.response)
        return [*events, self._lifecycle("response.completed" if completed else "response.incomplete")]

    def fail(self, error: ApiError) -> list[ServerSentEvent]:
        self.response |= {"status": "failed", "error": {"code": "server_error", "message": str(error)}}
        events = self._close("incomplete")
        self._on_end(self.response)
        return [*events, self._lifecycle("response.failed")]

    def whole(self) -> Json:
        return self.response

    def cancel(self) -> None:
        """End the answer with what it has."""
        self._generation.is_stopped = True

    def _write(self, kind: _Kind, text: str) -> list[ServerSentEvent]:
        events = []
        if self._open is None or self._open.kind is not kind:
            events = self._close("completed")
            self._open = opened = _Open(kind, f"{kind.prefix}{secrets.token_hex(12)}", [], [])
            events.append(self._item_event("added", _item(opened, None, "in_progress")))
            events.append(self._text_event(opened, f"{kind.part_event}.added", part=_part(opened, "")))
        opened = self._open
        opened.texts.append(text)
        logprobs, self._logprobs = self._logprobs, []
        opened.logprobs.extend(logprobs)
        extra = {"logprobs": logprobs} if kind is _MESSAGE else {}
        events.append(self._text_event(opened, f"{kind.text_event}.delta", delta=text, **extra))
        return events

    def _close(self, status: str) -> list[ServerSentEvent]:
        """End the open item."""
        if self._open_call is not None:
            return self._end_call(self._open_call, status)
        if self._open is None:
            return []
        opened, self._open = self._open, None
        kind, text = opened.kind, "".join(opened.texts)
        extra = {"logprobs": opened.logprobs} if kind is _MESSAGE else {}
        item = _item(opened, text, status)
        events = [
            self._text_event(opened, f"{kind.text_event}.done", text=text, **extra),
            self._text_event(opened, f"{kind.part_event}.done", part=_part(opened, text)),
            self._item_event("done", item),
        ]
        self.response["output"].append(item)
        return events

    def _begin_call(self, call: ToolCall) -> list[ServerSentEvent]:
        self._logprobs = []
        tool = self._tools[call.name]
        kind, prefix, field = "function_call", "fc_", "arguments"
        if tool.is_custom:
            kind, prefix, field = "custom_tool_call", "ctc_", "input"
        item = {"id": f"{prefix}{secrets.token_hex(12)}", "type": kind, "status": "in_progress", field: ""}
        self._open_call = _OpenCall(item | {"call_id": call.id} | tool.fields, [], tool.is_custom)
        events = [self._item_event("added", self._open_call.item)]
        return events + (self._append_arguments(call.arguments) if call.arguments else [])

    def _append_arguments(self, text: str) -> list[ServerSentEvent]:
        assert self._open_call is not None
        self._logprobs = []
        self._open_call.texts.append(text)
        return [] if self._open_call.is_custom else [self._call_event("delta", self._open_call, {"delta": text})]

    def _end_call(self, opened: _OpenCall, status: str) -> list[ServerSentEvent]:
        text, events = "".join(opened.texts), []
        if opened.is_custom:
            text = custom_input(text)
            written = {"input": text}
            events.append(self._call_event("delta", opened, {"delta": text}))
        else:
            written = {"arguments": text}
        item = opened.item | {"status": status} | written
        named = {} if opened.is_custom else {"name": item["name"]}
        events += [self._call_event("done", opened, written | named), self._item_event("done", item)]
        self._open_call = None
        self.response["output"].append(item)
        return events

    def _call_event(self, what: str, opened: _OpenCall, fields: Json) -> ServerSentEvent:
        where = {"item_id": opened.item["id"], "output_index": len(self.response["output"])}
        kind = "custom_tool_call_input" if opened.is_custom else "function_call_arguments"
        return self._event(f"response.{kind}.{what}", where | fields)

    def _lifecycle(self, name: str) -> ServerSentEvent:
        return self._event(name, {"response": self.response})

    def _item_event(self, what: str, item: Json) -> ServerSentEvent:
        where = {"output_index": len(self.response["output"]), "item": item}
        return self._event(f"response.output_item.{what}", where)

    def _text_event(self, opened: _Open, name: str, **fields: Any) -> ServerSentEvent:
        where = {"item_id": opened.id, "output_index": len(self.response["output"]), opened.kind.part_index: 0}
        return self._event(name, where | fields)

    def _event(self, name: str, fields: Json) -> ServerSentEvent:
        sequence, self._sequence = self._sequence, self._sequence + 1
        return ServerSentEvent({"type": name, "sequence_number": sequence, **fields}, name)


def _item(opened: _Open, text: str | None, status: str) -> Json:
    """Return the item. text: of its part, None if it has none yet."""
    parts = [] if text is None else [_part(opened, text)]
    item: Json = {"id": opened.id, "type": opened.kind.item, "status": status}
    if opened.kind is _MESSAGE:
        return item | {"role": "assistant", "content": parts}
    return item | {"summary": [], opened.kind.field: parts}


def _part(opened: _Open, text: str) -> Json:
    part: Json = {"type": opened.kind.part, "text": text}
    if opened.kind is _MESSAGE:
        part |= {"annotations": [], "logprobs": opened.logprobs if text else []}
    return part


def _usage(usage: Usage) -> Json:
    """Return the counts of tokens under the names of this API."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens or 0, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.total_tokens,
    }
