"""Opens the stream of sound or video of a file with PyAV, for sound_file.py and video.py."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from .errors import MediaError

if TYPE_CHECKING:
    from av.container import InputContainer

# Demuxers, without those of playlists, which name other files and URLs.
_VIDEO = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpegts,mpeg,flv,asf,ogg,gif"
FORMATS = {"video": _VIDEO, "audio": f"{_VIDEO},wav,w64,mp3,flac,aac,aiff"}


@contextmanager
def open_stream(data: bytes, kind: Literal["audio", "video"]) -> Iterator[tuple["InputContainer", Any]]:
    """Open a file and its first stream of a kind. Errors of PyAV, also those inside the context, become MediaError."""
    name, expected, parts = ("sound", "sound", "samples") if kind == "audio" else ("video", "a video", "frames")
    try:
        import av
    except ImportError as failure:
        raise MediaError(f"reading {expected} needs PyAV, from pip install 'tilerank[vision]': {failure}") from failure
    # No file or URL is opened besides the data.
    options = {"format_whitelist": FORMATS[kind], "protocol_whitelist": "none"}
    try:
        with av.open(io.BytesIO(data), "r", options=options, metadata_errors="ignore") as container:
            streams = container.streams.audio if kind == "audio" else container.streams.video
            found = f"found a file of format {container.format.name}"
            if not streams:
                raise MediaError(f"expected {expected}, {found} without {name}")
            if streams[0].codec_context is None:
                raise MediaError(f"the {name} cannot be decoded: no decoder, {found}")
            yield container, streams[0]
    except (MediaError, MemoryError):
        raise
    except av.EOFError:
        raise MediaError(f"expected {expected} with {parts}, found none") from None
    except av.FFmpegError as failure:
        begin = f"{len(data)} bytes that begin with {data[:12]!r}" if data else "an empty file"
        raise MediaError(f"the {name} cannot be decoded: {failure.strerror}; found {begin}") from failure
    except Exception as failure:
        raise MediaError(f"the {name} is damaged: {failure}") from failure
