"""Answers in the form of OpenAI's /v1/audio/transcriptions."""

from ...chat.deltas import ActiveRequest, Delta
from ...http.errors import ApiError
from ..answer import Answer, Event, Json


class TranscriptionAnswer(Answer):
    """The text of a clip of sound. as_text: the whole answer is text alone, not JSON."""

    def __init__(self, active: ActiveRequest, as_text: bool) -> None:
        super().__init__(active, "transcription-")
        self._as_text = as_text
        self._texts: list[str] = []

    def add(self, delta: Delta) -> list[Event]:
        if not delta.text:
            return []
        self._texts.append(delta.text)
        return [Event({"type": "transcript.text.delta", "delta": delta.text})]

    def end(self) -> list[Event]:
        return [Event({"type": "transcript.text.done"} | self._transcription())]

    def fail(self, error: ApiError) -> list[Event]:
        return [Event(error.body())]

    def whole(self) -> Json | str:
        transcription = self._transcription()
        return f"{transcription['text']}\n" if self._as_text else transcription

    def _transcription(self) -> Json:
        usage = self._active.usage
        counts = {
            "type": "tokens",
            "input_tokens": usage["prompt_tokens"],
            "output_tokens": usage["completion_tokens"],
            "total_tokens": usage["total_tokens"],
        }
        return {"text": "".join(self._texts), "usage": counts}
