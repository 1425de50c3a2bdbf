"""OpenAI's /v1/audio/speech: a text that becomes the answer of a chat, which the model speaks."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Send

from ...chat.deltas import Delta
from ...chat.fields import RequestBody
from ...chat.request import ChatCompletion, Voice, check_voice
from ...chat.sound_formats import CONTENT_TYPES, SoundStream, check_format
from ...http.errors import ApiError
from ..form import as_chat
from ..service import Service, while_connected

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


class SpeechEndpoints:
    """Turns text into sound."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def speak(self, request: Request) -> Response:
        """POST /v1/audio/speech. Reads a text aloud."""
        service = self._service
        body = await service.body(request, SpeechRequest)
        check_voice(body.voice, service.settings.voices, service.settings.model, "voice")
        check_format(body.response_format, "response_format")
        *before, last = await self._tokens(body.input)
        with while_connected(request):
            with service.budget.share() as share:
                generation = await service.generation(body.chat(last), share, begun=before)
            deltas = await service.begin(request, generation, f"speech-{generation.id}")
        sound = _encoded(SoundStream(body.response_format), deltas)
        return _SoundResponse(request, sound, CONTENT_TYPES[body.response_format])

    async def _tokens(self, text: str) -> list[int]:
        """Return the tokens of a text to read. Raises ApiError for special ones, which would end it."""
        tokenizer = self._service.tokenizer
        [ids] = await self._service.prompts.encode([text], add_special_tokens=False, param="input")
        if special := next(filter(None, map(tokenizer.special_token, ids)), None):
            raise ApiError(400, f"input: expected text, found the special token {special}", param="input")
        if not ids:
            raise ApiError(400, "input: expected text of at least one token, found none", param="input")
        return ids


class _SoundResponse(StreamingResponse):
    """Sends sound while it is made. If that fails, the connection is closed before the end of the response."""

    def __init__(self, request: Request, sound: AsyncIterator[bytes], content_type: str) -> None:
        super().__init__(sound, media_type=content_type, headers={"Cache-Control": "no-cache"})
        self._metrics = request.app.state.metrics

    async def stream_response(self, send: Send) -> None:
        try:
            await super().stream_response(send)
        except ApiError as e:
            self._metrics.count_error(e.status)


async def _encoded(stream: SoundStream, deltas: AsyncGenerator[Delta]) -> AsyncIterator[bytes]:
    async with aclosing(deltas):
        async for delta in deltas:
            if data := await asyncio.to_thread(stream.push, delta.sound):
                yield data
        yield await asyncio.to_thread(stream.finish)
