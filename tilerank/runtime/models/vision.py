"""A vision transformer over the patches of pictures and videos, with merged patches as tokens, cut over the ranks.

    x = embed(patches) + positions;  x += attention(norm(x));  x += mlp(norm(x))  per block;  merger(x)

Blocks and mergers are those of Qwen3-VL (arXiv 2511.21631). A patch attends to the patches of its own frame alone.

An encode is a sequence of tasks: a few rows of one layer each, so that no task takes long, whatever the size of the
picture. The bits of a row do not depend on how the rows are cut.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from tilerank.kernels import core, ops
from tilerank.kernels.attention import store_kv
from tilerank.kernels.heads import join_heads
from tilerank.kernels.kv_pages import KVPages
from tilerank.kernels.linear import Activation
from tilerank.kernels.packed_sequences import PackedSequences
from tilerank.kernels.pictures import patches
from tilerank.kernels.vision import interpolate_rows, rotary_float_
from tilerank.kernels.weight_formats import Float
from tilerank.parallel.linear import ColumnParallelLinear, Linear, QKVParallelLinear, RowParallelLinear
from tilerank.parallel.norm import LayerNorm
from tilerank.parallel.parameters import Layer, PlainParameter
from tilerank.parallel.shard import Cut, HeadCut
from tilerank.parallel.sharding import Sharding

from ..errors import EngineError
from ..media.qwen_vl_settings import Preprocessing
from ..model import Encoder
from .patch_places import angle_table, patch_places, taps
from .vision_config import VisionConfig

EPS = 1e-6
ROW_UNIT = 32
"""Rows of the smallest task. Fewer would leave a tile of attention half empty."""
_PIXEL = 1000.0
"""Operations that take as long as preprocessing a pixel of a frame, before and after resizing."""
_TABLES = 1e5
"""Operations that take as long as computing the angles and positions of a patch."""
_FRESH = 700.0
"""Operations that take as long as the first write to a byte of memory."""

Grid = tuple[int, int, int]
AfterBlock = Callable[[int, Tensor], Iterator[float]]


def cut_rows(rows: int, cost: float, limit: float, unit: int = 1) -> Iterator[tuple[slice, float]]:
    """Cut rows that take `cost` operations each into about equal parts of at most `limit`, or of `unit` rows. Yields
    each part and its operations."""
    units = -(-rows // unit)
    parts = -(-units // max(int(min(limit / cost, units * unit)) // unit, 1))
    step = -(-units // parts) * unit
    for row in range(0, rows, step):
        part = slice(row, min(row + step, rows))
        yield part, cost * (part.stop - part.start)


def pieces(tasks: Iterator[float], operations: float) -> Iterator[None]:
    """Compute tasks that yield their operations before they are computed, and yield between pieces of them, of up to
    `operations` operations or one task."""
    piece = 0.0
    for cost in tasks:
        if piece and piece + cost > operations:
            yield None
            piece = 0.0
        piece += cost


@dataclass(frozen=True)
class PatchLayout:
    """The patches of a medium, as blocks need them.

    angles: [t, 2, head_dim / 2], as in rotary_float_. numbers: [t] int64, 0 to t. frames: the patches of a frame are a
    sequence. of_frame: the number of patches of a frame.
    """

    angles: Tensor
    numbers: Tensor
    frames: PackedSequences
    of_frame: int


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


class VisionAttention(Layer):
    """Attention of every patch to those of its frame, cut by heads."""

    def __init__(self, name: str, config: VisionConfig, sharding: Sharding) -> None:
        hidden, heads, dim = config.hidden_size, config.num_heads, config.head_dim
        self.qkv = QKVParallelLinear(name, hidden, heads, heads, dim, sharding, bias=True, projections=("qkv",))
        self.out = RowParallelLinear(f"{name}.proj", hidden, hidden, sharding, span=self.qkv.q_columns, bias=True)
        self.scale = dim**-0.5
        self._dtype = sharding.dtype

    def pages(self, layout: PatchLayout) -> KVPages:
        """Return uninitialised pages for the keys and values of all patches."""
        return layout.frames.pages(self.qkv.kv_heads, self.qkv.head_dim, self._dtype)

    def project(self, x: Tensor, rows: slice, layout: PatchLayout, pages: KVPages) -> Tensor:
        """Return the queries [n, heads, head_dim] of n rows, and write their keys and values into `pages`.

        x: [n, hidden], the input of these rows.
        """
        q, k, v = self.qkv(x)
        rotary_float_(q, k, layout.angles[rows])
        store_kv(k, v, pages, layout.frames.slots[rows])
        return q

    def attend(self, q: Tensor, first: int, layout: PatchLayout, pages: KVPages) -> Tensor:
        """Return this rank's part of the output [n, hidden] for the queries of n rows from `first` on."""
        return self.out(join_heads(layout.frames.attend(q, first, pages, self.qkv.kv_map, self.scale)))

    def cuts(self) -> Iterator[tuple[str, Cut]]:
        spans = self.qkv.heads.q
        yield "vision heads", Cut(max(span.stop for span in spans), 1, spans)

    def head_cuts(self) -> Iterator[HeadCut]:
        """None: the answer is about the heads of the decoder."""
        yield from ()


