"""Turns token ids into text for the client: whole characters only, and no part of a stop string."""

from collections.abc import Sequence

from tilerank.loader.tokenizer import TokenStream


class TextStream:
    """The text of one choice. `stopped`: a stop string was found, and the text ends before it."""

    def __init__(self, stream: TokenStream, stop: Sequence[str]) -> None:
        self.stopped = False
        self._stream = stream
        self._stop = stop
        self._buffer = ""  # may be the beginning of a stop string

    def push(self, token_id: int) -> str:
        """Append a token and return the text that no later token can change."""
        return self._release(self._stream.push(token_id))

    def flush(self) -> str:
        """Return the rest of the text. No token follows."""
        return self._release(self._stream.flush()) + ("" if self.stopped else self._buffer)

    def _release(self, text: str) -> str:
        text = self._buffer + text
        found = [(text.index(stop) + len(stop), text.index(stop)) for stop in self._stop if stop in text]
        if found:
            self.stopped = True
            return text[: min(found)[1]]  # the stop string that is complete first wins
        keep = max((overlap(text, stop) for stop in self._stop), default=0)
        self._buffer = text[len(text) - keep :]
        return text[: len(text) - keep]


def overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
