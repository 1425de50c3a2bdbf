"""Requests of /v1/audio/speech: a text that becomes the answer of a chat, which the model speaks."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from ...chat.fields import RequestBody
from ...chat.request import ChatCompletion
from ...chat.speech_fields import Voice
from ..form import as_chat

MAX_CHARACTERS = 4096
_ASKED = "Read this text aloud:"


def _check_speed(value: Any) -> Any:
    if value != 1:
        raise ValueError(f"the model speaks at its own speed; expected 1, found {value!r}")
    return value


def _check_stream(value: Any) -> Any:
    if value == "sse":
        raise ValueError("'sse' is not supported; expected 'audio', which is sent while the model speaks")
    return value


class SpeechRequest(RequestBody):
    """POST /v1/audio/speech."""

    input: str = Field(min_length=1, max_length=MAX_CHARACTERS)
    voice: Voice
    model: str | None = Field(None, max_length=1024)
    instructions: str | None = Field(None, max_length=MAX_CHARACTERS)
    response_format: Literal["mp3", "opus", "aac", "flac", "wav", "pcm"] = "mp3"
    speed: Annotated[float, BeforeValidator(_check_speed)] = 1.0
    stream_format: Annotated[Literal["audio"], BeforeValidator(_check_stream)] = "audio"
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)

    def chat(self, last: int) -> ChatCompletion:
        """Return the chat whose answer is the text. last: the last token of the text, the only one that is generated;
        the prompt has the others."""
        message = {"role": "user", "content": f"{self.instructions or _ASKED}\n{self.input}"}
        return as_chat(
            {
                "messages": [message],
                "max_completion_tokens": 1,
                "allowed_token_ids": [last],
                "temperature": 1.0,  # the talker samples as well
                "seed": self.seed,
                "modalities": ["text", "audio"],
                "audio": {"voice": self.voice, "format": "pcm16"},
            }
        )
