"""The request of Anthropic's /v1/messages and /v1/messages/count_tokens, and its translation into a chat."""

import json
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, ValidationInfo, model_validator

from ...chat.fields import Form, ListOf
from ...chat.ignored_fields import without_tools
from ...chat.request import MAX_TOKENS, ChatCompletion, ReasoningEffort, StopString, TemplateVariables
from ..form import MAX_ITEMS, RequestForm, as_chat

Json = dict[str, Any]
_Id = Annotated[str, Field(min_length=1, max_length=256)]


class CacheControl(Form):
    """A hint. Prompts with a common beginning share its cache without marks."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class Block(Form):
    cache_control: CacheControl | None = None


class TextBlock(Block):
    """citations: of earlier answers; none of them reaches the model."""

    type: Literal["text"]
    text: str
    citations: Any = None


class ImageSource(Form):
    """The source of a picture."""

    type: Literal["base64", "url"]
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"] | None = None
    data: str | None = None
    url: str | None = None

    @model_validator(mode="after")
    def _check_source(self) -> "ImageSource":
        if (self.type == "url") != (self.url is not None) or (self.type == "base64") != (self.data is not None):
            raise ValueError("type url has the field url, and type base64 has the fields media_type and data")
        return self

    @property
    def address(self) -> str:
        """The URL of the picture, which may hold it."""
        return self.url or f"data:{self.media_type or ''};base64,{self.data}"


class ImageBlock(Block):
    type: Literal["image"]
    source: ImageSource


class ToolReferenceBlock(Block):
    """A tool that a search of the client has found. All tools of a request are there from the beginning."""

    type: Literal["tool_reference"]
    tool_name: str = Field(min_length=1, max_length=128)

    @property
    def text(self) -> str:
        """What the model reads."""
        return f"The tool {self.tool_name} is available."


class ToolUseBlock(Block):
    """A call of an earlier answer."""

    type: Literal["tool_use"]
    id: _Id
    name: str = Field(min_length=1, max_length=128)
    input: dict[str, Any]
    caller: Any = None


class ToolResultBlock(Block):
    """The result of a call. An error is marked as such in its text."""

    type: Literal["tool_result"]
    tool_use_id: _Id
    content: str | ListOf[Annotated[TextBlock | ImageBlock | ToolReferenceBlock, Field(discriminator="type")]] = ""
    is_error: bool = False


class ThinkingBlock(Form):
    """The reasoning of an earlier answer. The signature is not checked."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class RedactedThinkingBlock(Form):
    """Reasoning that only the server which wrote it can read. The model does not see it."""

    type: Literal["redacted_thinking"]
    data: str = ""


_BLOCKS = ("text", "image", "tool_use", "tool_result", "thinking", "redacted_thinking")


def _block_tag(block: Any) -> str | None:
    kind = block.get("type") if isinstance(block, dict) else getattr(block, "type", None)
    return kind if kind in _BLOCKS else None


ContentBlock = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ImageBlock, Tag("image")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[RedactedThinkingBlock, Tag("redacted_thinking")],
    Discriminator(
        _block_tag, custom_error_type="block", custom_error_message=f"expected a block of type {', '.join(_BLOCKS)}"
    ),
]


class InputMessage(Form):
    role: Literal["user", "assistant", "system"]
    content: str | Annotated[ListOf[ContentBlock], Field(max_length=1 << 16)]

    @property
    def blocks(self) -> Sequence[ContentBlock]:
        """The content as blocks."""
        return [TextBlock(type="text", text=self.content)] if isinstance(self.content, str) else self.content


class CustomTool(Block):
    """A tool of the client. defer_loading: a hint; the model sees every tool from the beginning."""

    type: Literal["custom"] = "custom"
    name: str = Field(pattern="^[a-zA-Z0-9_.-]{1,128}$")
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    eager_input_streaming: bool | None = None
    defer_loading: bool = False
    allowed_callers: Any = None
    input_examples: Any = None

    def for_chat(self) -> Json:
        """Return the tool of a chat."""
        fields = {"name": self.name, "description": self.description, "parameters": self.input_schema}
        given = {name: value for name, value in (fields | {"strict": self.strict}).items() if value is not None}
        return {"type": "function", "function": given}


_SERVER_TOOLS = re.compile(r"(?!custom$|function$|(bash|text_editor|computer|memory)_).*")
"""Types of tools that the server of Anthropic runs. Those named here are tools of the client."""


def _own_tools(tools: Any, info: ValidationInfo) -> Any:
    return without_tools(tools, _SERVER_TOOLS, info)


