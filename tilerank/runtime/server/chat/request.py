"""A chat: what every API becomes. Its fields are those of OpenAI and of local servers, and every one is bounded."""

from collections.abc import Collection
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from ...protocol.params import SpeechParams
from ..http.errors import ApiError
from .fields import FIRST_ERROR, Body, CheckedBody, Form, ListOf
from .messages import Id, Message, Name, check_arguments
from .structured import Structured
from .tool_fields import NamedTool, SomeTools, Tool, ToolChoice

MAX_TOKENS = 1 << 20
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
TemplateVariables = Annotated[dict[str, str | int | float | bool | None], Field(max_length=64), FIRST_ERROR]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
StopString = Annotated[str, Field(min_length=1, max_length=256)]


def _not_zero(tokens: int) -> int:
    if tokens == 0:
        raise ValueError("expected -1 or at least 1, found 0")
    return tokens


TruncatedTokens = Annotated[int, Field(ge=-1, le=MAX_TOKENS), AfterValidator(_not_zero)]
"""The most tokens that are left of a prompt, or -1 for as many as the context has room for."""


class StreamOptions(Form):
    """include_usage: a last chunk counts the tokens. continuous_usage_stats: every chunk does."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: Literal[False] = False


class Sampling(Structured):
    """The fields that chats and plain prompts share. A chat is ChatCompletion; apis/completions/ has plain prompts.

    A sampling field that is None takes the model's default (loader/generation_config.py: SamplingDefaults).
    """

    source: ClassVar[str] = "prompt"
    """The field that the prompt is made of."""
    model: str | None = Field(None, max_length=1024)
    n: int = Field(1, ge=1, le=16)
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    logit_bias: Annotated[
        dict[TokenId, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=300), FIRST_ERROR
    ] = Field({})
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    stop: StopString | Annotated[ListOf[StopString], Field(max_length=16)] = Field([])
    # The fields below are not OpenAI's.
    top_k: int | None = Field(None, ge=-1, lt=1 << 31)  # -1 and 0 both turn it off
    min_p: float | None = Field(None, ge=0, le=1)
    # Logits divided by less than 0.01 may overflow.
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    min_tokens: int = Field(0, ge=0, le=MAX_TOKENS)
    stop_token_ids: ListOf[TokenId] = Field([], max_length=64)
    allowed_token_ids: Annotated[ListOf[TokenId], Field(min_length=1, max_length=1 << 16)] | None = None
    bad_words: ListOf[StopString] = Field([], max_length=64)
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    no_stop_trim: bool = False  # SGLang's name of the same
    skip_special_tokens: bool = True
    truncate_prompt_tokens: TruncatedTokens | None = None
    cache_salt: Name | None = None
    extra_key: Name | None = None  # SGLang's name of the same
    request_id: Id | None = None
    rid: Id | None = None  # SGLang's name of the same
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False

    @field_validator("top_k")
    @classmethod
    def _normalize_top_k(cls, value: int | None) -> int | None:
        return value if value is None else max(value, 0)

    @model_validator(mode="after")
    def _check_combinations(self) -> "Sampling":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options requires stream: true")
        return self

    def drop_large_fields(self) -> None:
        """Drop what only the prompt and the parameters are made of: it takes much memory, and the answer needs none."""
        self.allowed_token_ids = None
        for name in Structured.model_fields:
            setattr(self, name, None)

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def keeps_stop(self) -> bool:
        """Does the stop string belong to the answer?"""
        return self.include_stop_str_in_output or self.no_stop_trim

    @property
    def salt(self) -> str:
        """Only requests with the same salt share cached prompts."""
        return self.cache_salt or self.extra_key or ""

    @property
    def limit(self) -> int | None:
        """The most tokens of the answer; None for no limit."""
        raise NotImplementedError

    @property
    def alternatives(self) -> int | None:
        """The number of alternatives to list for each token; None for no log-probabilities."""
        raise NotImplementedError

    @property
    def scores(self) -> int | None:
        """The number of alternatives to list for each token of the prompt; None if it is not scored."""
        return None

    @property
    def shows_scores(self) -> bool:
        """Are the scores of the prompt listed apart from those of the answer?"""
        return False

    @property
    def echoes(self) -> bool:
        """Does the answer begin with the prompt?"""
        return False

    def prompt_text(self, number: int) -> str | None:
        """Return the text of a prompt as the client wrote it; None for messages and token ids."""
        return None

    @property
    def speech(self) -> SpeechParams | None:
        """The parameters of speech; None for an answer in text alone."""
        return None

    @property
    def shows_reasoning(self) -> bool:
        return True

    @property
    def must_call(self) -> bool:
        """Must the answer call a tool?"""
        return False

    @property
    def may_call_several(self) -> bool:
        """May the model call several tools in one answer?"""
        return False

    @property
    def callable_tools(self) -> list[Tool]:
        return []


def _voice_name(value: Any) -> Any:
    """Return the name of a voice, which may be given as {"id": NAME}, in lower case."""
    name = value.get("id") if isinstance(value, dict) else value
    return name.lower() if isinstance(name, str) else name


Voice = Annotated[str, Field(min_length=1, max_length=256), BeforeValidator(_voice_name)]


class SpeechOutput(CheckedBody):
    """The voice and the format of a spoken answer."""

    voice: Voice
    format: Literal["wav", "aac", "mp3", "flac", "opus", "pcm16"]


def check_voice(voice: str, voices: Collection[str], model: str, param: str) -> None:
    """Raise ApiError unless a model with these `voices` has this one. param: the field that names it."""
    if not voices:
        raise ApiError(400, f"{param}: {model} does not speak", param=param, code="unsupported_parameter")
    if voice not in voices:
        raise ApiError(400, f"{param}: expected one of {', '.join(voices)}, found {voice!r}", param=param)


class TemplateOptions(NamedTuple):
    """Options of turning a conversation into a prompt, with the names and meanings of vLLM's fields.

    hears_videos: the model hears the sound of videos (`use_audio_in_video`).
    """

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    documents: list[dict[str, str]] | None = None
    thinking_token_budget: int | None = None
    hears_videos: bool = False

    @property
    def adds_variables(self) -> bool:
        """Are there values for variables of the template?"""
        return self.documents is not None or self.thinking_token_budget is not None


class TemplateRequest(NamedTuple):
    """The arguments of the chat template beside the messages.

    effort: passed to templates that read a variable of reasoning. tools: None if the model may call none.
    """

    variables: dict[str, Any]
    effort: ReasoningEffort | None
    tools: list[dict[str, Any]] | None
    options: TemplateOptions


class MediaSettings(Body):
    """vLLM's settings of the processor of media. Others are refused: each would change what the model sees."""

    model_config = ConfigDict(extra="forbid")
    use_audio_in_video: bool = False


