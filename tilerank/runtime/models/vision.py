"""A vision transformer over the patches of pictures and videos, with merged patches as tokens, cut over the ranks.

    x = embed(patches) + positions;  x += attention(norm(x));  x += mlp(norm(x))  per block;  merger(x)

Blocks and mergers are those of Qwen3-VL (arXiv 2511.21631). A patch attends to the patches of its own frame alone.
"""

from collections.abc import Iterator
from math import prod

import torch
from torch import Tensor

from tilerank.kernels import ops
from tilerank.kernels.attention import attention_varlen
from tilerank.kernels.heads import join_heads
from tilerank.kernels.linear import Activation
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
from .vision_config import VisionConfig

_EPS = 1e-6
_THETA = 10000.0

Grid = tuple[int, int, int]


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
    """Attention of every patch to those of its frame, cut by heads: x[t, hidden] -> a part of [t, hidden]."""

    def __init__(self, name: str, config: VisionConfig, sharding: Sharding) -> None:
        hidden, heads, dim = config.hidden_size, config.num_heads, config.head_dim
        self.qkv = QKVParallelLinear(name, hidden, heads, heads, dim, sharding, bias=True, projections=("qkv",))
        self.out = RowParallelLinear(f"{name}.proj", hidden, hidden, sharding, span=self.qkv.q_columns, bias=True)
        self.scale = dim**-0.5

    def __call__(self, x: Tensor, angles: Tensor, edges: Tensor) -> Tensor:
        q, k, v = self.qkv(x)
        rotary_float_(q, k, angles)
        return self.out(join_heads(attention_varlen(q, k, v, edges, self.scale)))

    def cuts(self) -> Iterator[tuple[str, Cut]]:
        spans = self.qkv.heads.q
        yield "vision heads", Cut(max(span.stop for span in spans), 1, spans)

    def head_cuts(self) -> Iterator[HeadCut]:
        """None: the answer is about the heads of the decoder."""
        yield from ()


class VisionMLP(Layer):
    """fc2(gelu(fc1(x))), cut by its width: x[t, in] -> a part of [t, out]. dimension: the name of the width."""

    def __init__(
        self, name: str, sizes: tuple[int, int, int], activation: Activation, dimension: str, sharding: Sharding
    ) -> None:
        """sizes: of the input, the width and the output."""
        inputs, width, outputs = sizes
        self.up = ColumnParallelLinear(f"{name}.linear_fc1", inputs, width, sharding, bias=True, activation=activation)
        self.down = RowParallelLinear(f"{name}.linear_fc2", width, outputs, sharding, span=self.up.span, bias=True)
        self._dimension = dimension

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.up(x))

    def cuts(self) -> Iterator[tuple[str, Cut]]:
        yield self._dimension, self.up.cut


class VisionBlock(Layer):
    """Attention and an MLP, each after a norm: x[t, hidden] -> [t, hidden], the same bits on every rank."""

    def __init__(self, name: str, config: VisionConfig, sharding: Sharding) -> None:
        hidden = config.hidden_size
        self.norm1 = LayerNorm(f"{name}.norm1", hidden, _EPS, sharding)
        self.attention = VisionAttention(f"{name}.attn", config, sharding)
        self.norm2 = LayerNorm(f"{name}.norm2", hidden, _EPS, sharding)
        sizes = (hidden, config.intermediate_size, hidden)
        self.mlp = VisionMLP(f"{name}.mlp", sizes, "gelu_tanh", "vision MLP width", sharding)
        self._sharding = sharding

    def __call__(self, x: Tensor, angles: Tensor, edges: Tensor) -> Tensor:
        x = ops.add(x, self._sharding.sum(self.attention(self.norm1(x), angles, edges)))
        return ops.add(x, self._sharding.sum(self.mlp(self.norm2(x))))


class Merger(Layer):
    """Makes one token of a block of patches: x[t, hidden] -> [t / merge^2, out], the same bits on every rank.

    joins_first: the norm is over the patches of a block together, instead of each alone.
    """

    def __init__(self, name: str, config: VisionConfig, sharding: Sharding, *, joins_first: bool) -> None:
        self._joined = joined = config.hidden_size * config.merge_size**2
        self.norm = LayerNorm(f"{name}.norm", joined if joins_first else config.hidden_size, _EPS, sharding)
        self.mlp = VisionMLP(name, (joined, joined, config.out_hidden_size), "gelu", "vision merger width", sharding)
        self._joins_first = joins_first
        self._sharding = sharding

    def __call__(self, x: Tensor) -> Tensor:
        x = self.norm(x.view(-1, self._joined) if self._joins_first else x).view(-1, self._joined)
        return self._sharding.sum(self.mlp(x))


class VisionTower(Encoder):
    """The encoder of Qwen3-VL, under its names in the checkpoint.

    Level 0 of an encoding is merged from the last block; DeepStack adds a level from each block of `config.deepstack`.
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
        self.merger = Merger(f"{name}.merger", config, sharding, joins_first=False)
        self.deepstack = [
            Merger(f"{name}.deepstack_merger_list.{i}", config, sharding, joins_first=True)
            for i in range(len(config.deepstack))
        ]
        self._dtype = sharding.dtype

    def shape(self, grid: Grid) -> tuple[int, int, int]:
        return 1 + len(self.deepstack), prod(grid) // self.config.merge_size**2, self.config.out_hidden_size

    def encode(self, frames: Tensor, grid: Grid) -> Iterator[Tensor | None]:
        t, rows, columns = grid
        row, column = patch_places(rows, columns, self.config.merge_size)
        angles = axial_angles(row, column, self.config.head_dim).repeat(t, 1, 1)
        edges = torch.arange(0, (t + 1) * rows * columns, rows * columns, dtype=torch.int32)
        positions = interpolate_rows(self.positions.data, *taps(row, column, rows, columns, self.config.position_side))
        x = ops.add(self.embedding(self._patches(frames, grid)), positions.repeat(t, 1))
        yield None
        levels: list[Tensor] = []
        for i, block in enumerate(self.blocks):
            x = block(x, angles, edges)
            if i in self.config.deepstack:
                levels.append(self.deepstack[len(levels)](x))
            yield None
        yield torch.stack([self.merger(x), *levels])

    def _patches(self, frames: Tensor, grid: Grid) -> Tensor:
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
        )


def patch_places(rows: int, columns: int, merge: int) -> tuple[Tensor, Tensor]:
    """Return row and column [rows * columns] int64 of the patches of a frame, in their order, block by block."""
    blocks = (rows // merge, merge, columns // merge, merge)
    places = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    row, column = (place.reshape(blocks).transpose(1, 2).flatten() for place in places)
    return row, column


def axial_angles(row: Tensor, column: Tensor, head_dim: int) -> Tensor:
    """Return [n, 2, head_dim / 2] float32, cosines and sines: half of the frequencies follow the row of a patch, half
    its column."""
    half = head_dim // 2
    frequencies = 1.0 / _THETA ** (torch.arange(0, half, 2, dtype=torch.float32) / half)
    angles = torch.cat([torch.outer(place.float(), frequencies) for place in (row, column)], 1)
    return torch.stack([angles.cos(), angles.sin()], 1)


def taps(row: Tensor, column: Tensor, rows: int, columns: int, side: int) -> tuple[Tensor, Tensor]:
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