class ToolChoice(Form):
    """Which tools the model calls. name: for type tool."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _check_name(self) -> "ToolChoice":
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("name is required for type tool, and not allowed for other types")
        return self

    def for_chat(self) -> str | Json:
        """Return the tool_choice of a chat."""
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name}}
        return "required" if self.type == "any" else self.type


class ThinkingConfig(Form):
    """Turns reasoning on or off, where the chat template has a switch. adaptive: the template's default.

    budget_tokens: a hint. max_tokens bounds reasoning and answer together. display: "omitted" leaves it
    out of the answer.
    """

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS)
    display: Literal["summarized", "omitted"] = "summarized"


class OutputFormat(Form):
    type: Literal["json_schema"]
    definition: dict[str, Any] = Field(alias="schema")


class OutputConfig(Form):
    effort: ReasoningEffort | None = None
    format: OutputFormat | None = None


class Metadata(Form):
    user_id: Annotated[str, Field(max_length=1024)] | None = None


class CountTokensRequest(RequestForm):
    """POST /v1/messages/count_tokens."""

    model: str | None = Field(None, max_length=1024)
    messages: ListOf[InputMessage] = Field(min_length=1, max_length=MAX_ITEMS)
    system: str | ListOf[TextBlock] = ""
    tools: Annotated[ListOf[CustomTool], BeforeValidator(_own_tools)] = Field([], max_length=128)
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig = OutputConfig()
    cache_control: CacheControl | None = None
    chat_template_kwargs: TemplateVariables = Field({})

    def chat(self) -> ChatCompletion:
        """Return the chat."""
        return as_chat(self.chat_fields())

    def chat_fields(self) -> Json:
        """Return the fields of the chat; those that are None take their defaults."""
        choice, output = self.tool_choice, self.output_config.format
        variables = dict(self.chat_template_kwargs)
        if self.thinking is not None and self.thinking.type != "adaptive":
            variables["enable_thinking"] = self.thinking.type == "enabled"
        turns = _messages(self.system, self.messages)
        schema = None if output is None else {"name": "answer", "schema": output.definition}
        continued = bool(turns) and turns[-1]["role"] == "assistant"
        return self.sampling | {
            "model": self.model,
            "messages": turns,
            "tools": [tool.for_chat() for tool in self.tools],
            "tool_choice": None if choice is None else choice.for_chat(),
            "parallel_tool_calls": choice is None or not choice.disable_parallel_tool_use,
            "response_format": None if schema is None else {"type": "json_schema", "json_schema": schema},
            "reasoning_effort": self.output_config.effort,
            "chat_template_kwargs": variables,
            "include_reasoning": self.thinking is None or self.thinking.display != "omitted",
            "continue_final_message": True if continued else None,
            "add_generation_prompt": False if continued else None,
        }


class MessageRequest(CountTokensRequest):
    """POST /v1/messages."""

    max_tokens: int = Field(ge=1, le=MAX_TOKENS)
    stop_sequences: ListOf[StopString] = Field([], max_length=16)
    stream: bool = False
    metadata: Metadata = Metadata()
    service_tier: Literal["auto", "standard_only"] = "auto"

    def chat_fields(self) -> Json:
        fields = super().chat_fields()
        stop = self.stop_sequences or fields.get("stop")
        return fields | {"max_completion_tokens": self.max_tokens, "stop": stop, "stream": self.stream}


def _messages(system: str | list[TextBlock], messages: Sequence[InputMessage]) -> list[Json]:
    """Return the messages of a chat. Results of tools are messages of their own, before the text beside them.

    Most chat templates take a system prompt at the beginning alone, so that a later one is text of the user's turn.
    """
    prompt = [system] if isinstance(system, str) and system else [block.text for block in system or ()]
    begin = next((i for i, message in enumerate(messages) if message.role != "system"), len(messages))
    prompt += [block.text for message in messages[:begin] for block in message.blocks if isinstance(block, TextBlock)]
    turns: list[Json] = [{"role": "system", "content": "\n\n".join(prompt)}] if prompt else []
    users: list[TextBlock | ImageBlock] = []
    for message in messages[begin:]:
        if message.role == "assistant":
            turns += _user_turn(users)
            users = []
            turns.append(_assistant_turn(message.blocks))
            continue
        results = [block for block in message.blocks if isinstance(block, ToolResultBlock)]
        turns += [{"role": "tool", "tool_call_id": one.tool_use_id, "content": _result(one)} for one in results]
        users += [block for block in message.blocks if isinstance(block, TextBlock | ImageBlock)]
    return turns + _user_turn(users)


def _user_turn(blocks: Sequence[TextBlock | ImageBlock]) -> list[Json]:
    return [{"role": "user", "content": _chat_content(blocks)}] if blocks else []


def _assistant_turn(blocks: Sequence[ContentBlock]) -> Json:
    turn: Json = {"role": "assistant", "content": "".join(b.text for b in blocks if isinstance(b, TextBlock))}
    if reasoning := "\n".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock)):
        turn["reasoning_content"] = reasoning
    calls = [
        {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": json.dumps(block.input)}}
        for block in blocks
        if isinstance(block, ToolUseBlock)
    ]
    return turn | ({"tool_calls": calls} if calls else {})


def _result(block: ToolResultBlock) -> str | list[Json]:
    content = block.content if isinstance(block.content, str) else _chat_content(block.content)
    if not block.is_error:
        return content
    return f"Error: {content}" if isinstance(content, str) else [{"type": "text", "text": "Error:"}, *content]


def _chat_content(blocks: Sequence[TextBlock | ImageBlock | ToolReferenceBlock]) -> str | list[Json]:
    """Return the content in the form of a chat: a string if it is one text."""
    if len(blocks) == 1 and not isinstance(blocks[0], ImageBlock):
        return blocks[0].text
    return [
        {"type": "image_url", "image_url": {"url": block.source.address}}
        if isinstance(block, ImageBlock)
        else {"type": "text", "text": block.text}
        for block in blocks
    ]
