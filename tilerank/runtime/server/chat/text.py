"""Turns token ids into text for the client: whole characters only, and no part of a stop string."""

from collections.abc import Sequence

from tilerank.loader.tokenizer import TokenStream

from .reasoning import ReasoningSplitter, ReasoningStart, Text, overlap


class TextStream:
    """The text of one choice. `stopped`: a stop string was found in the answer, which ends before it.

    thinking: how the text begins. Stop strings do not end the reasoning. reasoning_tokens: tokens that belong to it,
    the marks included. min_tokens: stop strings in the text of so many tokens are none. keeps_stop: the stop string
    belongs to the text.
    """

    def __init__(
        self,
        stream: TokenStream,
        stop: Sequence[str],
        thinking: ReasoningStart = ReasoningStart.NEVER,
        min_tokens: int = 0,
        keeps_stop: bool = False,
    ) -> None:
        self.stopped = False
        self.stop_string: str | None = None  # the one that was found
        self._left = min_tokens
        self._keeps_stop = keeps_stop
        self.reasoning_tokens = 0
        self._stream = stream
        self._splitter = ReasoningSplitter(thinking)
        self._stop = stop
        self._buffer = ""  # may be the beginning of a stop string

    def push(self, token_id: int) -> Text:
        """Append a token and return the text that no later token can change."""
        before = self._splitter.reasoning
        found = self._splitter.push(self._stream.push(token_id))
        self.reasoning_tokens += before or self._splitter.reasoning
        if self._left:
            self._left -= 1
            return found
        return Text(found.reasoning, self._release(found.answer))

    def flush(self) -> Text:
        """Return the rest of the text. No token follows."""
        found = self._splitter.push(self._stream.flush()) + self._splitter.flush()
        answer = self._release(found.answer)
        return Text(found.reasoning, answer if self.stopped else answer + self._buffer)

    def _release(self, text: str) -> str:
        text = self._buffer + text
        found = [(text.index(stop) + len(stop), text.index(stop)) for stop in self._stop if stop in text]
        if found:
            self.stopped = True
            self.stop_string = text[min(found)[1] : min(found)[0]]
            return text[: min(found)[0 if self._keeps_stop else 1]]  # the stop string that is complete first wins
        keep = max((overlap(text, stop) for stop in self._stop), default=0)
        self._buffer = text[len(text) - keep :]
        return text[: len(text) - keep]
