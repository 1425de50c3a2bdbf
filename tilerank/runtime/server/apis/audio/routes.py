"""OpenAI's /v1/audio/transcriptions and /v1/audio/speech."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Send

from ....protocol.prompt import Prompt
from ...chat.deltas import ActiveRequest, Delta
from ...chat.sound_formats import CONTENT_TYPES, SoundStream, check_format
from ...chat.speech_fields import check_voice
from ...http.body import MAX_FORM, read_body
from ...http.errors import ApiError
from ...http.form import read_form
from ..answer import Answer
from ..generation import NewParser, activate, conversation_prompt, converse, first_delta
from ..service import Service, while_connected
from .speech_body import SpeechRequest
from .transcription_answer import TranscriptionAnswer
from .transcription_body import transcription_request


class AudioEndpoints:
    """Turns sound into text, and text into sound."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def transcribe(self, request: Request) -> Response:
        """POST /v1/audio/transcriptions. Writes down what is said in a file."""
        service, model = self._service, self._service.settings.model
        media = service.settings.media
        if media is None or "audio" not in media.processor.kinds:
            raise ApiError(400, f"{model} takes no sound, so it cannot transcribe any.", code="unsupported_endpoint")
        content_type = request.headers.get("content-type", "")
        body = transcription_request(read_form(content_type, await read_body(request, MAX_FORM)))
        service.check_model(body.model)
        chat, as_text = body.chat(), body.response_format == "text"
        del body  # a file takes much memory

        def new_answer(active: ActiveRequest, new_parser: NewParser | None) -> Answer:
            return TranscriptionAnswer(active, as_text)

        try:
            return await converse(service, request, chat, new_answer)
        except ApiError as e:
            raise _about_file(e) from e

    async def speak(self, request: Request) -> Response:
        """POST /v1/audio/speech. Reads a text aloud."""
        service = self._service
        body = await service.body(request, SpeechRequest)
        check_voice(body.voice, service.settings.voices, service.settings.model, "voice")
        check_format(body.response_format, "response_format")
        *before, last = await self._tokens(body.input)
        chat = body.chat(last)
        with while_connected(request):
            with service.budget.share() as share:
                asked = (await conversation_prompt(service, chat, share)).prompt
            active = activate(service, chat, [Prompt(asked.token_ids + before)], None, None)
            first, rest = await first_delta(service, request, active, f"speech-{active.id}")
        sound = _encoded(SoundStream(body.response_format), first, rest)
        return _SoundResponse(request, sound, CONTENT_TYPES[body.response_format])

    async def _tokens(self, text: str) -> list[int]:
        """Return the tokens of a text to read. Raises ApiError for special ones, which would end it."""
        tokenizer = self._service.tokenizer
        ids = await self._service.prompts.encode(text, add_special_tokens=False)
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


async def _encoded(stream: SoundStream, first: Delta, rest: AsyncGenerator[Delta]) -> AsyncIterator[bytes]:
    async with aclosing(rest):
        yield await asyncio.to_thread(stream.push, first.sound)
        async for delta in rest:
            if data := await asyncio.to_thread(stream.push, delta.sound):
                yield data
        yield await asyncio.to_thread(stream.finish)


def _about_file(error: ApiError) -> ApiError:
    """Return the error with the name that the only medium of the messages has in the form."""
    if error.param != "messages":
        return error
    message = f"file: {str(error).removeprefix('messages: ')}"
    return ApiError(error.status, message, param="file", code=error.code)
