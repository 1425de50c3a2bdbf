"""The request of OpenAI's /v1/responses, and its translation into a chat."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from ...chat.fields import FIRST_ERROR, ListOf
from ...chat.request import MAX_TOKENS, ChatCompletion, ReasoningEffort
from ...http.errors import ApiError
from ..form import MAX_ITEMS, Form, RequestForm, as_chat
from .items import Item, Json, messages

LOGPROBS = "message.output_text.logprobs"


class FunctionTool(Form):
    """A function that the model may call. Arguments of forced calls always follow the schema."""

    type: Literal["function"]
    name: str = Field(pattern="^[a-zA-Z0-9_.-]{1,128}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChosenTool(Form):
    """A function that the model must call."""

    type: Literal["function"]
    name: str


class AllowedFunctions(Form):
    """The functions that the model may call, of those in `tools`."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: ListOf[ChosenTool] = Field(min_length=1, max_length=128)


class TextFormat(Form):
    """The form of the answer's text."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = Field(default=None, pattern="^[a-zA-Z0-9_-]{1,64}$")
    definition: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None
    description: str | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> "TextFormat":
        if (self.type == "json_schema") != (self.name is not None and self.definition is not None):
            raise ValueError("name and schema are required for type json_schema, and not allowed for other types")
        return self

    def for_chat(self) -> Json | None:
        """Return the response_format of a chat; None for any text."""
        if self.type == "text":
            return None
        if self.type == "json_object":
            return {"type": self.type}
        schema = {"name": self.name, "schema": self.definition, "strict": self.strict, "description": self.description}
        given = {name: value for name, value in schema.items() if value is not None}
        return {"type": self.type, "json_schema": given}


class TextOutput(Form):
    format: TextFormat = TextFormat()
    verbosity: Literal["medium"] = "medium"


class Reasoning(Form):
    """effort: as in a chat. summary: send the reasoning as its own summary, for clients that show nothing else."""

    effort: ReasoningEffort | None = None
    summary: Literal["auto", "detailed"] | None = None


class ResponseStreamOptions(Form):
    include_obfuscation: Literal[False] = False


class ResponseRequest(RequestForm):
    """POST /v1/responses.

    The fields with one allowed value are those that this server has in one way only. include: encrypted reasoning may
    be asked for, but reasoning is sent as text, which clients may send back.
    """

    model: str | None = Field(None, max_length=1024)
    input: str | Annotated[ListOf[Item], Field(max_length=MAX_ITEMS)]
    instructions: str | None = None
    previous_response_id: str | None = Field(None, max_length=256)
    max_output_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS)
    tools: ListOf[FunctionTool] = Field([], max_length=128)
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | AllowedFunctions = "auto"
    parallel_tool_calls: bool = True
    text: TextOutput = TextOutput()
    reasoning: Reasoning = Reasoning()
    include: ListOf[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] = Field([], max_length=8)
    top_logprobs: int = Field(0, ge=0, le=20)
    store: bool = True
    stream: bool = False
    stream_options: ResponseStreamOptions = ResponseStreamOptions()
    background: Literal[False] = False
    truncation: Literal["disabled"] = "disabled"
    service_tier: Literal["auto", "default"] = "auto"
    # The fields below do not change the answer. Prompts with a common beginning share its cache without a key.
    metadata: Annotated[dict[str, Annotated[str, Field(max_length=512)]], Field(max_length=16), FIRST_ERROR] = Field({})
    user: str | None = Field(None, max_length=1024)
    safety_identifier: str | None = Field(None, max_length=1024)
    prompt_cache_key: str | None = Field(None, max_length=1024)

    def chat(self, items: list[Item]) -> ChatCompletion:
        """Return the chat. items: all items of the conversation, those of earlier responses and of `input`."""
        logprobs = LOGPROBS in self.include or self.top_logprobs > 0
        fields = {
            "model": self.model,
            "messages": messages(self.instructions, items),
            "max_completion_tokens": self.max_output_tokens,
            "tools": [_chat_tool(tool) for tool in self._allowed_tools()],
            "tool_choice": _chat_choice(self.tool_choice),
            "parallel_tool_calls": self.parallel_tool_calls,
            "response_format": self.text.format.for_chat(),
            "reasoning_effort": self.reasoning.effort,
            "logprobs": logprobs,
            "top_logprobs": self.top_logprobs if logprobs else None,
            "stream": self.stream,
        }
        return as_chat(fields | self.sampling)

    def _allowed_tools(self) -> list[FunctionTool]:
        if not isinstance(self.tool_choice, AllowedFunctions):
            return self.tools
        allowed = {tool.name for tool in self.tool_choice.tools}
        if unknown := allowed - {tool.name for tool in self.tools}:
            raise ApiError(400, f"tool_choice: no tool has the name {min(unknown)!r}", param="tool_choice")
        return [tool for tool in self.tools if tool.name in allowed]


def _chat_tool(tool: FunctionTool) -> Json:
    return {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}


def _chat_choice(choice: str | ChosenTool | AllowedFunctions) -> str | Json:
    if isinstance(choice, str):
        return choice
    if isinstance(choice, ChosenTool):
        return {"type": "function", "function": {"name": choice.name}}
    return choice.mode
