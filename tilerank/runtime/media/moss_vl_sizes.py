"""Sizes and frames of MOSS-VL: the arithmetic of its processors, whose results decide the tokens of a prompt."""

import math
from collections.abc import Sequence

from .errors import MediaError
from .qwen_vl_settings import Area, Sampling
from .qwen_vl_sizes import UNKNOWN_FPS, check_ratio, grow, most_picture_tokens, picture_size, shrink

Size = tuple[int, int, int]
"""Frames, height and width of a medium."""


def picture_sizes(pictures: Sequence[Size], token: int, area: Area, budget: int) -> list[tuple[int, int]]:
    """Return height and width of each picture after resizing. They share `budget` pixels in proportion to their own."""
    total = sum(map(math.prod, pictures))
    sizes = []
    for _, height, width in pictures:
        share = int(budget * (height * width / total))
        sizes.append(picture_size(height, width, token, Area(area.least, min(max(share, area.least), area.most))))
    return sizes


def video_sizes(videos: Sequence[Size], token: int, frame: Area, budget: int) -> list[tuple[int, int]]:
    """Return height and width of the frames of each video after resizing. frame: bounds of the pixels of a frame. All
    frames of all videos share `budget` pixels in proportion to their own."""
    total = sum(map(math.prod, videos))
    return [_video_size(video, token, frame, int(budget * math.prod(video) / total)) for video in videos]


def _video_size(video: Size, token: int, frame: Area, budget: int) -> tuple[int, int]:
    count, height, width = video
    if min(height, width) < token:
        raise MediaError(f"expected frames of at least {token} x {token} pixels, found {width} x {height}")
    check_ratio(height, width)
    new_height, new_width = round(height / token) * token, round(width / token) * token
    if new_height * new_width > frame.most:
        new_height, new_width = shrink(height, width, token, math.sqrt(height * width / frame.most))
    volume = count * new_height * new_width
    if volume > budget:
        new_height, new_width = shrink(height, width, token, math.sqrt(count * height * width / budget))
    elif volume < frame.least:
        new_height, new_width = grow(height, width, token, math.sqrt(frame.least / (count * height * width)))
    if new_height * new_width < frame.least:
        new_height, new_width = grow(height, width, token, math.sqrt(frame.least / (height * width)))
    return new_height, new_width


def sample_frames(total: int, fps: float | None, sampling: Sampling) -> list[int]:
    """Return the numbers of the frames that are taken of a video of `total` frames."""
    count = math.ceil(total / (fps or UNKNOWN_FPS) * sampling.fps - 1e-6)
    count = min(max(count, sampling.least), sampling.most, total)
    if count == 1:
        return [0]
    step = (total - 1) / (count - 1)
    return [*(int(i * step) for i in range(count - 1)), total - 1]


def most_video_tokens(token: int, frame: Area, budget: int, sampling: Sampling) -> int:
    """Return an upper bound of the tokens of a video, with a separator after each frame."""
    most = 0
    for frames in range(1, sampling.most + 1):
        area = Area(frame.least, max(min(frame.most, budget // frames), frame.least))
        most = max(most, frames * (most_picture_tokens(token, area) + 1))
    return most
