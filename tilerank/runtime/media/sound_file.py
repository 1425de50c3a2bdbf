"""Decodes sound with PyAV, in a process of launch/serving/media_decoder.py."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from .container import open_stream
from .errors import MediaError
from .sound import MAX_CHANNELS, MAX_RATE, MAX_SECONDS, RATE

if TYPE_CHECKING:
    from av.audio.stream import AudioStream
    from av.container import InputContainer

_STREAMED = (1 << 31) - (1 << 16)
_OGG_HEADER = 27
"""Bytes of a page before the sizes of its segments, whose number is the last one."""
_LOST = 0.5
"""Seconds that a file may lack of what it says it has; encoders pad and cut a little."""


def read_sound(data: bytes) -> bytes:
    """Return float32 samples of one channel, `RATE` a second: the mean of the channels, resampled.

    Raises MediaError for what is not sound, is too long or is cut off where the file says how long it is.
    """
    _check_riff(data)
    _check_ogg(data)
    parts, count = list[bytes](), 0
    with _open(data) as (container, stream):
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


def _check_riff(data: bytes) -> None:
    """Raise MediaError for a WAV file that is shorter than it says, which the demuxer takes as it is.

    Streams, whose length was unknown when their header was written, have the largest size.
    """
    size = int.from_bytes(data[4:8], "little")
    if data[:4] == b"RIFF" and len(data) - 8 < size < _STREAMED:
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
def _open(data: bytes) -> Iterator[tuple["InputContainer", "AudioStream"]]:
    """Open the first stream of sound. Raises MediaError."""
    with open_stream(data, "audio") as (container, stream):
        _check_layout(stream.codec_context.sample_rate or 0, stream.codec_context.channels)
        stream.codec_context.thread_count = 1
        yield container, stream


def _check_layout(rate: int, channels: int) -> None:
    if rate > MAX_RATE or channels > MAX_CHANNELS:
        raise MediaError(
            f"expected sound of at most {MAX_RATE} Hz and {MAX_CHANNELS} channels, found {rate} Hz and "
            f"{channels} channels"
        )
