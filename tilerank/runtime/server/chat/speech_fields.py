"""The fields of requests for speech."""

from collections.abc import Collection
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from ..http.errors import ApiError
from .fields import Body


def _voice_name(value: Any) -> Any:
    """Return the name of a voice, which may be given as {"id": NAME}, in lower case."""
    name = value.get("id") if isinstance(value, dict) else value
    return name.lower() if isinstance(name, str) else name


Voice = Annotated[str, Field(min_length=1, max_length=256), BeforeValidator(_voice_name)]


class SpeechOutput(Body):
    """How the answer of a chat is spoken."""

    voice: Voice
    format: Literal["wav", "aac", "mp3", "flac", "opus", "pcm16"]


def check_voice(voice: str, voices: Collection[str], model: str, param: str) -> None:
    """Raise ApiError unless a model with these `voices` has this one. param: the field that names it."""
    if not voices:
        raise ApiError(400, f"{param}: {model} does not speak", param=param, code="unsupported_parameter")
    if voice not in voices:
        raise ApiError(400, f"{param}: expected one of {', '.join(voices)}, found {voice!r}", param=param)
