"""The text of `bench quality` as windows of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from tilerank.loader.card import ModelCard

from ...errors import LaunchError

DEFAULT_TEXT = Path(__file__).parent / "prose_and_code.txt"
"""A story and documentation, then Python and C++, about 4,000 tokens of each, all written for tilerank."""


@dataclass(frozen=True)
class Text:
    """A text that is predicted, window by window. Every token of a window counts but the first, which is given."""

    name: str
    windows: list[list[int]]

    @property
    def counted(self) -> int:
        return sum(len(window) - 1 for window in self.windows)

    def describe(self) -> str:
        """Return one line that says what is measured."""
        longest = max(map(len, self.windows))
        return (
            f"{self.name}: {self.counted:,} tokens count, in {len(self.windows)} windows of up to {longest:,}; each is "
            "predicted by itself, and its first token is given"
        )


def read_text(path: Path, card: ModelCard, tokenizer_dir: Path, window: int, limit: int | None) -> Text:
    """Read a file of text and cut its tokens into windows, at most of the model's context.

    Every window begins with what the tokenizer puts before a text, such as a token for its beginning. Raises
    LaunchError if the file cannot be read or has fewer than two tokens.
    """
    from tilerank.loader.tokenizer import Tokenizer

    try:
        text = path.read_text(encoding="utf-8")
    except OSError as e:
        raise LaunchError(f"{path} cannot be read: {e.strerror}; expected a text") from e
    except UnicodeDecodeError as e:
        raise LaunchError(f"{path}: expected a text in UTF-8: {e}") from e
    tokenizer = Tokenizer(tokenizer_dir)
    ids = tokenizer.encode(text, add_special_tokens=False)
    if len(ids) < 2:
        raise LaunchError(f"{path}: expected a text of two tokens or more, found {len(ids)}")
    whole = tokenizer.encode(text)
    start = whole[: whole.index(ids[0])]
    own = min(window, card.context_length) - len(start)
    if own < 1:
        raise LaunchError(f"--window {window}: expected more than the {len(start)} tokens that begin every text")
    windows = [start + ids[first : first + own] for first in range(0, len(ids), own)]
    return Text(path.name, [window for window in windows if len(window) > 1][:limit])


class _TokenFile(msgspec.Struct):
    sequences: list[list[int]]


def read_token_file(path: Path, card: ModelCard, limit: int | None) -> Text:
    """Read a --tokens file, whose sequences are the windows.

    LaunchError unless each has two tokens or more, fits the context, and has only ids of the vocabulary.
    """
    try:
        windows = msgspec.json.decode(path.read_bytes(), type=_TokenFile).sequences[:limit]
    except OSError as e:
        raise LaunchError(f"{path} cannot be read: {e.strerror}; expected a JSON file with token ids") from e
    except msgspec.DecodeError as e:
        raise LaunchError(f"{path}: {e}") from e
    if not windows:
        raise LaunchError(f"{path}: sequences: expected at least one, found none")
    for index, ids in enumerate(windows):
        if not 2 <= len(ids) <= card.context_length:
            raise LaunchError(f"{path}: sequence {index}: expected 2 to {card.context_length} tokens, found {len(ids)}")
        if wrong := [id for id in ids if not 0 <= id < card.vocab_size]:
            raise LaunchError(
                f"{path}: sequence {index}: expected token ids from 0 to {card.vocab_size - 1}, found {wrong[0]}"
            )
    return Text(path.name, windows)
