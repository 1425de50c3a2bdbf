"""Sizes and frames of MOSS-VL: the arithmetic of its processors, whose results decide the tokens of a prompt."""

import math
from collections.abc import Sequence

from .errors import MediaError
from .qwen_vl_settings import Area, Sampling
from .qwen_vl_sizes import UNKNOWN_FPS, check_ratio, grow, most_picture_tokens, shrink


def picture_share(pixels: int, total: int, area: Area, budget: int) -> Area:
    """Return the bounds of a picture after resizing. All pictures of a prompt share `budget` pixels in proportion to
    their own. pixels, total: those of the picture and of all pictures. area: the bounds of any picture."""
    return Area(area.least, min(max(int(budget * (pixels / total)), area.least), area.most))


def video_size(video: tuple[int, int, int], token: int, frame: Area, budget: int) -> tuple[int, int]:
    """Return height and width of the frames of a video after resizing.

    video: the number of frames, their height and their width. frame: bounds of the pixels of a frame. budget: the most
    of all frames together.
    """
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


def share_frames(durations: Sequence[float], most: int) -> list[int]:
    """Return how many frames each of several videos may have, `most` together but at least one each.

    Beside the one, videos get frames in proportion to their durations in seconds; those left over by rounding down go
    to the largest fractions.
    """
    rest = most - len(durations)
    if rest <= 0:
        return [1] * len(durations)
    total = sum(durations)
    shares = [rest * (duration / total) for duration in durations]
    counts = [math.floor(share) for share in shares]
    by_fraction = sorted(range(len(shares)), key=lambda i: counts[i] - shares[i])
    for i in by_fraction[: rest - sum(counts)]:
        counts[i] += 1
    return [1 + count for count in counts]


def most_video_tokens(token: int, frame: Area, budget: int, sampling: Sampling) -> int:
    """Return an upper bound of the tokens of a video, with a separator after each frame."""
    most = 0
    for frames in range(1, sampling.most + 1):
        area = Area(frame.least, max(min(frame.most, budget // frames), frame.least))
        most = max(most, frames * (most_picture_tokens(token, area) + 1))
    return most
