"""Request bodies of the OpenAI API, with the sampling options that local servers add. Every field is bounded."""

import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, field_validator, model_validator

from .errors import ApiError

MAX_TOKENS = 1 << 20
MAX_PARTS = 1 << 16
"""Parts of one message. The number of media has a limit of its own."""
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
_Ids = Annotated[list[TokenId], Field(min_length=1, max_length=MAX_TOKENS)]
TemplateVariables = dict[str, str | int | float | bool | None]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
StopString = Annotated[str, Field(min_length=1, max_length=256)]


class _Body(BaseModel):
    # Unknown fields are ignored. NaN and infinity are not JSON.
    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)


class StreamOptions(_Body):
    include_usage: bool = False


class JsonSchema(_Body):
    """`definition`: the schema. Answers always follow it, whether the client sets `strict` or not."""

    name: str = Field(pattern="^[a-zA-Z0-9_-]{1,64}$")
    definition: dict[str, Any] = Field(alias="schema")


class ResponseFormat(_Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema is required for type json_schema, and not allowed for other types")
        return self


class Sampling(_Body):
    """The fields that chat and plain completions share.

    A sampling field that is None takes the model's default (loader/config.py: SamplingDefaults).
    """

    # Fields of OpenAI and of other servers that would change the answer and are not implemented.
    unsupported: ClassVar[frozenset[str]] = frozenset(
        {"guided_json", "guided_choice", "guided_grammar", "structured_outputs", "use_beam_search"}
    )

    model: str | None = Field(None, max_length=1024)
    n: int = Field(1, ge=1, le=16)
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    logit_bias: dict[TokenId, Annotated[float, Field(ge=-100, le=100)]] = Field({}, max_length=300)
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    stop: StopString | Annotated[list[StopString], Field(max_length=16)] = Field([])
    response_format: ResponseFormat | None = None
    # The fields below are not OpenAI's.
    top_k: int | None = Field(None, ge=-1, lt=1 << 31)  # -1 and 0 both turn it off
    min_p: float | None = Field(None, ge=0, le=1)
    # Logits divided by less than 0.01 may overflow.
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    stop_token_ids: list[TokenId] = Field([], max_length=64)
    ignore_eos: bool = False
    guided_regex: str | None = Field(None, min_length=1, max_length=8192)

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, data: Any) -> Any:
        """Refuse unsupported fields, and drop fields that are null, which take their defaults."""
        if not isinstance(data, dict):
            return data
        for name in sorted(cls.unsupported & data.keys()):
            if data[name]:
                message = f"Unsupported parameter: '{name}' is not supported with this model."
                raise ApiError(400, message, param=name, code="unsupported_parameter")
        return {name: value for name, value in data.items() if value is not None}

    @field_validator("top_k")
    @classmethod
    def _normalize_top_k(cls, value: int | None) -> int | None:
        return value if value is None else max(value, 0)

    @model_validator(mode="after")
    def _check_combinations(self) -> "Sampling":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options requires stream: true")
        if self.guided_regex is not None and self.response_format is not None:
            raise ValueError("response_format and guided_regex cannot be combined")
        return self

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop


class Completion(Sampling):
    """POST /v1/completions."""

    unsupported = Sampling.unsupported | {"echo", "suffix"}

    prompt: (
        _Ids
        | Annotated[list[_Ids], Field(min_length=1, max_length=64)]
        | str
        | Annotated[list[str], Field(min_length=1, max_length=64)]
    )
    max_tokens: int = Field(16, ge=1, le=MAX_TOKENS)
    logprobs: int | None = Field(None, ge=0, le=20)
    best_of: int | None = None

    @model_validator(mode="after")
    def _check_best_of(self) -> "Completion":
        if self.best_of not in (None, self.n):
            raise ValueError(f"best_of: expected the value of n, {self.n}, found {self.best_of}")
        return self


class TextPart(_Body):
    type: Literal["text"]
    text: str


