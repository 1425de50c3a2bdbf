"""OpenAI's /v1/audio/transcriptions."""

from starlette.requests import Request
from starlette.responses import Response

from ..answers.answer import Answer
from ..answers.completions import ActiveRequest
from ..answers.transcription_answer import TranscriptionAnswer
from ..errors import ApiError
from ..forms.transcription_request import transcription_request
from ..multipart_form import read_form
from ..request_body import MAX_FORM, read_body
from .generation import NewParser, converse
from .service import Service


class AudioEndpoints:
    """Turns sound into text."""

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


def _about_file(error: ApiError) -> ApiError:
    """Return the error with the name that the only medium of the messages has in the form."""
    if error.param != "messages":
        return error
    message = f"file: {str(error).removeprefix('messages: ')}"
    return ApiError(error.status, message, param="file", code=error.code)
