"""Sizes and frames of Qwen3-VL: the arithmetic of transformers 5.23, whose results decide the tokens of a prompt."""

import math

from .errors import MediaError
from .qwen_vl_settings import Area, Sampling

MAX_RATIO = 200
UNKNOWN_FPS = 24.0


def picture_size(height: int, width: int, token: int, area: Area) -> tuple[int, int]:
    """Return height and width after resizing: multiples of `token`, the side of a token in pixels.

    smart_resize of image_processing_qwen2_vl.py. `round` rounds halves to even, there too.
    """
    check_ratio(height, width)
    new_height, new_width = round(height / token) * token, round(width / token) * token
    if new_height * new_width > area.most:
        return shrink(height, width, token, math.sqrt((height * width) / area.most))
    if new_height * new_width < area.least:
        return grow(height, width, token, math.sqrt(area.least / (height * width)))
    return new_height, new_width


def video_size(
    frames: int, height: int, width: int, token: int, temporal: int, area: Area, sampling: Sampling
) -> tuple[int, int]:
    """Return height and width of the frames after resizing: smart_resize of video_processing_qwen3_vl.py."""
    if frames < temporal:
        raise MediaError(f"expected a video of at least {temporal} frames, found {frames}")
    most = area.most
    if sampling.frame_tokens is not None:
        cap = min(sampling.frame_tokens * token * token, area.most // frames)
        most = max(cap, int(area.least * 1.05)) * frames
    if height < token or width < token:
        scale = max(token / height, token / width)
        height, width = int(height * scale), int(width * scale)
    check_ratio(height, width)
    new_height, new_width = round(height / token) * token, round(width / token) * token
    volume = round(frames / temporal) * temporal * new_height * new_width
    if volume > most:
        return shrink(height, width, token, math.sqrt((frames * height * width) / most))
    if volume < area.least:
        return grow(height, width, token, math.sqrt(area.least / (frames * height * width)))
    return new_height, new_width


def sample_frames(total: int, fps: float | None, sampling: Sampling) -> list[int]:
    """Return the numbers of the frames that are taken of a video of `total` frames."""
    count = int(total / (fps or UNKNOWN_FPS) * sampling.fps)
    count = min(max(count, sampling.least), sampling.most, total)
    if count == 1:
        return [0]
    step = (total - 1) / (count - 1)
    return [*(round(i * step) for i in range(count - 1)), total - 1]


def timestamps(indices: list[int], fps: float | None, temporal: int) -> list[float]:
    """Return the time of each group of `temporal` frames in seconds: the mean of its first and last frame."""
    padded = [*indices, *[indices[-1]] * (-len(indices) % temporal)]
    times = [index / (fps or UNKNOWN_FPS) for index in padded]
    return [(times[i] + times[i + temporal - 1]) / 2 for i in range(0, len(times), temporal)]


def most_picture_tokens(token: int, area: Area) -> int:
    """Return an upper bound of the tokens of a picture, whatever its size."""
    # A side of a very long picture is not shrunk below one token; growing rounds both sides up.
    longest = token * math.sqrt(MAX_RATIO * area.most)
    grown = area.least + token * (MAX_RATIO + 1) * math.sqrt(area.least / MAX_RATIO) + token * token
    return int(max(area.most, longest, grown)) // (token * token)


def most_video_tokens(token: int, temporal: int, area: Area, sampling: Sampling) -> int:
    """Return an upper bound of the tokens of a video, whatever its size and number of frames."""
    most = 0
    for frames in range(temporal, sampling.most + 1):
        groups = -(-frames // temporal)
        # The volume is that of frames rounded to even.
        volume = Area(-(-area.least // frames), area.most // max(round(frames / temporal) * temporal, 1))
        most = max(most, groups * most_picture_tokens(token, volume))
    return most


def check_ratio(height: int, width: int) -> None:
    if max(height, width) / min(height, width) > MAX_RATIO:
        raise MediaError(f"expected sides of a ratio up to {MAX_RATIO}, found {width} x {height} pixels")


def shrink(height: int, width: int, token: int, by: float) -> tuple[int, int]:
    return (
        max(token, math.floor(height / by / token) * token),
        max(token, math.floor(width / by / token) * token),
    )


def grow(height: int, width: int, token: int, by: float) -> tuple[int, int]:
    return math.ceil(height * by / token) * token, math.ceil(width * by / token) * token