class ChatCompletion(Sampling):
    """A conversation to be answered: POST /v1/chat/completions, and what other APIs become."""

    source: ClassVar[str] = "messages"
    messages: ListOf[Message] = Field(min_length=1, max_length=4096)
    max_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS)
    max_completion_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: ListOf[Tool] = Field([], max_length=128)
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    chat_template_kwargs: TemplateVariables = Field({})
    documents: Annotated[ListOf[Annotated[dict[str, str], FIRST_ERROR]], Field(max_length=4096)] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    reasoning_effort: ReasoningEffort | None = None
    include_reasoning: bool = True
    thinking_token_budget: int | None = Field(None, ge=0, le=MAX_TOKENS)
    mm_processor_kwargs: MediaSettings = MediaSettings()
    use_audio_in_video: bool = False
    modalities: ListOf[Literal["text", "audio"]] = Field(["text"], min_length=1, max_length=2)
    audio: SpeechOutput | None = None

    @model_validator(mode="after")
    def _check_chat_combinations(self) -> "ChatCompletion":
        check_arguments(self.messages)
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs requires logprobs: true")
        if self.must_call and not self.tools:
            raise ValueError("'tool_choice' is only allowed when 'tools' are specified.")
        if self._chosen_names - {tool.function.name for tool in self.tools}:
            raise ValueError("tool_choice: no tool has this function name")
        if self.continue_final_message and (self.add_generation_prompt or self.messages[-1].role != "assistant"):
            raise ValueError(
                "continue_final_message requires add_generation_prompt: false and a final message of the assistant"
            )
        return self

    @model_validator(mode="after")
    def _check_speech(self) -> "ChatCompletion":
        wanted = "audio" in self.modalities
        if wanted != (self.audio is not None):
            both = ('modalities with "audio"', "audio")
            raise ValueError("{} requires {}".format(*(both if wanted else both[::-1])))
        if self.audio is None:
            return self
        if self.stream and self.audio.format != "pcm16":
            raise ValueError(f"audio.format: expected 'pcm16' with stream: true, found {self.audio.format!r}")
        silent = {
            "stop": self.stop_strings,
            "tools": self.callable_tools,
            "a constrained answer": self.constraint,
            "continue_final_message": self.continue_final_message,
            "add_generation_prompt: false": not self.add_generation_prompt,
        }
        for name, given in silent.items():
            if given:
                raise ValueError(f'{name} cannot be combined with modalities with "audio"')
        return self

    def drop_large_fields(self) -> None:
        super().drop_large_fields()
        self.messages, self.tools, self.documents, self.chat_template_kwargs = [], [], None, {}

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def speech(self) -> SpeechParams | None:
        return None if self.audio is None else SpeechParams(self.audio.voice)

    @property
    def alternatives(self) -> int | None:
        return self.top_logprobs or 0 if self.logprobs else None

    @property
    def shows_reasoning(self) -> bool:
        return self.include_reasoning

    @property
    def hears_videos(self) -> bool:
        return self.use_audio_in_video or self.mm_processor_kwargs.use_audio_in_video

    @property
    def template(self) -> TemplateRequest:
        options = TemplateOptions(**{name: getattr(self, name) for name in TemplateOptions._fields})
        return TemplateRequest(self.chat_template_kwargs, self.reasoning_effort, self._template_tools(), options)

    @property
    def must_call(self) -> bool:
        choice = self.tool_choice
        if isinstance(choice, SomeTools):
            return choice.allowed_tools.mode == "required"
        return choice not in ("none", "auto")

    @property
    def may_call_several(self) -> bool:
        return self.parallel_tool_calls and not isinstance(self.tool_choice, NamedTool)

    @property
    def callable_tools(self) -> list[Tool]:
        if isinstance(self.tool_choice, str):
            return [] if self.tool_choice == "none" else self.tools
        return [tool for tool in self.tools if tool.function.name in self._chosen_names]

    @property
    def _chosen_names(self) -> set[str]:
        """The names of the functions that `tool_choice` names."""
        match self.tool_choice:
            case NamedTool(function=function):
                return {function.name}
            case SomeTools(allowed_tools=allowed):
                return {tool.function.name for tool in allowed.tools}
        return set()

    def _template_tools(self) -> list[dict[str, Any]] | None:
        """Return the tools for the chat template; None if the model may call none."""
        if not self.callable_tools:
            return None
        # A model that need not call would also call others that it sees.
        shown = self.callable_tools if isinstance(self.tool_choice, SomeTools) else self.tools
        return [tool.model_dump(exclude_unset=True) for tool in shown]
