"""The vision tower of mllama (Llama-3.2-Vision), cut over the ranks.

A picture is cut into tiles, and all tiles attend to each other. The model was trained with a fixed number of tiles,
some of them empty, and with rows that fill up each tile to a multiple of eight. Rows of empty tiles and rows that fill
up a tile are *padding*: they attend to real rows alone, but real rows attend to all rows.

No position enters the attention, so the order of rows is free. Real rows come first, then those of empty tiles, then
those that fill up tiles: attention is two runs of rows of one call and needs no mask.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from tilerank.kernels import ops
from tilerank.kernels.attention import attention, store_kv
from tilerank.kernels.heads import join_heads
from tilerank.kernels.kv_pages import PAGE_TOKENS, KVPages
from tilerank.kernels.pictures import patches
from tilerank.kernels.vision import tanh_gate_
from tilerank.kernels.weight_formats import Float
from tilerank.loader.fields import Fields
from tilerank.parallel.linear import Linear, QKVParallelLinear, RowParallelLinear
from tilerank.parallel.norm import LayerNorm
from tilerank.parallel.parameters import Layer, PlainParameter
from tilerank.parallel.shard import Cut, HeadCut
from tilerank.parallel.sharding import Sharding

from ..errors import EngineError
from ..media.mllama import TileSettings
from ..media.mllama_intermediate import read_taken_layers
from ..media.mllama_sizes import fit, tilings
from ..model import Encoder
from .text_config import MAX_WIDTH
from .vision import ROW_UNIT, VisionMLP, cut_rows, pieces

_EPS = 1e-5
_TILE_UNIT = 8
"""Rows of a tile are filled up to a multiple of this."""
_MAX_LAYERS = 1 << 10
_MAX_SIDE = 1 << 13

Grid = tuple[int, int, int]


@dataclass(frozen=True)
class MllamaVisionConfig:
    """The shape of the tower. side: patches of a tile's side. tiles: the most of a picture. taken: as
    `read_taken_layers` returns it."""

    hidden: int
    heads: int
    width: int
    layers: int
    global_layers: int
    patch: int
    side: int
    tiles: int
    taken: tuple[int, ...]
    eps: float

    @property
    def rows(self) -> int:
        """Rows of a tile: its patches and a class token."""
        return self.side**2 + 1

    @property
    def ids(self) -> int:
        """Aspect ratio ids: 0, and one for each tiling."""
        return 1 + len(tilings(self.tiles))

    @property
    def output(self) -> int:
        """Columns of an encoding before it is projected."""
        return self.hidden * (1 + len(self.taken))


def read_mllama_vision_config(c: Fields) -> MllamaVisionConfig:
    """Read and check the fields of the tower. Raises ConfigError."""
    if c.has("hidden_act") and c.text("hidden_act") != "gelu":
        raise c.fail("hidden_act", "'gelu'")
    hidden, heads = c.integer("hidden_size", 1, MAX_WIDTH), c.integer("attention_heads", 1, 1 << 10)
    if hidden % (8 * heads) or hidden > 256 * heads:
        raise c.fail("hidden_size", f"{heads} heads of a multiple of 8 up to 256")
    image, patch = c.integer("image_size", 1, _MAX_SIDE), c.integer("patch_size", 1, _MAX_SIDE)
    layers = c.integer("num_hidden_layers", 1, _MAX_LAYERS)
    taken = read_taken_layers(c, layers)
    config = MllamaVisionConfig(
        hidden=hidden,
        heads=heads,
        width=c.integer("intermediate_size", 1, MAX_WIDTH),
        layers=layers,
        global_layers=c.integer("num_global_layers", 0, _MAX_LAYERS),
        patch=patch,
        side=image // patch,
        tiles=c.integer("max_num_tiles", 1, 64),
        taken=taken,
        eps=c.number("norm_eps", 0.0, 1.0),
    )
    if c.integer("vision_output_dim", 1, MAX_WIDTH * 64) != config.output:
        raise c.fail("vision_output_dim", f"{config.output}, {1 + len(taken)} times hidden_size")
    return config


class _Table(PlainParameter):
    """A stored tensor of any shape, whole on every rank."""

    def __init__(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        super().__init__(shape, dtype)
        self.fill(name, shape, *(slice(0, size) for size in shape))


@dataclass(frozen=True)
class TileRows:
    """The rows of a picture. real: how many of them, the first ones, are real. numbers: [t] int64, 0 to t.

    tables: [2, pages] int32, the pages of all rows, for two runs: the real rows and the padding.
    """

    real: int
    numbers: Tensor
    tables: Tensor

    @staticmethod
    def of(total: int, real: int) -> "TileRows":
        pages = -(-total // PAGE_TOKENS)
        return TileRows(real, torch.arange(total), torch.arange(pages, dtype=torch.int32).repeat(2, 1))

    @property
    def total(self) -> int:
        return len(self.numbers)


class TileAttention(Layer):
    """Attention of real rows to all rows and of padding to real rows, cut by heads."""

    def __init__(self, name: str, c: MllamaVisionConfig, sharding: Sharding) -> None:
        dim = c.hidden // c.heads
        self.qkv = QKVParallelLinear(name, c.hidden, c.heads, c.heads, dim, sharding)
        self.out = RowParallelLinear(f"{name}.o_proj", c.hidden, c.hidden, sharding, span=self.qkv.q_columns)
        self.scale = dim**-0.5
        self._dtype = sharding.dtype

    def pages(self, layout: TileRows) -> KVPages:
        """Return uninitialised pages for the keys and values of all rows."""
        return KVPages.in_arena(layout.tables.shape[1], self.qkv.kv_heads, self.qkv.head_dim, self._dtype)

    def project(self, x: Tensor, rows: slice, layout: TileRows, pages: KVPages) -> Tensor:
        """Return the queries [n, heads, head_dim] of n rows, and write their keys and values into `pages`.

        x: [n, hidden], the input of these rows.
        """
        q, k, v = self.qkv(x)
        store_kv(k, v, pages, layout.numbers[rows])
        return q

    def attend(self, q: Tensor, first: int, layout: TileRows, pages: KVPages) -> Tensor:
        """Return this rank's part of the output [n, hidden] for the queries of n rows from `first` on."""
        lengths = torch.tensor([layout.total, layout.real], dtype=torch.int32)
        edges = torch.tensor([0, layout.real, layout.total], dtype=torch.int32)
        starts = edges.clamp(first, first + q.shape[0]) - first
        kv_map, scale = self.qkv.kv_map, self.scale
        return self.out(join_heads(attention(q, pages, layout.tables, lengths, starts, kv_map, scale, causal=False)))

    def cuts(self) -> Iterator[tuple[str, Cut]]:
        spans = self.qkv.heads.q
        yield "vision heads", Cut(max(span.stop for span in spans), 1, spans)

    def head_cuts(self) -> Iterator[HeadCut]:
        """None: the answer is about the heads of the decoder."""
        yield from ()


