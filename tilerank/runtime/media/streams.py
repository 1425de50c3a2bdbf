"""Decodes sound and videos with PyAV, in a process of launch/serving/media_decoder.py."""

import io
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from ..protocol.errors import MediaError

if TYPE_CHECKING:
    from av.audio.stream import AudioStream
    from av.container import InputContainer
    from av.video.stream import VideoStream

RATE = 16000
"""Samples of a second, as models take sound: one channel of float32."""
MAX_SECONDS = 3600
"""The longest clip that is accepted."""
_MAX_RATE = 192000
"""The highest sample rate of a file that is accepted, in Hz."""
_MAX_CHANNELS = 8
"""The most channels of a file that are accepted."""
_LARGEST_RIFF = 1 << 28
"""Bytes. A WAV file whose header says that it is larger was streamed: its size was unknown when the header was written.
Programs then write all bits, the largest signed size, that less some pages, or other sizes of this kind."""
_OGG_HEADER = 27
"""Bytes of a page before the sizes of its segments, whose number is the last one."""
_LOST = 0.5
"""Seconds that a file may lack of what it says it has; encoders pad and cut a little."""
_THREADS = 2
# Demuxers, without those of playlists, which name other files and URLs.
_VIDEO = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpegts,mpeg,flv,asf,ogg,gif"
FORMATS = {"video": _VIDEO, "audio": f"{_VIDEO},wav,w64,mp3,flac,aac,aiff"}


def read_sound(data: bytes) -> bytes:
    """Return float32 samples of one channel, `RATE` a second: the mean of the channels, resampled.

    Raises MediaError for what is not sound, is too long or is cut off where the file says how long it is.
    """
    data = _with_size(data)
    _check_riff(data)
    _check_ogg(data)
    parts, count = list[bytes](), 0
    with _open_sound(data) as (container, stream):
        expected = _duration(stream)
        for samples in _resampled(container, stream):
            parts.append(samples.tobytes())
            count += len(samples)
            if count > MAX_SECONDS * RATE:
                raise MediaError(f"expected sound of at most {MAX_SECONDS} s, found more")
    if not count:
        raise MediaError("expected sound with samples, found none")
    if count / RATE < expected - _LOST:
        raise MediaError(
            f"the sound is damaged or cut off: the file says that it has {expected:.2f} s, found {count / RATE:.2f} s"
        )
    return b"".join(parts)


def _with_size(data: bytes) -> bytes:
    """Return a WAV file with its true sizes if its header has placeholders in their place, else `data`.

    A size of the samples is one if it is beyond any file, or 0 although the file goes on where the header says that it
    ends. The samples then go on to the end of the file.
    """
    if data[:4] != b"RIFF" or data[8:12] != b"WAVE":
        return data
    whole, start = _size(data, 4), 12
    while start + 8 <= len(data) and data[start : start + 4] != b"data":
        start += 8 + _size(data, start + 4) + _size(data, start + 4) % 2  # chunks have even sizes
    begin = start + 8
    if begin > len(data):
        return data
    samples, left = _size(data, start + 4), len(data) - begin
    is_open = whole > _LARGEST_RIFF or whole + 8 <= begin
    if samples <= _LARGEST_RIFF and not (is_open and (samples == 0 or samples > left)):
        return data if whole <= _LARGEST_RIFF else _resized(data, 4, len(data) - 8)
    return _resized(_resized(data, start + 4, left), 4, len(data) - 8)


def _size(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 4], "little")


def _resized(data: bytes, at: int, size: int) -> bytes:
    return data[:at] + size.to_bytes(4, "little") + data[at + 4 :]


def _check_riff(data: bytes) -> None:
    """Raise MediaError for a WAV file that is shorter than it says, which the demuxer takes as it is."""
    size = _size(data, 4)
    if data[:4] == b"RIFF" and len(data) - 8 < size <= _LARGEST_RIFF:
        raise MediaError(f"the sound is cut off: the file says that it has {size + 8} bytes, found {len(data)}")


def _check_ogg(data: bytes) -> None:
    """Raise MediaError for an Ogg file whose last page is not whole (RFC 3533), which the demuxer leaves out."""
    if data[:4] != b"OggS":
        return
    start = data.rfind(b"OggS")
    header = data[start : start + _OGG_HEADER]
    segments = header[-1] if len(header) == _OGG_HEADER else 0
    sizes = data[start + len(header) :][:segments]
    size = _OGG_HEADER + segments + sum(sizes)
    if len(data) - start < size:
        raise MediaError(f"the sound is cut off: its last page has at least {size} bytes, found {len(data) - start}")


