"""Decodes videos with PyAV, in a process of launch/serving/media_decoder.py."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from .container import open_stream
from .errors import MediaError

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.video.stream import VideoStream

_THREADS = 2


class ShorterVideo(Exception):
    """The video has `total` frames, fewer than its container says."""

    def __init__(self, total: int) -> None:
        super().__init__(total)
        self.total = total


def describe_video(data: bytes, pixels: int) -> tuple[int, float | None]:
    """Return the number of frames, at least 1, and frames per second, None if unknown. Raises MediaError."""
    with _open(data, pixels) as (container, stream):
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
    with _open(data, pixels) as (container, stream):
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
def _open(data: bytes, pixels: int) -> Iterator[tuple["InputContainer", "VideoStream"]]:
    """Open the first video stream. Raises MediaError."""
    with open_stream(data, "video") as (container, stream):
        if not 1 <= stream.width * stream.height <= pixels:
            raise MediaError(
                f"expected a video of 1 to {pixels} pixels a frame, found {stream.width} x {stream.height}"
            )
        stream.codec_context.options = {"max_pixels": str(pixels)}
        stream.codec_context.thread_count = _THREADS
        yield container, stream
