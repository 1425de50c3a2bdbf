"""The processor of MOSS-VL (arXiv 2608.15045): like the remote code of its checkpoints.

A picture or a frame of a video takes one token of the prompt. Its encoding is not inserted there: this token and those
after it see it by cross-attention, together with the pictures and frames before it.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from tilerank.loader.tokenizer import Tokenizer

from ..protocol.prompt import Medium, Prompt, Segment, Sight
from .decoder import Frames, Sampler
from .errors import MediaError
from .moss_vl_settings import read_settings
from .moss_vl_sizes import most_video_tokens, picture_share, sample_frames, share_frames, video_size
from .placeholders import PlaceholderProcessor, name_medium
from .qwen_vl_sizes import UNKNOWN_FPS, most_picture_tokens, picture_size

_WRITTEN = {"image": "<|image|>", "video": "<|video|>"}
"""What chat templates write for a medium; the token of the vocabulary is another one."""


class MossVLProcessor(PlaceholderProcessor):
    """Reads the settings of a model directory. Raises ConfigError."""

    shares_frames = True

    def __init__(self, model_dir: Path, tokenizer: Tokenizer) -> None:
        super().__init__(model_dir, tokenizer)
        self._settings = read_settings(model_dir)
        self.placeholders = (*_WRITTEN.values(), *self._tokens.values())

    def prompt(self, text: str, media: Sequence[Frames]) -> Prompt:
        for kind, written in _WRITTEN.items():
            text = text.replace(written, self._tokens[kind])
        pieces = self._split(text, media)
        converted = self._media(media)
        for index, frames in enumerate(media):
            if frames.kind == "video":
                pieces[2 * index + 1] = self._write_frames(frames)
        ids = self._encode(pieces, sum(medium.grid[0] for medium in converted))
        return _with_source(ids, self._kinds, converted, self._settings.preprocessing.merge)

    def sample(self, total: int, fps: float | None) -> list[int]:
        return sample_frames(total, fps, self._settings.sampling)

    def sample_together(self, videos: Sequence[tuple[int, float | None]]) -> list[Sampler]:
        sampling = self._settings.sampling
        shares = share_frames([total / (fps or UNKNOWN_FPS) for total, fps in videos], self._settings.frames)
        return [partial(sample_frames, sampling=replace(sampling, most=min(sampling.most, share))) for share in shares]

    def most_tokens(self, kind: str) -> int:
        s = self._settings
        if kind == "image":
            return most_picture_tokens(s.preprocessing.token, s.picture) + 1
        return most_video_tokens(s.preprocessing.token, s.frame, s.volume, s.sampling)

    def _media(self, media: Sequence[Frames]) -> list[Medium]:
        patch = self._settings.preprocessing.patch
        pixels = [math.prod(frames.size) for frames in media]
        converted = []
        for index, frames in enumerate(media):
            total = sum(own for own, other in zip(pixels, media, strict=True) if other.kind == frames.kind)
            try:
                height, width = self._size(frames, pixels[index], total)
            except MediaError as failure:
                raise MediaError(f"{name_medium(media, index)}: {failure}") from None
            grid = (frames.size[0], height // patch, width // patch)
            converted.append(Medium(frames.kind, frames.data, frames.size, grid))
        return converted

    def _size(self, frames: Frames, pixels: int, total: int) -> tuple[int, int]:
        """Return height and width after resizing. pixels, total: of the medium, and of all media of its kind."""
        s = self._settings
        count, height, width = frames.size
        if frames.kind == "image":
            area = picture_share(pixels, total, s.picture, s.pictures)
            return picture_size(height, width, s.preprocessing.token, area)
        if count > s.sampling.most:
            raise MediaError(f"expected at most {s.sampling.most} frames, found {count}")
        return video_size(frames.size, s.preprocessing.token, s.frame, int(s.volume * pixels / total))

    def _write_frames(self, video: Frames) -> str:
        """Return the time and the placeholder of each frame."""
        times = [index / (video.fps or UNKNOWN_FPS) for index in video.indices]
        frames = (f"<|time_start|>{time:.1f} seconds<|time_end|>{self._tokens['image']}" for time in times)
        return f"{self._start}{''.join(frames)}{self._end}"


PROCESSORS = {"moss_vl": MossVLProcessor}


def _with_source(ids: list[int], kinds: dict[int, str], media: list[Medium], merge: int) -> Prompt:
    """Return the prompt with positions, and with all frames as its source.

    A frame whose placeholder would have position t has its tokens at (t, t + row, t + column). The separator after
    them and the placeholder are at t + max(rows, columns) on all axes.
    """
    if not media:
        return Prompt(ids)
    grids = iter([(side // merge for side in medium.grid[1:]) for medium in media for _ in range(medium.grid[0])])
    positions: list[int] = []
    source_positions: list[list[int]] = [[], [], []]
    sights = []
    position = 0
    for id in ids:
        if id in kinds:
            rows, columns = next(grids)
            end = position + max(rows, columns)
            source_positions[0] += [position] * (rows * columns)
            source_positions[1] += [position + row for row in range(rows) for _ in range(columns)]
            source_positions[2] += list(range(position, position + columns)) * rows
            for axis in source_positions:
                axis.append(end)
            sights.append(Sight(len(positions), 0, len(source_positions[0]), True))
            position = end
        positions.append(position)
        position += 1
    tokens_of = [t * (rows * columns // merge**2 + 1) for t, rows, columns in (medium.grid for medium in media)]
    source = [Segment(index, 0, count) for index, count in enumerate(tokens_of)]
    return Prompt(ids, media, [], [positions] * 3, source, sights, source_positions)