class TileBlock(Layer):
    """Attention and an MLP, each after a norm; the same bits on every rank. gated: tanh of a number scales each."""

    def __init__(self, name: str, c: MllamaVisionConfig, sharding: Sharding, *, gated: bool) -> None:
        self.norm1 = LayerNorm(f"{name}.input_layernorm", c.hidden, c.eps, sharding)
        self.attention = TileAttention(f"{name}.self_attn", c, sharding)
        self.norm2 = LayerNorm(f"{name}.post_attention_layernorm", c.hidden, c.eps, sharding)
        sizes = (c.hidden, c.width, c.hidden)
        self.mlp = VisionMLP(f"{name}.mlp", sizes, "gelu", "vision MLP width", sharding, projections=("fc1", "fc2"))
        self.gates = [_Table(f"{name}.{gate}", (1,), sharding.dtype) for gate in ("gate_attn", "gate_ffn") if gated]
        self._projection_cost = 6 * c.hidden**2
        self._rest_cost = 2 * c.hidden**2 + 4 * c.hidden * c.width
        self._pair_cost = 4 * c.hidden
        self._sharding = sharding

    def tasks(self, x: Tensor, layout: TileRows, limit: float) -> Iterator[float]:
        """Update x [t, hidden] in place. Each `next` first yields the operations of a task, at most `limit`, and the
        one after it computes the task."""
        pages = self.attention.pages(layout)
        queries = []
        for rows, cost in cut_rows(layout.total, self._projection_cost, limit, ROW_UNIT):
            yield cost
            queries.append((rows, self.attention.project(self.norm1(x[rows]), rows, layout, pages)))
        row_cost = self._pair_cost * layout.total + self._rest_cost
        for projected, q in queries:
            for part, cost in cut_rows(q.shape[0], row_cost, limit, ROW_UNIT):
                yield cost
                first = projected.start + part.start
                rows = slice(first, first + part.stop - part.start)
                self._add(x, rows, layout, self.attention.attend(q[part], first, layout, pages), 0)
                self._add(x, rows, layout, self.mlp(self.norm2(x[rows])), 1)

    def _add(self, x: Tensor, rows: slice, layout: TileRows, part: Tensor, gate: int) -> None:
        added = self._sharding.sum(part)
        if self.gates:
            tanh_gate_(added, self.gates[gate].data)
        ops.add_rows_(x, layout.numbers[rows], added)


