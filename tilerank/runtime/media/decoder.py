"""The interface of decoders of media. launch/serving/media_decoder.py implements it with processes."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ..protocol.errors import MediaError
from .messages import MediaSource

Sampler = Callable[[int, float | None], list[int]]
"""Total frames and frames per second of a video (None if unknown) -> numbers of the frames to decode, ascending."""


@dataclass(frozen=True)
class DecodedMedium:
    """A decoded picture, the sampled frames of a video, or sound.

    kind: "image", "video" or "audio". size: (n, height, width). data: uint8 RGB, row by row. indices: the number of
    each frame in its video. fps: of the video, in frames per second; None if unknown. Sound has n samples float32 as
    data, and the size (n, 1, 1). sound: samples of the sound of a video that the model hears with it; empty for none.
    """

    kind: str
    size: tuple[int, int, int]
    data: bytes
    indices: list[int]
    fps: float | None
    sound: bytes = b""


@dataclass(frozen=True)
class MediaLimits:
    """The limits of one medium.

    bytes: of a file. pixels: of a picture or frame. frame_bytes: of all decoded frames or samples. seconds: to decode.
    """

    bytes: int = 256 << 20
    pixels: int = 64 << 20
    frame_bytes: int = 512 << 20
    seconds: float = 60.0


class FileDecoder(ABC):
    @abstractmethod
    def decode(self, kind: str, files: Sequence[bytes], listed: bool, sample: Sampler) -> DecodedMedium:
        """Decode one medium; blocks. May be called by any number of threads. Raises MediaError.

        kind: "image", "video" or "audio". files: one file, or if `listed`, the pictures that are the frames of a video,
        all of which are returned. sample: chooses the frames of another video.
        """

    @abstractmethod
    def describe(self, video: bytes) -> tuple[int, float | None]:
        """Return total frames and frames per second of a video, None if unknown. As `decode`."""


def decode_source(decoder: FileDecoder, source: MediaSource, files: Sequence[bytes], sample: Sampler) -> DecodedMedium:
    """Decode the files of a medium, and the sound of a video that the model hears, as FileDecoder.decode."""
    frames = decoder.decode(source.kind, files, source.listed, sample)
    if not source.heard:
        return frames
    try:
        return replace(frames, sound=decoder.decode("audio", files, False, sample).data)
    except MediaError as failure:
        raise MediaError(f"use_audio_in_video: {failure}") from failure
