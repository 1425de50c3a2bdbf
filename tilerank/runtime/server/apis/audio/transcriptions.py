"""OpenAI's /v1/audio/transcriptions: a form with a file of sound, which becomes a chat about it."""

import base64
from collections.abc import Iterable
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from starlette.requests import Request
from starlette.responses import Response

from ...chat.deltas import Delta
from ...chat.fields import RequestBody
from ...chat.generation import Generation
from ...chat.request import ChatCompletion
from ...http.body import MAX_FORM
from ...http.errors import ApiError
from ...http.form import read_form
from ..answer import Answer, Json, ServerSentEvent
from ..form import as_chat
from ..service import Service

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


def transcription_fields(fields: Iterable[tuple[str, str | bytes]]) -> dict[str, Any]:
    """Return the fields of the request that a form makes. Empty texts are as if they were missing. Raises ApiError."""
    given: dict[str, Any] = {}
    for field, value in fields:
        name = field.removesuffix("[]")  # with which clients send lists
        if name in given and name in TranscriptionRequest.model_fields:
            raise ApiError(400, f"{name}: expected the field once, found it again", param=name)
        if value or isinstance(value, bytes):
            given[name] = value
    if isinstance(given.get("file"), str):
        raise ApiError(400, "file: expected a file, found text", param="file")
    return given


class TranscriptionAnswer(Answer):
    """The text of a clip of sound. as_text: the whole answer is text alone, not JSON."""

    def __init__(self, generation: Generation, as_text: bool) -> None:
        super().__init__(generation, "transcription-")
        self._as_text = as_text
        self._texts: list[str] = []

    def add(self, delta: Delta) -> list[ServerSentEvent]:
        if not delta.text:
            return []
        self._texts.append(delta.text)
        return [ServerSentEvent({"type": "transcript.text.delta", "delta": delta.text})]

    def end(self) -> list[ServerSentEvent]:
        return [ServerSentEvent({"type": "transcript.text.done"} | self._transcription())]

    def whole(self) -> Json | str:
        transcription = self._transcription()
        return f"{transcription['text']}\n" if self._as_text else transcription

    def _transcription(self) -> Json:
        usage = self._generation.usage
        counts = {
            "type": "tokens",
            "input_tokens": usage.prompt_tokens,
            "output_tokens": usage.completion_tokens,
            "total_tokens": usage.total_tokens,
        }
        return {"text": "".join(self._texts), "usage": counts}


class TranscriptionEndpoints:
    """Turns sound into text."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def transcribe(self, request: Request) -> Response:
        """POST /v1/audio/transcriptions. Writes down what is said in a file."""
        service, model = self._service, self._service.settings.model
        media = service.settings.media
        if media is None or "audio" not in media.processor.kinds:
            raise ApiError(400, f"{model} takes no sound, so it cannot transcribe any.", code="unsupported_endpoint")
        given = transcription_fields(await read_form(request, MAX_FORM))
        body = service.checked(request, TranscriptionRequest, given)
        chat, as_text = body.chat(), body.response_format == "text"
        del body, given  # a file takes much memory

        try:
            new_generation = partial(service.generation, chat)
            return await service.answer(request, new_generation, lambda one: TranscriptionAnswer(one, as_text))
        except ApiError as e:
            raise _about_file(e) from e


def _about_file(error: ApiError) -> ApiError:
    """Return the error with the name that the only medium of the messages has in the form."""
    if error.param != "messages":
        return error
    message = f"file: {str(error).removeprefix('messages: ')}"
    return ApiError(error.status, message, param="file", code=error.code)
