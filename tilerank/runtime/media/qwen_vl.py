"""The processor of Qwen3-VL and Qwen3.5, dense and MoE: like Qwen3VLProcessor of transformers 5.23."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tilerank.loader.card import read_config_fields
from tilerank.loader.tokenizer import Tokenizer

from ..protocol.prompt import Medium, Place, Prompt
from .decoder import Frames
from .errors import MediaError
from .placeholders import PlaceholderProcessor, name_medium
from .processor import Processor
from .qwen_vl_settings import read_settings
from .qwen_vl_sizes import (
    most_picture_tokens,
    most_video_tokens,
    picture_size,
    sample_frames,
    timestamps,
    video_size,
)


class _Grid(NamedTuple):
    """The tokens from `first` on of medium `medium`: a picture, or a group of frames of a video."""

    medium: int
    first: int
    rows: int
    columns: int


class QwenVLProcessor(PlaceholderProcessor):
    """Reads the settings of a model directory. Raises ConfigError."""

    def __init__(self, model_dir: Path, tokenizer: Tokenizer) -> None:
        super().__init__(model_dir, tokenizer)
        settings = read_settings(model_dir)
        self._preprocessing, self._keeps_markers = settings.preprocessing, settings.keeps_markers
        self._picture, self._volume, self._sampling = settings.picture, settings.video, settings.sampling
        version = "5.23" if self._keeps_markers else "4.57"
        self.convention = f"videos are written into prompts as by transformers {version}"

    def prompt(self, text: str, media: Sequence[Frames]) -> Prompt:
        pieces = self._split(text, media)
        converted, grids = [], list[_Grid]()
        for index, frames in enumerate(media):
            try:
                medium = Medium(frames.kind, frames.data, frames.size, self._grid(frames))
            except MediaError as failure:
                raise MediaError(f"{name_medium(media, index)}: {failure}") from None
            converted.append(medium)
            rows, columns = (side // self._preprocessing.merge for side in medium.grid[1:])
            grids += [_Grid(index, group * rows * columns, rows, columns) for group in range(medium.grid[0])]
            if frames.kind == "video":
                self._write_groups(pieces, 2 * index + 1, frames)
        return _expand(self._encode(pieces, len(grids)), self._kinds, grids, converted)

    def sample(self, total: int, fps: float | None) -> list[int]:
        return sample_frames(total, fps, self._sampling)

    def most_tokens(self, kind: str) -> int:
        if kind == "image":
            return most_picture_tokens(self._preprocessing.token, self._picture)
        return most_video_tokens(self._preprocessing.token, self._preprocessing.temporal, self._volume, self._sampling)

    def _grid(self, frames: Frames) -> tuple[int, int, int]:
        count, height, width = frames.size
        p = self._preprocessing
        if frames.kind == "image":
            new_height, new_width = picture_size(height, width, p.token, self._picture)
            return 1, new_height // p.patch, new_width // p.patch
        if count > self._sampling.most:
            raise MediaError(f"expected at most {self._sampling.most} frames, found {count}")
        new_height, new_width = video_size(count, height, width, p.token, p.temporal, self._volume, self._sampling)
        return -(-count // p.temporal), new_height // p.patch, new_width // p.patch

    def _write_groups(self, pieces: list[str], at: int, video: Frames) -> None:
        """Replace the placeholder of a video by the time and the placeholder of each group of frames."""
        if not self._keeps_markers and pieces[at - 1].endswith(self._start) and pieces[at + 1].startswith(self._end):
            pieces[at - 1] = pieces[at - 1].removesuffix(self._start)
            pieces[at + 1] = pieces[at + 1].removeprefix(self._end)
        group = f"{self._start}{self._tokens['video']}{self._end}"
        times = timestamps(video.indices, video.fps, self._preprocessing.temporal)
        pieces[at] = "".join(f"<{time:.1f} seconds>{group}" for time in times)


def _if_it_sees(model_dir: Path, tokenizer: Tokenizer) -> Processor | None:
    """Return the processor of Qwen3.5; None for a checkpoint of its language model alone."""
    return QwenVLProcessor(model_dir, tokenizer) if read_config_fields(model_dir).has("vision_config") else None


PROCESSORS = {
    "qwen3_vl": QwenVLProcessor,
    "qwen3_vl_moe": QwenVLProcessor,
    "qwen3_5": _if_it_sees,
    "qwen3_5_moe": _if_it_sees,
}


def _expand(ids: list[int], kinds: dict[int, str], grids: list[_Grid], media: list[Medium]) -> Prompt:
    """Repeat each placeholder as its grid has tokens."""
    if not grids:
        return Prompt(ids)
    expanded: list[int] = []
    places = []
    left: Iterator[_Grid] = iter(grids)
    positions: list[list[int]] = [[], [], []]
    position = 0
    for id in ids:
        if id not in kinds:
            expanded.append(id)
            for axis in positions:
                axis.append(position)
            position += 1
            continue
        grid = next(left)
        count = grid.rows * grid.columns
        places.append(Place(len(expanded), count, grid.medium, grid.first))
        expanded += [id] * count
        positions[0] += [position] * count
        positions[1] += [position + row for row in range(grid.rows) for _ in range(grid.columns)]
        positions[2] += list(range(position, position + grid.columns)) * grid.rows
        position += max(grid.rows, grid.columns)
    return Prompt(expanded, media, places, positions)
