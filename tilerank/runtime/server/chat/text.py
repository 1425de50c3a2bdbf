"""Turns token ids into text for the client: whole characters only, and no part of a stop string."""

from collections.abc import Sequence

from tilerank.loader.chat.template import THINK, ReasoningMarks, ReasoningStart
from tilerank.loader.tokenizer import TokenStream

from .reasoning import ReasoningSplitter, Text, overlap


class StopStrings:
    """Finds the stop strings of a request in the text of its answer, which ends before the first one.

    stopped: one was found. stop_string: which one. min_tokens: those in the text of so many tokens are none. keeps: the
    stop string belongs to the text.
    """

    def __init__(self, strings: Sequence[str], min_tokens: int = 0, keeps: bool = False) -> None:
        self.stopped = False
        self.stop_string: str | None = None
        self._strings = strings
        self._left = min_tokens
        self._keeps = keeps
        self._buffer = ""  # may be the beginning of a stop string

    def push(self, text: str) -> str:
        """Append text of the answer and return what no later text can change."""
        return text if self._left else self._release(text)

    def end_token(self) -> None:
        """Count a token, whose text has been appended."""
        self._left = max(self._left - 1, 0)

    def flush(self, text: str = "") -> str:
        """Return the rest, with the last text. No token follows."""
        released = self._release(text)
        rest, self._buffer = self._buffer, ""
        return released if self.stopped else released + rest

    def _release(self, text: str) -> str:
        text = self._buffer + text
        found = [(text.index(stop) + len(stop), text.index(stop)) for stop in self._strings if stop in text]
        if found:
            self.stopped = True
            self.stop_string = text[min(found)[1] : min(found)[0]]
            return text[: min(found)[0 if self._keeps else 1]]  # the stop string that is complete first wins
        keep = max((overlap(text, stop) for stop in self._strings), default=0)
        self._buffer = text[len(text) - keep :]
        return text[: len(text) - keep]


class TextStream:
    """The text of one choice, whose reasoning is marked.

    stops: found in the answer; stop strings do not end the reasoning. thinking: how the text begins. marks: those of
    the reasoning. reasoning_tokens: tokens that belong to it, the marks included.
    """

    def __init__(
        self,
        stream: TokenStream,
        stops: StopStrings,
        thinking: ReasoningStart = ReasoningStart.NEVER,
        marks: ReasoningMarks = THINK,
    ) -> None:
        self.reasoning_tokens = 0
        self._stream = stream
        self._stops = stops
        self._splitter = ReasoningSplitter(thinking, marks)

    def push(self, token_id: int) -> Text:
        """Append a token and return the text that no later token can change."""
        before = self._splitter.reasoning
        found = self._splitter.push(self._stream.push(token_id))
        self.reasoning_tokens += before or self._splitter.reasoning
        released = self._stops.push(found.answer)
        self._stops.end_token()
        return Text(found.reasoning, released)

    def flush(self) -> Text:
        """Return the rest of the text. No token follows."""
        found = self._splitter.push(self._stream.flush()) + self._splitter.flush()
        return Text(found.reasoning, self._stops.flush(found.answer))
