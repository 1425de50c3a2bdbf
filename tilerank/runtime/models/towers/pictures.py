"""The base of towers that take pictures alone. All patches of a picture attend to each other.

    x = embed(patches);  blocks;  token = project(a square of patches)

The patches of a token follow each other. An encoding has one level.
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tilerank.kernels import core
from tilerank.parallel.linear import Linear
from tilerank.parallel.parameters import Layer
from tilerank.parallel.sharding import Sharding

from ...media.qwen_vl import Preprocessing
from ...step.model import Encoder
from .tower import ROW_UNIT, ComputedBlock, Grid, RowLayout, cut_rows, pieces
from .vision import cut_patches, patch_places

_PIXEL = 1000.0
"""Operations that take as long as preprocessing a pixel."""


@dataclass(frozen=True)
class PictureConfig:
    """The shape of a tower. width: of the MLPs. patch: pixels of its side. merged: patches of a side of a token.
    out_hidden: columns of a token."""

    hidden: int
    heads: int
    head_dim: int
    width: int
    layers: int
    patch: int
    merged: int
    out_hidden: int


class PictureTower(Encoder):
    """The encoder of a family.

    embedding: of the values of patches. preprocessing: None if the model directory does not say how a picture becomes
    numbers; then nothing can be encoded.
    """

    embedding: Linear
    blocks: Sequence[ComputedBlock]

    def __init__(self, c: PictureConfig, preprocessing: Preprocessing | None, sharding: Sharding) -> None:
        self.config, self._preprocessing, self._sharding = c, preprocessing, sharding

    @abstractmethod
    def layout(self, rows: int, columns: int) -> RowLayout:
        """Return the layout of the patches of a picture. Raises EngineError for a picture that is too large."""

    @abstractmethod
    def embed(self, values: Tensor, row: Tensor, column: Tensor) -> Tensor:
        """Return the embeddings [n, hidden] of patches with these values, rows and columns [n]."""

    @abstractmethod
    def project(self, x: Tensor) -> Tensor:
        """x: [n, patches of a token, hidden] -> [n, out_hidden], of all ranks"""

    @abstractmethod
    def projections(self) -> tuple[Layer, ...]:
        """Return the layers of `project`."""

    @property
    def token_cost(self) -> float:
        """The operations of `project` for a token on all ranks together, by default one product on each."""
        return self._sharding.size * 2.0 * self.config.hidden * self.config.out_hidden

    def shape(self, grid: Grid) -> tuple[int, int, int]:
        return 1, grid[1] * grid[2] // self.config.merged**2, self.config.out_hidden

    def parts(self, grid: Grid) -> Iterator[tuple[Layer, int, int]]:
        rows = grid[1] * grid[2]
        yield self.embedding, rows, 0
        for block in self.blocks:
            yield block, rows, rows**2
        for layer in self.projections():
            yield layer, self.shape(grid)[1], 0

    def encode(self, frames: Tensor, grid: Grid, operations: float) -> Iterator[Tensor | None]:
        out = torch.empty(self.shape(grid), dtype=self._sharding.dtype)
        yield from pieces(self._tasks(frames, grid, out[0], operations), operations)
        yield out

    def _tasks(self, frames: Tensor, grid: Grid, out: Tensor, limit: float) -> Iterator[float]:
        """Write the encoding of a picture to out [tokens, out_hidden]. Tasks as in ComputedBlock."""
        c = self.config
        _, rows, columns = grid
        layout = self.layout(rows, columns)
        x = core.empty((rows * columns, c.hidden), self._sharding.dtype)
        yield from self._embed(x, frames, grid, limit)
        for block in self.blocks:
            yield from block.tasks(x, layout, limit)
        tokens = x.view(-1, c.merged**2, c.hidden)
        for part, cost in cut_rows(len(tokens), self.token_cost, limit, ROW_UNIT):
            yield cost
            out[part] = self.project(tokens[part])

    def _embed(self, x: Tensor, frames: Tensor, grid: Grid, limit: float) -> Iterator[float]:
        """Write the embeddings of all patches to x; each task is some rows of them. Every rank computes all."""
        c = self.config
        _, rows, columns = grid
        row_cost = self._sharding.size * columns * c.patch**2 * (2 * 3 * c.hidden + _PIXEL)
        for band, cost in cut_rows(rows, row_cost, limit, c.merged):
            yield cost
            values = cut_patches(frames, grid, band, self._preprocessing, self._sharding.dtype)
            row, column = patch_places(band, columns, c.merged)
            x[band.start * columns : band.stop * columns] = self.embed(values, row, column)
