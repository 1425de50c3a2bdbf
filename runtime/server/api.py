"""Bodies of requests, as the OpenAI API has them, with the sampling options that local servers add. All bounded."""

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

MAX_TOKENS = 1 << 20
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
_Ids = Annotated[list[TokenId], Field(min_length=1, max_length=MAX_TOKENS)]
StopString = Annotated[str, Field(min_length=1, max_length=256)]


class _Body(BaseModel):
    # A client may send what we have no use for; NaN is no number of JSON.
    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)


class StreamOptions(_Body):
    include_usage: bool = False


class Sampling(_Body):
    """What chat and plain completions have in common."""

    model: str | None = Field(None, max_length=1024)
    n: int = Field(1, ge=1, le=16)
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(1.0, ge=0, le=2)
    top_p: float | None = Field(1.0, ge=0, le=1)
    presence_penalty: float | None = Field(0.0, ge=-2, le=2)
    frequency_penalty: float | None = Field(0.0, ge=-2, le=2)
    logit_bias: dict[TokenId, Annotated[float, Field(ge=-100, le=100)]] | None = Field(None, max_length=300)
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    stop: StopString | Annotated[list[StopString], Field(max_length=16)] | None = None
    # Not OpenAI's:
    top_k: int = Field(0, ge=-1, lt=1 << 31)
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, gt=0, le=100)
    stop_token_ids: list[TokenId] = Field([], max_length=64)
    ignore_eos: bool = False

    @model_validator(mode="after")
    def _usage_belongs_to_streams(self) -> "Sampling":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is for stream: true")
        return self

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


class Completion(Sampling):
    """POST /v1/completions."""

    prompt: (
        _Ids
        | Annotated[list[_Ids], Field(min_length=1, max_length=64)]
        | str
        | Annotated[list[str], Field(min_length=1, max_length=64)]
    )
    max_tokens: int | None = Field(16, ge=1, le=MAX_TOKENS)
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: Literal[False] = False
    suffix: Literal[None] = None
    best_of: Literal[1] | None = None


class TextPart(_Body):
    type: Literal["text"]
    text: str


class CalledFunction(_Body):
    name: str
    arguments: str | dict[str, Any] = "{}"


class MadeCall(_Body):
    """A tool call of an earlier turn."""

    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(_Body):
    """Of a conversation. Further fields reach the template."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)
    role: str = Field(min_length=1, max_length=64)
    content: str | list[TextPart] | None = None
    tool_calls: list[MadeCall] | None = Field(None, max_length=128)

    def told(self) -> dict[str, Any]:
        """As a template wants it: few know of parts, so text in parts becomes one text."""
        message = self.model_dump(exclude_none=True)
        if isinstance(self.content, list):
            message["content"] = "\n".join(part.text for part in self.content)
        for call in self.tool_calls or []:
            call.function.arguments = _object(call.function.arguments)
        if self.tool_calls:
            message["tool_calls"] = [call.model_dump() for call in self.tool_calls]
        return message


def _object(arguments: str | dict[str, Any]) -> str | dict[str, Any]:
    """Arguments as templates want them; what is no JSON object stays a string."""
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
    """What the model may call."""

    type: Literal["function"]
    function: Function


class ResponseFormat(_Body):
    type: Literal["text"]


class ChatCompletion(Sampling):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1, max_length=4096)
    max_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS)
    max_completion_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto"] = "auto"
    response_format: ResponseFormat | None = None
    chat_template_kwargs: dict[str, str | int | float | bool | None] = Field({}, max_length=64)

    @model_validator(mode="after")
    def _logprobs_are_asked_for(self) -> "ChatCompletion":
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs is for logprobs: true")
        return self

    def told_tools(self) -> list[dict[str, Any]] | None:
        """As a template wants them; None if the model is to call none."""
        if not self.tools or self.tool_choice == "none":
            return None
        return [tool.model_dump(exclude_unset=True) for tool in self.tools]


class Tokenize(_Body):
    """POST /tokenize: a prompt, or messages that the template makes one of."""

    model: str | None = Field(None, max_length=1024)
    prompt: str | None = None
    messages: list[Message] | None = Field(None, min_length=1, max_length=4096)
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _one_of_both(self) -> "Tokenize":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("expected either prompt or messages")
        return self


class Detokenize(_Body):
    """POST /detokenize."""

    model: str | None = Field(None, max_length=1024)
    tokens: list[TokenId] = Field(max_length=MAX_TOKENS)