class MediaPart(_Body):
    """A picture or a video. runtime/media/messages.py reads its fields."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)
    type: str = Field(min_length=1, max_length=64)


def _part_tag(part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else getattr(part, "type", None)
    return "text" if kind == "text" else "media"


Part = Annotated[
    Annotated[TextPart, Tag("text")] | Annotated[MediaPart, Tag("media")],
    Discriminator(_part_tag),
]


class CalledFunction(_Body):
    name: str
    arguments: str | dict[str, Any] = "{}"


class EarlierCall(_Body):
    """A tool call of an earlier turn."""

    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(_Body):
    """A message of a conversation. Additional fields are passed on to the chat template."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)
    role: str = Field(min_length=1, max_length=64)
    content: str | Annotated[list[Part], Field(max_length=MAX_PARTS)] | None = None
    tool_calls: list[EarlierCall] | None = Field(None, max_length=128)

    def for_template(self, parts: bool) -> dict[str, Any]:
        """Return the message for the chat template.

        parts: does the template accept content in parts? Text parts become one string for templates that do not.
        """
        # Templates add the content to other texts, which fails for none.
        message = {"content": ""} | self.model_dump(exclude_none=True)
        if isinstance(self.content, list) and not parts:
            message["content"] = "\n".join(part.text for part in self.content if isinstance(part, TextPart))
        for call in self.tool_calls or []:
            call.function.arguments = _object(call.function.arguments)
        if self.tool_calls:
            message["tool_calls"] = [call.model_dump() for call in self.tool_calls]
        return message


def _object(arguments: str | dict[str, Any]) -> str | dict[str, Any]:
    """Parse the arguments of a call, for templates expect an object. Any other JSON stays a string."""
    try:
        value = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


class Function(_Body):
    name: str = Field(pattern="^[a-zA-Z0-9_.-]{1,128}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(_Body):
    """A tool that the model may call."""

    type: Literal["function"]
    function: Function


class ChosenFunction(_Body):
    name: str


class NamedTool(_Body):
    """The tool that the model must call."""

    type: Literal["function"]
    function: ChosenFunction


class ChatCompletion(Sampling):
    """POST /v1/chat/completions."""

    unsupported = Sampling.unsupported | {"chat_template", "functions", "function_call", "audio", "web_search_options"}

    messages: list[Message] = Field(min_length=1, max_length=4096)
    max_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS)
    max_completion_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: list[Tool] = Field([], max_length=128)
    tool_choice: Literal["none", "auto", "required"] | NamedTool = "auto"
    parallel_tool_calls: bool = True
    chat_template_kwargs: TemplateVariables = Field({}, max_length=64)
    reasoning_effort: ReasoningEffort | None = None

    @model_validator(mode="after")
    def _check_chat_combinations(self) -> "ChatCompletion":
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs requires logprobs: true")
        if self.must_call and not self.tools:
            raise ValueError("'tool_choice' is only allowed when 'tools' are specified.")
        if self.must_call and not self.callable_tools:
            raise ValueError("tool_choice: no tool has this function name")
        return self

    @property
    def alternatives(self) -> int | None:
        """The number of alternatives to list for each token; None for no log-probabilities."""
        return self.top_logprobs or 0 if self.logprobs else None

    @property
    def must_call(self) -> bool:
        return self.tool_choice not in ("none", "auto")

    @property
    def may_call_several(self) -> bool:
        """May the model call several tools in one answer?"""
        return self.parallel_tool_calls and not isinstance(self.tool_choice, NamedTool)

    @property
    def callable_tools(self) -> list[Tool]:
        choice = self.tool_choice
        if isinstance(choice, NamedTool):
            return [tool for tool in self.tools if tool.function.name == choice.function.name]
        return [] if choice == "none" else self.tools

    def template_tools(self) -> list[dict[str, Any]] | None:
        """Return the tools for the chat template; None if the model may call none."""
        if not self.callable_tools:
            return None
        return [tool.model_dump(exclude_unset=True) for tool in self.tools]


class Tokenize(_Body):
    """POST /tokenize: a prompt, or messages for the chat template."""

    model: str | None = Field(None, max_length=1024)
    prompt: str | None = None
    messages: list[Message] | None = Field(None, min_length=1, max_length=4096)
    add_special_tokens: bool = True
    chat_template_kwargs: TemplateVariables = Field({}, max_length=64)

    @model_validator(mode="after")
    def _check_input(self) -> "Tokenize":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("expected either prompt or messages")
        return self


class Detokenize(_Body):
    """POST /detokenize."""

    model: str | None = Field(None, max_length=1024)
    tokens: list[TokenId] = Field(max_length=MAX_TOKENS)
