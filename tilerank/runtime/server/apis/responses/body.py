"""The request of OpenAI's /v1/responses, and its translation into a chat."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from ...chat.fields import FIRST_ERROR, Form, ListOf
from ...chat.request import MAX_TOKENS, ChatCompletion, ReasoningEffort
from ..answer import Json
from ..form import MAX_ITEMS, RequestForm, as_chat
from .items import Item, messages
from .tools import ToolChoice, Tools, chat_choice, chat_tools

LOGPROBS = "message.output_text.logprobs"
Included = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    # Results of tools that this server does not run.
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
]
"""What clients ask for beside the response."""


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
    verbosity: Literal["low", "medium", "high"] = "medium"  # a hint that no model of this server was trained on


class Reasoning(Form):
    """effort: as in a chat. summary: send the reasoning as its own summary, for clients that show nothing else."""

    effort: ReasoningEffort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class ResponseStreamOptions(Form):
    include_obfuscation: Literal[False] = False


class ResponseRequest(RequestForm):
    """POST /v1/responses.

    The fields with one allowed value are those that this server has in one way only. include: encrypted reasoning may
    be asked for, but reasoning is sent as text, which clients may send back. truncation: "auto" leaves out the
    beginning of a prompt that is longer than the context.
    """

    model: str | None = Field(None, max_length=1024)
    input: str | Annotated[ListOf[Item], Field(max_length=MAX_ITEMS)]
    instructions: str | None = None
    previous_response_id: str | None = Field(None, max_length=256)
    max_output_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS)
    tools: Tools = Field([], max_length=128)
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    text: TextOutput = TextOutput()
    reasoning: Reasoning = Reasoning()
    include: ListOf[Included] = Field([], max_length=16)
    top_logprobs: int = Field(0, ge=0, le=20)
    store: bool = True
    stream: bool = False
    stream_options: ResponseStreamOptions = ResponseStreamOptions()
    background: Literal[False] = False
    truncation: Literal["auto", "disabled"] = "disabled"
    # The fields below do not change the answer. Prompts with a common beginning share its cache without a key.
    metadata: Annotated[dict[str, Annotated[str, Field(max_length=512)]], Field(max_length=16), FIRST_ERROR] = Field({})
    service_tier: str | None = Field(None, max_length=64)
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
            "tools": chat_tools(self.tools, self.tool_choice),
            "tool_choice": chat_choice(self.tool_choice),
            "parallel_tool_calls": self.parallel_tool_calls,
            "response_format": self.text.format.for_chat(),
            "reasoning_effort": self.reasoning.effort,
            "logprobs": logprobs,
            "top_logprobs": self.top_logprobs if logprobs else None,
            "stream": self.stream,
            "truncate_prompt_tokens": -1 if self.truncation == "auto" else None,
        }
        return as_chat(fields | self.sampling)
