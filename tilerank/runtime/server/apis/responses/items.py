"""The items of OpenAI's /v1/responses, and their translation into the messages of a chat."""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, TypeAdapter

from ...chat.fields import Form, ListOf
from ...chat.messages import refusal_as_text
from ..answer import Json
from ..form import MAX_ITEMS
from .tools import custom_arguments, function_name

_Id = Annotated[str, Field(min_length=1, max_length=256)]
_Name = Annotated[str, Field(min_length=1, max_length=128)]
_Status = Literal["in_progress", "completed", "incomplete"]


class TextItemPart(Form):
    """Text of a message. annotations, logprobs: of earlier answers. No prompt needs them, so that they are not kept."""

    # Other defaults are copied deeply for each of thousands of parts.

    type: Literal["input_text", "output_text", "reasoning_text", "summary_text"]
    text: str
    annotations: ListOf[Any] = Field(default_factory=list, exclude=True)
    logprobs: ListOf[Any] = Field(default_factory=list, exclude=True)
    prompt_cache_breakpoint: Any = Field(None, exclude=True)


class ImageItemPart(Form):
    """A picture. detail: a hint that this server does not need; models have a resolution of their own."""

    type: Literal["input_image"]
    image_url: str
    detail: Literal["auto", "low", "high", "original"] = "auto"
    prompt_cache_breakpoint: Any = Field(None, exclude=True)


def _part_tag(part: Any) -> str | None:
    kind = part.get("type") if isinstance(part, dict) else getattr(part, "type", None)
    if kind == "input_image":
        return "image"
    return kind if kind == "refusal" else "text" if kind in ("input_text", "output_text") else None


Part = Annotated[
    Annotated[TextItemPart, Tag("text")]
    | Annotated[TextItemPart, BeforeValidator(partial(refusal_as_text, kind="output_text")), Tag("refusal")]
    | Annotated[ImageItemPart, Tag("image")],
    Discriminator(
        _part_tag,
        custom_error_type="part",
        custom_error_message="expected a part of type input_text, output_text, refusal or input_image",
    ),
]
Content = str | Annotated[ListOf[Part], Field(max_length=1 << 16)]


class MessageItem(Form):
    """A message, of the client or of an earlier answer."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    id: _Id | None = None
    status: _Status | None = None
    phase: Literal["commentary", "final_answer"] | None = None


class ReasoningItem(Form):
    """The reasoning of an earlier answer. No prompt has the encrypted reasoning of other servers."""

    type: Literal["reasoning"]
    id: _Id | None = None
    summary: ListOf[TextItemPart] = Field([], max_length=1 << 10)
    content: ListOf[TextItemPart] = Field([], max_length=1 << 10)
    encrypted_content: Any = Field(None, exclude=True)
    status: _Status | None = None


class CallItem(Form):
    """A function call of an earlier answer. arguments: JSON; empty for none."""

    type: Literal["function_call"]
    id: _Id | None = None
    call_id: _Id
    name: _Name
    namespace: _Name | None = None
    arguments: str = ""
    status: _Status | None = None


class CustomCallItem(Form):
    """A call of a custom tool in an earlier answer. input: its text."""

    type: Literal["custom_tool_call"]
    id: _Id | None = None
    call_id: _Id
    name: _Name
    namespace: _Name | None = None
    input: str
    status: _Status | None = None


class CallOutputItem(Form):
    """The result of a call."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    id: _Id | None = None
    call_id: _Id
    output: Content
    status: _Status | None = None


class ReferenceItem(Form):
    """An item of a stored response."""

    type: Literal["item_reference"] = "item_reference"
    id: _Id


_TYPES = (
    "message",
    "reasoning",
    "function_call",
    "function_call_output",
    "custom_tool_call",
    "custom_tool_call_output",
    "item_reference",
)


def _item_tag(item: Any) -> str | None:
    if not isinstance(item, dict):
        return getattr(item, "type", None)
    kind = item.get("type")
    if kind is None:
        kind = "message" if "role" in item else "item_reference" if "id" in item else None
    return kind if kind in _TYPES else None


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")]
    | Annotated[CustomCallItem, Tag("custom_tool_call")]
    | Annotated[CallOutputItem, Tag("custom_tool_call_output")]
    | Annotated[ReferenceItem, Tag("item_reference")],
    Discriminator(
        _item_tag, custom_error_type="item", custom_error_message=f"expected an item of type {', '.join(_TYPES)}"
    ),
]
ITEMS: TypeAdapter[list[Item]] = TypeAdapter(Annotated[ListOf[Item], Field(max_length=MAX_ITEMS)])


def messages(instructions: str | None, items: Iterable[Item]) -> list[Json]:
    """Return the messages of a chat. The items must not contain references.

    Reasoning, text and calls that follow each other are one turn of the assistant. System prompts at the beginning are
    one, because many chat templates allow one only.
    """
    turns: list[Json] = [] if instructions is None else [{"role": "system", "content": instructions}]
    for item in items:
        match item:
            case MessageItem(role="assistant"):
                turn = _assistant_turn(turns, after=("reasoning_content",))
                turn["content"] = _text(item.content)
            case MessageItem():
                _add_message(turns, item)
            case ReasoningItem():
                turn = _assistant_turn(turns, after=())
                turn["reasoning_content"] = "\n".join(part.text for part in item.content or item.summary)
            case CallItem() | CustomCallItem():
                turn = _assistant_turn(turns, after=("reasoning_content", "content", "tool_calls"))
                arguments = item.arguments if isinstance(item, CallItem) else custom_arguments(item.input)
                function = {"name": function_name(item.name, item.namespace), "arguments": arguments}
                turn.setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})
            case CallOutputItem():
                turns.append({"role": "tool", "tool_call_id": item.call_id, "content": _chat_content(item.output)})
    return turns


def _assistant_turn(turns: list[Json], after: Sequence[str]) -> Json:
    """Return the last turn if it is the assistant's and has only fields of `after`; else a new one."""
    last = turns[-1] if turns else {}
    if last.get("role") != "assistant" or last.keys() - {"role", *after}:
        turns.append({"role": "assistant"})
    return turns[-1]


def _add_message(turns: list[Json], item: MessageItem) -> None:
    role = "system" if item.role == "developer" else item.role  # chat templates do not have developers
    content = _chat_content(item.content)
    if role == "system" and len(turns) == 1 and turns[0]["role"] == "system":
        turns[0]["content"] = f"{turns[0]['content']}\n\n{_text(item.content)}"
    else:
        turns.append({"role": role, "content": _text(item.content) if role == "system" else content})


def _text(content: Content) -> str:
    """Return the text of a message that holds no pictures, or leaves them out."""
    if isinstance(content, str):
        return content
    return "\n".join(part.text for part in content if isinstance(part, TextItemPart))


def _chat_content(content: Content) -> str | list[Json]:
    """Return the content in the form of a chat."""
    if isinstance(content, str):
        return content
    return [
        {"type": "text", "text": part.text}
        if isinstance(part, TextItemPart)
        else {"type": "image_url", "image_url": {"url": part.image_url}}
        for part in content
    ]
