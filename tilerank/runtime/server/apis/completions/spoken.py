"""Formats the choices of a chat that are spoken, and keeps their texts for later turns."""

import base64
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import ClassVar

from tilerank.loader.tokenizer import Tokenizer

from ...chat.deltas import Delta
from ...chat.sound_formats import encode_sound
from ..answer import Json
from .choices import ChatFormatter, reasoning_fields

KEPT_S = 3600
MAX_KEPT = 1000
MAX_CHARACTERS = 16 << 20
"""Characters of all transcripts together."""


class TranscriptStore:
    """The texts of the last speeches, by the ids under which later turns name them."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, tuple[int, str]] = OrderedDict()  # when each is forgotten, and the text
        self._characters = 0

    bounds = f"the last {MAX_KEPT} for {KEPT_S // 60} minutes"
    """Return what is kept, as a part of a sentence."""

    def put(self, id: str, transcript: str) -> int:
        """Keep a text. Returns the Unix time in seconds after which it is forgotten."""
        expires_at = int(time.time()) + KEPT_S
        self._kept[id] = expires_at, transcript
        self._characters += len(transcript)
        while len(self._kept) > MAX_KEPT or self._characters > MAX_CHARACTERS:
            _, (_, oldest) = self._kept.popitem(last=False)
            self._characters -= len(oldest)
        return expires_at

    def get(self, id: str) -> str | None:
        """Return a text; None if it is not kept."""
        expires_at, transcript = self._kept.get(id, (0, ""))
        return transcript if time.time() < expires_at else None


class SpokenFormatter(ChatFormatter):
    """Formats the choices of /v1/chat/completions with `audio`: their texts are the transcripts of the speech.

    form: of the sound of whole choices; chunks have plain samples. keep: keeps a transcript (TranscriptStore.put).
    """

    first: ClassVar[Json] = {"role": "assistant", "content": None}
    costly = True

    def __init__(
        self,
        tokenizer: Tokenizer,
        top: int | None,
        by_id: bool,
        form: str,
        stream: bool,
        keep: Callable[[str, str], int],
    ) -> None:
        super().__init__(tokenizer, top, by_id)
        self._form = form
        self._stream = stream
        self._keep = keep
        self._ids: dict[int, str] = {}
        self._texts: dict[int, list[str]] = {}
        self._sounds: dict[int, bytearray] = {}  # of whole choices

    def choice(self, chunks: Sequence[Json]) -> Json:
        choice = super().choice(chunks)
        index = choice["index"]
        choice["message"]["content"] = None
        choice["message"]["audio"] = {
            "id": self._ids[index],
            "data": _base64(encode_sound(self._form, bytes(self._sounds.pop(index)))),
            "expires_at": chunks[-1]["delta"]["audio"]["expires_at"],
            "transcript": "".join(self._texts[index]),
        }
        return choice

    def _content(self, delta: Delta) -> Json:
        index = delta.index
        id = self._ids.setdefault(index, f"audio_{secrets.token_hex(12)}")
        texts = self._texts.setdefault(index, [])
        audio: Json = {}
        if delta.text:
            texts.append(delta.text)
            audio = {"id": id, "transcript": delta.text}
        if not self._stream:
            self._sounds.setdefault(index, bytearray()).extend(delta.sound)
        elif delta.sound:
            audio |= {"id": id, "data": _base64(delta.sound)}
        if delta.finish_reason is not None:
            audio["expires_at"] = self._keep(id, "".join(texts))
        return reasoning_fields(delta.reasoning) | ({"audio": audio} if audio else {})


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()