class MllamaTower(Encoder):
    """The encoder and the projector of mllama, under their names in the checkpoint.

    An encoding has one level: the tokens of all tiles, real ones first, in the width of the decoder. settings: None if
    the model directory does not say how pictures become tiles; then nothing can be encoded.
    """

    def __init__(
        self, c: MllamaVisionConfig, out_hidden: int, settings: TileSettings | None, sharding: Sharding
    ) -> None:
        name, dtype = "vision_model", sharding.dtype
        self.config, self._settings, self._sharding, self._out_hidden = c, settings, sharding, out_hidden
        shape = (c.hidden, 3, c.patch, c.patch)
        self.embedding = Linear(c.hidden, prod(shape[1:]), Float(dtype), None)
        self.embedding.weight.fill(f"{name}.patch_embedding.weight", shape, *(slice(0, size) for size in shape))
        self.class_row = _Table(f"{name}.class_embedding", (c.hidden,), dtype)
        gated = f"{name}.gated_positional_embedding"
        self.positions = _Table(f"{gated}.embedding", (c.rows, c.hidden), dtype)
        self.tile_positions = _Table(f"{gated}.tile_embedding.weight", (c.ids, c.tiles * c.rows * c.hidden), dtype)
        self.position_gate = _Table(f"{gated}.gate", (1,), dtype)
        self.tile_tables = [
            _Table(f"{name}.{when}_tile_positional_embedding.embedding.weight", (c.ids, c.tiles * c.hidden), dtype)
            for when in ("pre", "post")
        ]
        self.tile_gates = [
            _Table(f"{name}.{when}_tile_positional_embedding.gate", (1,), dtype) for when in ("pre", "post")
        ]
        self.norm_before = LayerNorm(f"{name}.layernorm_pre", c.hidden, _EPS, sharding)
        self.norm_after = LayerNorm(f"{name}.layernorm_post", c.hidden, _EPS, sharding)
        self.blocks = [TileBlock(f"{name}.transformer.layers.{i}", c, sharding, gated=False) for i in range(c.layers)]
        self.global_blocks = [
            TileBlock(f"{name}.global_transformer.layers.{i}", c, sharding, gated=True) for i in range(c.global_layers)
        ]
        span = sharding.cut(c.output).spans[sharding.rank]
        self.projector = RowParallelLinear(
            "multi_modal_projector", c.output, out_hidden, sharding, span=span, bias=True
        )

    def shape(self, grid: Grid) -> tuple[int, int, int]:
        return 1, self.config.tiles * self.config.rows, self._out_hidden

    def parts(self, grid: Grid) -> Iterator[tuple[Layer, int, int]]:
        c = self.config
        tiles = grid[1] * grid[2] // c.side**2
        real, rows = tiles * c.rows, c.tiles * (c.rows + self._filling)
        yield self.embedding, grid[1] * grid[2], 0
        for block in (*self.blocks, *self.global_blocks):
            yield block, rows, real * rows + (rows - real) * real
        yield self.projector, c.tiles * c.rows, 0

    def encode(self, frames: Tensor, grid: Grid, operations: float) -> Iterator[Tensor | None]:
        out = torch.empty(self.shape(grid), dtype=self._sharding.dtype)
        yield from pieces(self._tasks(frames, grid, out[0], operations), operations)
        yield out

    def _tasks(self, frames: Tensor, grid: Grid, out: Tensor, limit: float) -> Iterator[float]:
        """Write the encoding to `out`. Tasks as in TileBlock."""
        c = self.config
        rows, columns = grid[1] // c.side, grid[2] // c.side
        aspect, real = 1 + tilings(c.tiles).index((rows, columns)), rows * columns * c.rows
        tokens = c.tiles * c.rows
        layout = TileRows.of(tokens + c.tiles * self._filling, real)
        yield 2.0 * real * 3 * c.patch**2 * c.hidden
        x = self._embed(self._patches(frames, grid), aspect)
        taken: list[Tensor] = []
        for number, block in enumerate(self.blocks):
            if number in c.taken:
                taken.append(x[:tokens].clone())
            yield from block.tasks(x, layout, limit)
        if c.layers in c.taken:
            taken.append(x[:tokens].clone())
        x = ops.add(self.norm_after(x), self._of_tiles(1, aspect))
        for block in self.global_blocks:
            yield from block.tasks(x, layout, limit)
        for part, cost in cut_rows(tokens, 2 * c.output * self._out_hidden, limit, ROW_UNIT):
            yield cost
            out[part] = self._project(x[part], [level[part] for level in taken])

    def _embed(self, pixels: Tensor, aspect: int) -> Tensor:
        """pixels: [tiles * patches, ..] of the real tiles. Returns the rows [tiles * filled rows, hidden]."""
        c, kind = self.config, self._sharding.dtype
        found = self.embedding.project(pixels).view(-1, c.rows - 1, c.hidden)
        patches = torch.zeros((c.tiles, c.rows - 1, c.hidden), dtype=kind)
        patches[: len(found)] = found
        tile = self.tile_tables[0].data[aspect].view(c.tiles, 1, c.hidden) * self.tile_gates[0].data.tanh()
        x = torch.cat([self.class_row.data.expand(c.tiles, 1, -1), patches + tile], 1)
        gate = self.position_gate.data.tanh()
        x = x + (1 - gate) * self.positions.data
        x = x + gate * self.tile_positions.data[aspect].view(c.tiles, c.rows, c.hidden)
        x = self.norm_before(x.view(-1, c.hidden))
        return torch.cat([x, torch.zeros((c.tiles * self._filling, c.hidden), dtype=kind)])

    def _of_tiles(self, table: int, aspect: int) -> Tensor:
        """Return the embedding of each row's tile, [rows, hidden]."""
        c = self.config
        tiles = self.tile_tables[table].data[aspect].view(c.tiles, c.hidden) * self.tile_gates[table].data.tanh()
        return torch.cat([tiles.repeat_interleave(count, 0) for count in (c.rows, self._filling)])

    def _project(self, x: Tensor, taken: list[Tensor]) -> Tensor:
        """Return [tokens, decoder's hidden]. The layers' values of one column lie beside each other."""
        joined = torch.cat([x, torch.stack(taken, -1).flatten(1)], -1) if taken else x
        return self._sharding.sum(self.projector(self.projector.own_columns(joined)))

    @property
    def _filling(self) -> int:
        """Rows that fill up a tile."""
        return -self.config.rows % _TILE_UNIT

    def _patches(self, frames: Tensor, grid: Grid) -> Tensor:
        if (s := self._settings) is None:
            raise EngineError("encoding: expected a preprocessor_config.json in the model directory, found none")
        size = fit(frames.shape[1], frames.shape[2], grid[1] // self.config.side, grid[2] // self.config.side, s.tile)
        return patches(
            frames,
            grid,
            mean=s.mean,
            std=s.std,
            resample=s.resample,
            dtype=self._sharding.dtype,
            patch=s.patch,
            merge=self.config.side,
            temporal=1,
            size=size,
        )
