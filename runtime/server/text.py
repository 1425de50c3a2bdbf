"""From token ids to the text that a client sees: whole characters, and nothing of a stop string."""

from collections.abc import Sequence

from tilerank.loader.tokenizer import TokenStream


class TextStream:
    """The text of one choice. `stopped`: a stop string came up, and what follows is not wanted."""

    def __init__(self, stream: TokenStream, stop: Sequence[str]) -> None:
        self.stopped = False
        self._stream = stream
        self._stop = stop
        self._held = ""  # may become a stop string

    def push(self, token_id: int) -> str:
        """The text that is certain now."""
        return self._release(self._stream.push(token_id))

    def flush(self) -> str:
        """What was held back; no token follows."""
        return self._release(self._stream.flush()) + ("" if self.stopped else self._held)

    def _release(self, text: str) -> str:
        held = self._held + text
        found = [(held.index(stop) + len(stop), held.index(stop)) for stop in self._stop if stop in held]
        if found:
            self.stopped = True
            return held[: min(found)[1]]  # of the one that is complete first
        keep = max((overlap(held, stop) for stop in self._stop), default=0)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]


def overlap(text: str, stop: str) -> int:
    """The longest end of `text` that `stop` begins with."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