def _duration(stream: "AudioStream") -> float:
    """Return the seconds of a stream as the file gives them, 0 if it does not. Raises MediaError if they are many."""
    seconds = float(stream.duration * stream.time_base) if stream.duration and stream.time_base else 0.0
    if seconds > MAX_SECONDS:
        raise MediaError(f"expected sound of at most {MAX_SECONDS} s, found {seconds:.0f} s")
    return seconds


def _resampled(container: "InputContainer", stream: "AudioStream") -> Iterator[Any]:
    """Yield arrays of float32 samples, the mean of the channels."""
    from av.audio.resampler import AudioResampler

    resampler = AudioResampler(format="fltp", rate=RATE)
    for frame in container.decode(stream):
        _check_layout(frame.sample_rate, len(frame.layout.channels))
        for ready in resampler.resample(frame):
            yield ready.to_ndarray().mean(0)
    for ready in resampler.resample(None):
        yield ready.to_ndarray().mean(0)


@contextmanager
def _open_sound(data: bytes) -> Iterator[tuple["InputContainer", "AudioStream"]]:
    """Open the first stream of sound. Raises MediaError."""
    with _open_stream(data, "audio") as (container, stream):
        _check_layout(stream.codec_context.sample_rate or 0, stream.codec_context.channels)
        stream.codec_context.thread_count = 1
        yield container, stream


def _check_layout(rate: int, channels: int) -> None:
    if rate > _MAX_RATE or channels > _MAX_CHANNELS:
        raise MediaError(
            f"expected sound of at most {_MAX_RATE} Hz and {_MAX_CHANNELS} channels, found {rate} Hz and "
            f"{channels} channels"
        )


class ShorterVideo(Exception):
    """The video has `total` frames, fewer than its container says."""

    def __init__(self, total: int) -> None:
        super().__init__(total)
        self.total = total


def describe_video(data: bytes, pixels: int) -> tuple[int, float | None]:
    """Return the number of frames, at least 1, and frames per second, None if unknown. Raises MediaError."""
    with _open_video(data, pixels) as (container, stream):
        total = stream.frames or sum(1 for packet in container.demux(stream) if packet.size)
        rate = float(stream.average_rate) if stream.average_rate else 0.0
    if total < 1:
        raise MediaError("expected a video with frames, found none")
    return total, rate or None


def read_frames(data: bytes, indices: list[int], pixels: int, frame_bytes: int) -> Iterator[tuple[int, int, bytes]]:
    """Yield height, width and RGB rows of the frames `indices`, which ascend and may repeat.

    Raises ShorterVideo if there are fewer frames, MediaError if they take more than `frame_bytes` or are damaged.
    """
    wanted = Counter(indices)
    total = 0
    with _open_video(data, pixels) as (container, stream):
        size = (stream.height, stream.width)
        if (needed := len(indices) * size[0] * size[1] * 3) > frame_bytes:
            raise MediaError(
                f"expected a video whose frames take at most {frame_bytes} bytes, found {len(indices)} frames of "
                f"{size[1]} x {size[0]} pixels, which take {needed}"
            )
        for frame in container.decode(stream):
            if (frame.height, frame.width) != size:
                raise MediaError(
                    f"frame {total} of the video: expected {size[1]} x {size[0]} pixels, found {frame.width} x "
                    f"{frame.height}"
                )
            if total in wanted:
                rows = frame.to_ndarray(format="rgb24").tobytes()
                for _ in range(wanted[total]):
                    yield size[0], size[1], rows
            total += 1
            if total > indices[-1]:
                return
    if total < 1:
        raise MediaError("expected a video with frames, found none")
    raise ShorterVideo(total)


@contextmanager
def _open_video(data: bytes, pixels: int) -> Iterator[tuple["InputContainer", "VideoStream"]]:
    """Open the first video stream. Raises MediaError."""
    with _open_stream(data, "video") as (container, stream):
        if not 1 <= stream.width * stream.height <= pixels:
            raise MediaError(
                f"expected a video of 1 to {pixels} pixels a frame, found {stream.width} x {stream.height}"
            )
        stream.codec_context.options = {"max_pixels": str(pixels)}
        stream.codec_context.thread_count = _THREADS
        yield container, stream


@contextmanager
def _open_stream(data: bytes, kind: Literal["audio", "video"]) -> Iterator[tuple["InputContainer", Any]]:
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