class VisionMLP(Layer):
    """fc2(gelu(fc1(x))), cut by its width: x[t, in] -> a part of [t, out].

    dimension: the name of the width. projections: the names of fc1 and fc2 in the checkpoint.
    """

    def __init__(
        self,
        name: str,
        sizes: tuple[int, int, int],
        activation: Activation,
        dimension: str,
        sharding: Sharding,
        *,
        projections: tuple[str, str] = ("linear_fc1", "linear_fc2"),
    ) -> None:
        """sizes: of the input, the width and the output."""
        inputs, width, outputs = sizes
        up, down = (f"{name}.{projection}" for projection in projections)
        self.up = ColumnParallelLinear(up, inputs, width, sharding, bias=True, activation=activation)
        self.down = RowParallelLinear(down, width, outputs, sharding, span=self.up.span, bias=True)
        self._dimension = dimension

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.up(x))

    def cuts(self) -> Iterator[tuple[str, Cut]]:
        yield self._dimension, self.up.cut


class VisionBlock(Layer):
    """Attention and an MLP, each after a norm; the same bits on every rank."""

    def __init__(self, name: str, config: VisionConfig, sharding: Sharding) -> None:
        hidden = config.hidden_size
        self.norm1 = LayerNorm(f"{name}.norm1", hidden, EPS, sharding)
        self.attention = VisionAttention(f"{name}.attn", config, sharding)
        self.norm2 = LayerNorm(f"{name}.norm2", hidden, EPS, sharding)
        sizes = (hidden, config.intermediate_size, hidden)
        self.mlp = VisionMLP(f"{name}.mlp", sizes, "gelu_tanh", "vision MLP width", sharding)
        # The first block touches the memory of the queries, keys and values.
        self._projection_cost = 6 * hidden**2 + _FRESH * 3 * hidden * sharding.dtype.itemsize
        self._rest_cost = 2 * hidden**2 + 4 * hidden * config.intermediate_size
        self._pair_cost = 4 * hidden
        self._sharding = sharding

    def tasks(self, x: Tensor, layout: PatchLayout, limit: float) -> Iterator[float]:
        """Update x [t, hidden] in place. Each `next` first yields the operations of a task, at most `limit`, and the
        one after it computes the task."""
        pages = self.attention.pages(layout)
        queries = []
        for rows, cost in cut_rows(x.shape[0], self._projection_cost, limit, ROW_UNIT):
            yield cost
            queries.append((rows, self.attention.project(self.norm1(x[rows]), rows, layout, pages)))
        row_cost = self._pair_cost * layout.of_frame + self._rest_cost
        for projected, q in queries:
            for part, cost in cut_rows(q.shape[0], row_cost, limit, ROW_UNIT):
                yield cost
                first = projected.start + part.start
                rows = slice(first, first + part.stop - part.start)
                self._add(x, rows, layout, self.attention.attend(q[part], first, layout, pages))
                self._add(x, rows, layout, self.mlp(self.norm2(x[rows])))

    def _add(self, x: Tensor, rows: slice, layout: PatchLayout, part: Tensor) -> None:
        ops.add_rows_(x, layout.numbers[rows], self._sharding.sum(part))


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
        projections = names.projections
        self.mlp = VisionMLP(name, sizes, "gelu", "vision merger width", sharding, projections=projections)
        self._cost = 2 * joined * (joined + config.out_hidden_size)
        self._joins_first = joins_first
        self._sharding = sharding

    def tasks(self, x: Tensor, out: Tensor, limit: float) -> Iterator[float]:
        """Write the tokens of x [t, hidden] to out [t / merge^2, out]. Tasks as in VisionBlock."""
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
        side = config.position_side
        self.config = config
        self._preprocessing = preprocessing
        self.embedding = PatchEmbedding(f"{name}.patch_embed.proj", config, sharding)
        self.positions = PlainParameter((side * side, config.hidden_size), sharding.dtype)
        shape = self.positions.shape
        self.positions.fill(f"{name}.pos_embed.weight", shape, *(slice(0, size) for size in shape))
        self.blocks = [VisionBlock(f"{name}.blocks.{i}", config, sharding) for i in range(config.depth)]
        self._dtype, self._ranks = sharding.dtype, sharding.size

    def parts(self, grid: Grid) -> Iterator[tuple[Layer, int, int]]:
        """Yield the layers below it, as in Encoder."""
        patches, of_frame = prod(grid), grid[1] * grid[2]
        yield self.embedding, patches, 0
        for block in self.blocks:
            yield block, patches, patches * of_frame

    def tasks(self, frames: Tensor, grid: Grid, limit: float, after: AfterBlock) -> Iterator[float]:
        """Compute the rows x [t, hidden] of all patches, block by block. Tasks as in VisionBlock.

        after: called with the number of every block and x, which later blocks overwrite; returns further tasks.
        """
        t, rows, columns = grid
        of_frame = rows * columns
        sequences = PackedSequences(torch.arange(0, (t + 1) * of_frame, of_frame, dtype=torch.int32))
        angles = torch.empty((t * of_frame, 2, self.config.head_dim // 2))
        layout = PatchLayout(angles, torch.arange(t * of_frame), sequences, of_frame)
        x = core.empty((t * of_frame, self.config.hidden_size), self._dtype)
        yield from self._embed(x, angles, frames, grid, limit)
        for i, block in enumerate(self.blocks):
            yield from block.tasks(x, layout, limit)
            yield from after(i, x)

    def _embed(self, x: Tensor, angles: Tensor, frames: Tensor, grid: Grid, limit: float) -> Iterator[float]:
        """Write the embeddings of all patches to x [t, hidden], and their angles as in PatchLayout. Tasks as in
        VisionBlock; each is some rows of blocks of a frame."""
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
                embedded = self.embedding(self._patches(own, (1, rows, columns), band))
                row, column = patch_places(band, columns, c.merge_size)
                indices, weights = taps(row, column, rows, columns, c.position_side)
                first = (frame * rows + band.start) * columns
                taken = slice(first, first + len(row))
                x[taken] = ops.add(embedded, interpolate_rows(self.positions.data, indices, weights))
                angles[taken] = torch.cat([table[row], table[column]], 2)

    def _patches(self, frames: Tensor, grid: Grid, band: slice) -> Tensor:
        if (p := self._preprocessing) is None:
            raise EngineError("encoding: expected a preprocessor_config.json in the model directory, found none")
        return patches(
            frames,
            grid,
            mean=p.mean,
            std=p.std,
            resample=p.resample,
            dtype=self._dtype,
            patch=p.patch,
            merge=p.merge,
            temporal=p.temporal,
            band=band,
        )


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
