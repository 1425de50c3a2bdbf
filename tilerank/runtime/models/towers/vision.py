"""A vision transformer over the patches of pictures and videos, with merged patches as tokens, cut over the ranks.

    x = embed(patches) + positions;  the blocks of tower.py;  merger(x)

Blocks and mergers are those of Qwen3-VL (arXiv 2511.21631). A patch attends to the patches of its own frame alone.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from tilerank.kernels import core, ops
from tilerank.kernels.pictures import patches
from tilerank.kernels.tower_ops import interpolate_rows, rotary_float_
from tilerank.kernels.weight_formats import Float
from tilerank.parallel.linear import Linear
from tilerank.parallel.norm import LayerNorm
from tilerank.parallel.parameters import Layer, WholeParameter
from tilerank.parallel.sharding import Sharding

from ...media.qwen_vl import Preprocessing
from ...protocol.errors import EngineError
from ...step.model import Encoder
from .tower import ROW_UNIT, BlockNames, BlockShape, Grid, PackedLayout, TowerBlock, TowerMLP, cut_rows, pieces
from .vision_config import VisionConfig

EPS = 1e-6
_THETA = 10000.0
"""The base of the frequencies that rotate the heads of patches."""
_PIXEL = 1000.0
"""Operations that take as long as preprocessing a pixel of a frame, before and after resizing."""
_TABLES = 1e5
"""Operations that take as long as computing the angles and positions of a patch."""
_BLOCK = BlockNames(
    norms=("norm1", "norm2"), attention="attn", qkv=("qkv",), out="proj", mlp=("mlp.linear_fc1", "mlp.linear_fc2")
)

AfterBlock = Callable[[int, Tensor], Iterator[float]]


class PatchLayout(PackedLayout):
    """The patches of a medium, frame by frame. angles: [t, 2, head_dim / 2], as in rotary_float_."""

    def __init__(self, frames: int, of_frame: int, head_dim: int) -> None:
        """of_frame: the number of patches of a frame."""
        total = frames * of_frame
        super().__init__(torch.arange(0, total + of_frame, of_frame, dtype=torch.int32), of_frame)
        self.angles = torch.empty((total, 2, head_dim // 2))

    def rotate(self, q: Tensor, k: Tensor, rows: slice) -> None:
        rotary_float_(q, k, self.angles[rows])


class PatchEmbedding(Linear):
    """A convolution whose stride is its kernel: patches[t, 3 * frames * patch * patch] -> [t, hidden]; not cut."""

    def __init__(self, name: str, config: VisionConfig, sharding: Sharding) -> None:
        shape = (config.hidden_size, 3, config.temporal_patch_size, config.patch_size, config.patch_size)
        super().__init__(shape[0], prod(shape[1:]), Float(sharding.dtype), sharding.dtype)
        self.weight.fill(f"{name}.weight", shape, *(slice(0, size) for size in shape))
        if self.bias is not None:
            self.bias.fill(f"{name}.bias", shape[:1], slice(0, shape[0]))

    def __call__(self, x: Tensor) -> Tensor:
        return self.project(x)


@dataclass(frozen=True)
class MergerNames:
    """Names in a checkpoint: of the mergers of DeepStack together, and of the parts of a merger."""

    deepstack: str = "deepstack_merger_list"
    norm: str = "norm"
    projections: tuple[str, str] = ("linear_fc1", "linear_fc2")


_MERGERS = MergerNames()


class Merger(Layer):
    """Makes one token of a block of patches, the same bits on every rank.

    joins_first: the norm is over the patches of a block together, instead of each alone. names: of its parts.
    """

    def __init__(
        self, name: str, config: VisionConfig, sharding: Sharding, *, joins_first: bool, names: MergerNames
    ) -> None:
        self._joined = joined = config.hidden_size * config.merge_size**2
        self.norm = LayerNorm(f"{name}.{names.norm}", joined if joins_first else config.hidden_size, EPS, sharding)
        sizes = (joined, joined, config.out_hidden_size)
        up, down = (f"{name}.{projection}" for projection in names.projections)
        self.mlp = TowerMLP((up, down), sizes, "gelu", "vision merger width", sharding)
        self._cost = 2 * joined * (joined + config.out_hidden_size)
        self._joins_first = joins_first
        self._sharding = sharding

    def tasks(self, x: Tensor, out: Tensor, limit: float) -> Iterator[float]:
        """Write the tokens of x [t, hidden] to out [t / merge^2, out]. Tasks as in TowerBlock."""
        blocks = x.view(-1, self._joined)
        for rows, cost in cut_rows(out.shape[0], self._cost, limit, ROW_UNIT):
            yield cost
            own = blocks[rows]
            normed = self.norm(own if self._joins_first else own.view(-1, x.shape[1])).view(own.shape)
            out[rows] = self._sharding.sum(self.mlp(normed))


class VisionTransformer(Layer):
    """The embedding of patches and the blocks of Qwen3-VL's encoder, under their names in the checkpoint.

    preprocessing: None if the model directory does not say how frames become numbers; then nothing can be encoded.
    """

    def __init__(
        self, name: str, config: VisionConfig, preprocessing: Preprocessing | None, sharding: Sharding
    ) -> None:
        hidden, heads, width = config.hidden_size, (config.num_heads, config.head_dim), config.intermediate_size
        shape = BlockShape(hidden, *heads, width, EPS, "gelu_tanh", bias=True, kind="vision")
        self.config = config
        self._preprocessing = preprocessing
        self.embedding = PatchEmbedding(f"{name}.patch_embed.proj", config, sharding)
        self.positions = WholeParameter(f"{name}.pos_embed.weight", (config.position_side**2, hidden), sharding.dtype)
        self.blocks = [TowerBlock(f"{name}.blocks.{i}", shape, _BLOCK, sharding) for i in range(config.depth)]
        self._dtype, self._ranks = sharding.dtype, sharding.size

    def parts(self, grid: Grid) -> Iterator[tuple[Layer, int, int]]:
        """Yield the layers below it, as in Encoder."""
        patches, of_frame = prod(grid), grid[1] * grid[2]
        yield self.embedding, patches, 0
        for block in self.blocks:
            yield block, patches, patches * of_frame

    def tasks(self, frames: Tensor, grid: Grid, limit: float, after: AfterBlock) -> Iterator[float]:
        """Compute the rows x [t, hidden] of all patches, block by block. Tasks as in TowerBlock.

        after: called with the number of every block and x, which later blocks overwrite; returns further tasks.
        """
        t, rows, columns = grid
        of_frame = rows * columns
        layout = PatchLayout(t, of_frame, self.config.head_dim)
        x = core.empty((t * of_frame, self.config.hidden_size), self._dtype)
        yield from self._embed(x, layout.angles, frames, grid, limit)
        for i, block in enumerate(self.blocks):
            yield from block.tasks(x, layout, limit)
            yield from after(i, x)

    def _embed(self, x: Tensor, angles: Tensor, frames: Tensor, grid: Grid, limit: float) -> Iterator[float]:
        """Write the embeddings of all patches to x [t, hidden], and their angles as in PatchLayout. Tasks as in
        TowerBlock; each is some rows of blocks of a frame."""
        t, rows, columns = grid
        c = self.config
        of_patch = 3 * c.temporal_patch_size * c.patch_size**2
        pixels = c.temporal_patch_size * frames.shape[1] * frames.shape[2] / rows + columns * of_patch / 3
        # Every rank computes all of it.
        row_cost = self._ranks * (columns * (2 * of_patch * c.hidden_size + _TABLES) + _PIXEL * pixels)
        table = angle_table(max(rows, columns), c.head_dim)
        for frame in range(t):
            own = frames[frame * c.temporal_patch_size : (frame + 1) * c.temporal_patch_size]
            for band, cost in cut_rows(rows, row_cost, limit, c.merge_size):
                yield cost
                values = cut_patches(own, (1, rows, columns), band, self._preprocessing, self._dtype)
                embedded = self.embedding(values)
                row, column = patch_places(band, columns, c.merge_size)
                indices, weights = bilinear_taps(row, column, rows, columns, c.position_side)
                first = (frame * rows + band.start) * columns
                taken = slice(first, first + len(row))
                x[taken] = ops.add(embedded, interpolate_rows(self.positions.data, indices, weights))
                angles[taken] = torch.cat([table[row], table[column]], 2)


class VisionTower(Encoder):
    """The encoder of Qwen3-VL, under its names in the checkpoint.

    Level 0 of an encoding is merged from the last block; DeepStack adds a level from each block of `config.deepstack`.
    preprocessing: as in VisionTransformer.
    """

    def __init__(
        self,
        name: str,
        config: VisionConfig,
        preprocessing: Preprocessing | None,
        sharding: Sharding,
        names: MergerNames = _MERGERS,
    ) -> None:
        self.config = config
        self.transformer = VisionTransformer(name, config, preprocessing, sharding)
        self.merger = Merger(f"{name}.merger", config, sharding, joins_first=False, names=names)
        self.deepstack = [
            Merger(f"{name}.{names.deepstack}.{i}", config, sharding, joins_first=True, names=names)
            for i in range(len(config.deepstack))
        ]
        self._dtype = sharding.dtype

    def shape(self, grid: Grid) -> tuple[int, int, int]:
        return 1 + len(self.deepstack), prod(grid) // self.config.merge_size**2, self.config.out_hidden_size

    def parts(self, grid: Grid) -> Iterator[tuple[Layer, int, int]]:
        yield from self.transformer.parts(grid)
        for merger in (self.merger, *self.deepstack):
            yield merger, self.shape(grid)[1], 0

    def encode(self, frames: Tensor, grid: Grid, operations: float) -> Iterator[Tensor | None]:
        levels = torch.empty(self.shape(grid), dtype=self._dtype)

        def merge(block: int, x: Tensor) -> Iterator[float]:
            if block in self.config.deepstack:
                level = self.config.deepstack.index(block)
                yield from self.deepstack[level].tasks(x, levels[1 + level], operations)
            if block == self.config.depth - 1:
                yield from self.merger.tasks(x, levels[0], operations)

        yield from pieces(self.transformer.tasks(frames, grid, operations, merge), operations)
        yield levels


def cut_patches(
    frames: Tensor, grid: Grid, band: slice, preprocessing: Preprocessing | None, dtype: torch.dtype
) -> Tensor:
    """Return the values [n, of a patch] of the patches in the rows `band` of a frame, block by block.

    Raises EngineError without the settings of a model directory.
    """
    if (p := preprocessing) is None:
        raise EngineError("encoding: expected a preprocessor_config.json in the model directory, found none")
    return patches(
        frames,
        grid,
        mean=p.mean,
        std=p.std,
        resample=p.resample,
        dtype=dtype,
        patch=p.patch,
        merge=p.merge,
        temporal=p.temporal,
        band=band,
    )


def patch_places(rows: slice, columns: int, merge: int) -> tuple[Tensor, Tensor]:
    """Return row and column [n] int64 of the patches in some rows of a frame, in their order, block by block."""
    first, end = rows.start, rows.stop
    blocks = ((end - first) // merge, merge, columns // merge, merge)
    places = torch.meshgrid(torch.arange(first, end), torch.arange(columns), indexing="ij")
    row, column = (place.reshape(blocks).transpose(1, 2).flatten() for place in places)
    return row, column


def angle_table(places: int, head_dim: int, theta: float = _THETA) -> Tensor:
    """Return [places, 2, head_dim / 4] float32, cosines and sines of rows or columns: half of the frequencies of a head
    follow the row of a patch, half its column."""
    half = head_dim // 2
    frequencies = 1.0 / theta ** (torch.arange(0, half, 2, dtype=torch.float32) / half)
    angles = torch.outer(torch.arange(places).float(), frequencies)
    return torch.stack([angles.cos(), angles.sin()], 1)


def bilinear_taps(row: Tensor, column: Tensor, rows: int, columns: int, side: int) -> tuple[Tensor, Tensor]:
    """Return rows [n, 4] int64 of a table of side x side positions and their weights [n, 4] float32.

    They resample the table bilinearly to rows x columns patches, whose corners are those of the table.
    """
    indices, weights = [], []
    for place, size in ((row, rows), (column, columns)):
        source = place.float() * (side - 1) / max(size - 1, 1)
        low = source.floor()
        indices.append(torch.stack([low, low + 1], 1).long().clamp(max=side - 1))
        upper = source - low
        weights.append(torch.stack([1 - upper, upper], 1))
    index = indices[0][:, :, None] * side + indices[1][:, None, :]
    weight = weights[0][:, :, None] * weights[1][:, None, :]
    return index.flatten(1), weight.flatten(1)
