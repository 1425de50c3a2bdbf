"""Encodes speech for clients: 24,000 samples a second of 16 bits, little-endian, in the formats of OpenAI's API.

WAV and plain samples need no library; PyAV encodes the others.
"""

import io
import wave
from collections.abc import Mapping
from importlib.util import find_spec
from typing import IO, Any, NamedTuple, cast

from ...protocol.speech_settings import SAMPLE_RATE
from ..http.errors import ApiError

_BIT_RATE = 64000
"""Bits per second of the lossy formats."""
_UNKNOWN = b"\xff" * 4
"""The sizes in the header of a WAV file whose length is not known yet."""


class _Codec(NamedTuple):
    """The arguments with which PyAV writes a format. options: of a file that is sent while it is written."""

    name: str
    container: str
    options: Mapping[str, str]


_CODECS = {
    # The header of an MP3 file would count its frames.
    "mp3": _Codec("libmp3lame", "mp3", {"write_xing": "0"}),
    # Pages of a second, as by default, would delay the beginning.
    "opus": _Codec("libopus", "ogg", {"page_duration": "200000"}),
    "aac": _Codec("aac", "adts", {}),
    "flac": _Codec("flac", "flac", {}),
}
CONTENT_TYPES = {
    "mp3": "audio/mpeg",
    "opus": "audio/ogg",
    "aac": "audio/aac",
    "flac": "audio/flac",
    "wav": "audio/wav",
    "pcm": "audio/pcm",
}


def check_format(form: str, param: str) -> None:
    """Raise ApiError if this server cannot write a format. param: the field that names it."""
    if form not in _CODECS:
        return
    if find_spec("av") is None:
        raise ApiError(
            400, f"{param}: {form} needs PyAV on the server, from pip install 'tilerank[vision]'", param=param
        )
    from av.codec import codecs_available

    if (codec := _CODECS[form].name) not in codecs_available:
        raise ApiError(400, f"{param}: {form} needs the encoder {codec}, which PyAV lacks on the server", param=param)


def encode_sound(form: str, samples: bytes) -> bytes:
    """Return a whole file. Takes long for formats that lose: about 30 ms for a second of MP3."""
    if form in ("pcm", "pcm16"):
        return samples
    if form == "wav":
        return _wav(samples)
    file = io.BytesIO()
    encoder = _SoundEncoder(form, file, {})
    encoder.write(samples)
    encoder.close()
    return file.getvalue()


class SoundStream:
    """Encodes speech piece by piece. `push` and `finish` return the bytes to send, which may be none."""

    def __init__(self, form: str) -> None:
        self._sent = _Sink()
        self._encoder = None
        if form in _CODECS:
            self._encoder = _SoundEncoder(form, cast(IO[bytes], self._sent), _CODECS[form].options)
        elif form == "wav":
            header = bytearray(_wav(b""))
            header[4:8] = header[-4:] = _UNKNOWN
            self._sent.write(bytes(header))

    def push(self, samples: bytes) -> bytes:
        if self._encoder is None:
            self._sent.write(samples)
        else:
            self._encoder.write(samples)
        return self._sent.take()

    def finish(self) -> bytes:
        if self._encoder is not None:
            self._encoder.close()
        return self._sent.take()


class _Sink:
    """A file that cannot seek, so that nothing is changed once it is written."""

    def __init__(self) -> None:
        self._data = bytearray()

    def write(self, data: bytes) -> int:
        self._data += data
        return len(data)

    def take(self) -> bytes:
        """Return what has been written since the last call."""
        data = bytes(self._data)
        self._data.clear()
        return data


class _SoundEncoder:
    """Writes a format with PyAV."""

    def __init__(self, form: str, file: IO[bytes], options: Mapping[str, str]) -> None:
        import av

        codec = _CODECS[form]
        self._container = av.open(file, "w", format=codec.container, options=dict(options))
        self._stream: Any = self._container.add_stream(codec.name, rate=SAMPLE_RATE, layout="mono")
        self._stream.codec_context.bit_rate = _BIT_RATE
        self._stream.codec_context.thread_count = 1

    def write(self, samples: bytes) -> None:
        import numpy as np
        from av import AudioFrame

        if samples:
            frame = AudioFrame.from_ndarray(np.frombuffer(samples, "<i2")[None], format="s16", layout="mono")
            frame.sample_rate = SAMPLE_RATE
            self._container.mux(self._stream.encode(frame))

    def close(self) -> None:
        self._container.mux(self._stream.encode(None))
        self._container.close()


def _wav(samples: bytes) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(SAMPLE_RATE)
        writer.writeframes(samples)
    return file.getvalue()
