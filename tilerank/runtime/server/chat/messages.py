"""The messages of a conversation, as requests have them."""

from collections.abc import Iterable
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag, ValidationInfo, model_validator

from ...media.messages import PART_FIELDS
from ..http.json_values import check_texts
from .fields import Body, CheckedBody, ListOf
from .ignored_fields import known_only
from .tools.calls import arguments_from_json

MAX_PARTS = 1 << 16
"""Parts of one message. The number of media has a limit of its own."""
Name = Annotated[str, Field(min_length=1, max_length=256)]
Id = Annotated[str, Field(pattern="^[a-zA-Z0-9_.-]{1,128}$")]
_MEDIA_FIELDS = PART_FIELDS | {"cache_control", "prompt_cache_breakpoint", "uuid"}
"""uuid: the name of a medium in the caches of other servers. Here its content is its name."""


class TextPart(CheckedBody):
    """A text. Prompts that begin alike share their cache without marks."""

    type: Literal["text"]
    text: str
    cache_control: Any = Field(None, exclude=True)
    prompt_cache_breakpoint: Any = Field(None, exclude=True)


class MediaPart(Body):
    """A picture, a video or sound. runtime/media/messages.py reads its fields."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)
    type: str = Field(min_length=1, max_length=64)

    @model_validator(mode="before")
    @classmethod
    def _take_known(cls, data: Any, info: ValidationInfo) -> Any:
        return known_only(data, _MEDIA_FIELDS, info) if isinstance(data, dict) else data


def refusal_as_text(part: Any, *, kind: str) -> Any:
    """Return the refusal of an earlier answer as a part of another kind, with a text. Templates have no refusals."""
    return {"type": kind, "text": part.get("refusal")} if isinstance(part, dict) else part


def _part_tag(part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else getattr(part, "type", None)
    return kind if kind in ("text", "refusal") else "media"


Part = Annotated[
    Annotated[TextPart, Tag("text")]
    | Annotated[TextPart, BeforeValidator(partial(refusal_as_text, kind="text")), Tag("refusal")]
    | Annotated[MediaPart, Tag("media")],
    Discriminator(_part_tag),
]


class CalledFunction(CheckedBody):
    name: str
    arguments: str | dict[str, Any] | None = None


class EarlierCall(CheckedBody):
    """A tool call of an earlier turn. index: of the pieces that were streamed."""

    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction
    index: Any = Field(None, exclude=True)


class EarlierSpeech(CheckedBody):
    """The speech of an earlier turn: its id, or all that the answer had."""

    id: Id
    transcript: str | None = None
    data: Any = Field(None, exclude=True)
    expires_at: Any = Field(None, exclude=True)


class Message(Body):
    """A message of a conversation. Additional fields are passed on to the chat template."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)
    role: str = Field(min_length=1, max_length=64)
    content: str | Annotated[ListOf[Part], Field(max_length=MAX_PARTS)] | None = None
    tool_calls: Annotated[ListOf[EarlierCall], Field(max_length=128)] | None = None
    audio: EarlierSpeech | None = None

    def for_template(self, parts: bool, keeps_arguments: bool) -> dict[str, Any]:
        """Return the message for the chat template.

        parts: does the template accept content in parts? Text parts become one string for templates that do not.
        keeps_arguments: does it take the arguments of calls as they are? For others they become objects.
        """
        # Templates add the content to other texts, which fails for none.
        message = {"content": ""} | self.model_dump(exclude={"audio"}, exclude_none=True)
        if isinstance(self.content, list) and not parts:
            message["content"] = "\n".join(part.text for part in self.content if isinstance(part, TextPart))
        for call in () if keeps_arguments else self.tool_calls or ():
            call.function.arguments = _object(call.function.arguments)
        if self.tool_calls:
            message["tool_calls"] = [call.model_dump() for call in self.tool_calls]
        return message


def check_arguments(messages: Iterable[Message]) -> None:
    """Raise ApiError if the arguments of tool calls, which are JSON in strings, have too many values together."""
    found = (call.function.arguments for message in messages for call in message.tool_calls or ())
    check_texts("arguments of tool calls", (one for one in found if isinstance(one, str)))


def _object(arguments: str | dict[str, Any] | None) -> str | dict[str, Any]:
    """Return the arguments of a call as the object that templates expect. A text that is none stays as it is."""
    found = arguments_from_json(arguments)
    return str(arguments) if found is None else found
