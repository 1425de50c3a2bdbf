"""The pictures, videos and sound of OpenAI chat messages. Nothing is fetched here."""

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tilerank.loader.errors import show

from ..protocol.errors import MediaError

MAX_URLS = 4096
"""Media and frames of one conversation."""

# type of a part -> kind of medium, and the keys under which it is found.
_PARTS = {
    "image_url": ("image", ("image_url",)),
    "image": ("image", ("image", "url", "path", "base64")),
    "input_image": ("image", ("image_url",)),
    "video_url": ("video", ("video_url",)),
    "video": ("video", ("video", "url", "path", "base64")),
    "audio_url": ("audio", ("audio_url",)),
    "audio": ("audio", ("audio", "url", "path", "base64")),
    "input_audio": ("audio", ("input_audio",)),
}


PART_FIELDS = frozenset(("type", *(key for _, keys in _PARTS.values() for key in keys)))
"""The fields of parts that are media."""


class MediaSource(NamedTuple):
    """The source of a medium.

    kind: "image", "video" or "audio". urls: one URL or path; if `listed`, the pictures that are the frames of a video.
    heard: the model hears the sound of the video as well.
    """

    kind: str
    urls: tuple[str, ...]
    listed: bool
    heard: bool = False


def split_media(
    messages: Sequence[Mapping[str, Any]], placeholders: Sequence[str] = (), heard: bool = False
) -> tuple[list[dict[str, Any]], list[MediaSource]]:
    """Return the messages as chat templates expect them, and their media in the order of the text.

    Parts that are media become {"type": "image"}, or that of another kind. Raises MediaError for other types of parts,
    and for text with one of the `placeholders`, which only the template may write. heard: the model hears the sound of
    all videos; raises MediaError for a video of frames, which has none.
    """
    sources: list[MediaSource] = []
    converted = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list | tuple):
            content = [_convert(part, sources, heard) for part in content]
        _check_text(content, placeholders)
        converted.append({**message, "content": content} if "content" in message else dict(message))
    if (count := sum(len(source.urls) for source in sources)) > MAX_URLS:
        raise MediaError(f"the messages have {count} pictures, videos and frames; at most {MAX_URLS} are allowed")
    return converted, sources


def read_data_url(url: str) -> bytes:
    """Return the content of a data: URL in base64. Raises MediaError."""
    head, comma, text = url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise MediaError(f"expected a URL data:TYPE;base64,DATA, found {show(url)}")
    try:
        # Clients break lines and leave out the padding.
        text = "".join(text.split()).rstrip("=")
        return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except (binascii.Error, ValueError) as failure:
        raise MediaError(f"{show(url)}: not valid base64: {failure}") from None


def _convert(part: Any, sources: list[MediaSource], heard: bool) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in ("text", "input_text") and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if not isinstance(kind, str) or kind not in _PARTS:
        expected = ", ".join(["text", *_PARTS])
        raise MediaError(f"expected a part of type {expected}, found {show(part if kind is None else kind)}")
    medium, keys = _PARTS[kind]
    given = [key for key in keys if part.get(key) is not None]
    if len(given) != 1:
        fields = f"the field {keys[0]}" if len(keys) == 1 else f"one of the fields {', '.join(keys)}"
        raise MediaError(f"a part of type {kind}: expected {fields}, found {', '.join(given) or 'none'}")
    value = part[given[0]]
    if kind == "input_audio":
        value = _inline_sound(value)
    if medium == "video" and isinstance(value, list | tuple) and given[0] != "base64":
        if not value:
            raise MediaError(f"a part of type {kind}: expected at least one frame, found an empty list")
        if heard:
            raise MediaError(f"use_audio_in_video: expected a file, found a part of type {kind} with a list of frames")
        sources.append(MediaSource(medium, tuple(_url(frame, kind) for frame in value), True))
    else:
        url = _url(value, kind)
        urls = (f"data:;base64,{url}" if given[0] == "base64" else url,)
        sources.append(MediaSource(medium, urls, False, heard and medium == "video"))
    return {"type": medium}


def _inline_sound(value: Any) -> str:
    """Return what {"data": base64, "format": "wav"} has as a URL. The file itself says what its format is."""
    data = value.get("data") if isinstance(value, Mapping) else None
    if not isinstance(data, str) or not data or not isinstance(value.get("format", ""), str):
        raise MediaError(
            f"a part of type input_audio: expected an object of data, sound in base64, and format, found {show(value)}"
        )
    return f"data:;base64,{data}"


def _url(value: Any, kind: str) -> str:
    url = value.get("url") if isinstance(value, Mapping) else value
    if not isinstance(url, str) or not url:
        raise MediaError(f"a part of type {kind}: expected a URL, found {show(value)}")
    return url


def _check_text(content: Any, placeholders: Sequence[str]) -> None:
    texts = [part.get("text", "") for part in content] if isinstance(content, list) else [content]
    # Parts may be written one directly after the other.
    text = "".join(text for text in texts if isinstance(text, str))
    for placeholder in placeholders:
        if placeholder in text:
            raise MediaError(f"the text contains {placeholder}, which stands for a medium; send the medium as a part")
