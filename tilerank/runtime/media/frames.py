"""What the decoder returns, and how much it accepts."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Frames:
    """A decoded picture, or the sampled frames of a video.

    kind: "image" or "video". size: (n, height, width). data: uint8 RGB, row by row. indices: the number of each frame
    in its video. fps: of the video, in frames per second; None if unknown.
    """

    kind: str
    size: tuple[int, int, int]
    data: bytes
    indices: list[int]
    fps: float | None


@dataclass(frozen=True)
class Limits:
    """What one picture or video may take.

    bytes: of a file. pixels: of a picture or frame. frame_bytes: of all decoded frames. seconds: to decode.
    """

    bytes: int = 256 << 20
    pixels: int = 64 << 20
    frame_bytes: int = 1 << 30
    seconds: float = 60.0
