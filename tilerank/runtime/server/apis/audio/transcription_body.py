"""Requests of /v1/audio/transcriptions: a form with a file of sound, which becomes a chat about it."""

import base64
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

import pydantic
from pydantic import BeforeValidator, Field

from ...chat.fields import RequestBody
from ...chat.request import ChatCompletion
from ...http.body import validation_error
from ...http.errors import ApiError
from ...http.form import FormField
from ..form import as_chat

LANGUAGES = {
    "ar": "Arabic",
    "de": "German",
    "en": "English",
    "es": "Spanish",
    "fr": "French",
    "id": "Indonesian",
    "it": "Italian",
    "ja": "Japanese",
    "ko": "Korean",
    "ms": "Malay",
    "nl": "Dutch",
    "pt": "Portuguese",
    "ru": "Russian",
    "tr": "Turkish",
    "ur": "Urdu",
    "vi": "Vietnamese",
    "yue": "Cantonese",
    "zh": "Chinese",
}
"""The languages of speech that Qwen3-Omni's model card lists, by their codes in ISO 639."""
_CHINESE = "请将这段中文语音转换为纯文本。"
_TIMED = ("diarized_json", "srt", "verbose_json", "vtt")


def _check_format(value: Any) -> Any:
    if value in _TIMED:
        raise ValueError(f"{value!r} needs times or speakers, which the model does not give; expected 'json' or 'text'")
    return value


def _check_language(value: Any) -> Any:
    if value is not None and value not in LANGUAGES:
        raise ValueError(f"expected a code of ISO 639, one of {', '.join(LANGUAGES)}, found {value!r}")
    return value


class TranscriptionRequest(RequestBody):
    """POST /v1/audio/transcriptions."""

    file: bytes = Field(min_length=1)
    model: str | None = Field(None, max_length=1024)
    language: Annotated[str | None, BeforeValidator(_check_language)] = None
    prompt: str | None = None
    response_format: Annotated[Literal["json", "text"], BeforeValidator(_check_format)] = "json"
    temperature: float = Field(0.0, ge=0, le=1)
    stream: bool = False

    def chat(self) -> ChatCompletion:
        """Return the chat: the sound, and then an instruction."""
        text = _instruction(self.language)
        if self.prompt is not None:
            text += f"\nContext: {self.prompt}"
        sound = {"data": base64.b64encode(self.file).decode()}
        parts = [{"type": "input_audio", "input_audio": sound}, {"type": "text", "text": text}]
        message = {"role": "user", "content": parts}
        return as_chat({"messages": [message], "temperature": self.temperature, "stream": self.stream})


def _instruction(language: str | None) -> str:
    """Return the prompt with which Qwen3-Omni's model card measures the recognition of speech in a language."""
    if language is None:
        return "Transcribe the audio into text."
    return _CHINESE if language == "zh" else f"Transcribe the {LANGUAGES[language]} audio into text."


def transcription_request(fields: Iterable[FormField]) -> TranscriptionRequest:
    """Return the request that a form makes. Empty fields are as if they were missing. Raises ApiError."""
    given: dict[str, Any] = {}
    for field in fields:
        name = field.name.removesuffix("[]")  # with which clients send lists
        if name in given and name in TranscriptionRequest.model_fields:
            raise ApiError(400, f"{name}: expected the field once, found it again", param=name)
        if field.data or field.is_file:
            given[name] = field.value()
    if isinstance(given.get("file"), str):
        raise ApiError(400, "file: expected a file, found text", param="file")
    return _validated(given)


def _validated(given: Mapping[str, Any]) -> TranscriptionRequest:
    try:
        return TranscriptionRequest.model_validate(given)
    except pydantic.ValidationError as e:
        raise validation_error(given, e) from e
