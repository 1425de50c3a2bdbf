"""mllama (Llama-3.2-Vision, model card meta-llama/Llama-3.2-11B-Vision): Llama with layers of gated cross-attention.

The cross-attention layers stand among the others and see the encoded pictures of the prompt. The tokens of a prompt
without pictures pass them unchanged. As transformers 5.23 does it, a token before the first picture attends to all of
them and leaves out the MLPs of these layers.

The vision tower cuts a picture into tiles, and all tiles attend to each other. The model was trained with a fixed
number of tiles, some of them empty, and with rows that fill up each tile to a multiple of eight. Rows of empty tiles
and rows that fill up a tile are *padding*: they attend to real rows alone, but real rows attend to all rows.

No position enters the attention, so the order of rows is free. Real rows come first, then those of empty tiles, then
those that fill up tiles: attention is two runs of rows of one call and needs no mask.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from tilerank.kernels import ops
from tilerank.kernels.attention import attention
from tilerank.kernels.kv_pages import PAGE_TOKENS, KVPages
from tilerank.kernels.pictures import patches
from tilerank.kernels.weight_formats import Float
from tilerank.loader.card import ModelCard
from tilerank.loader.fields import Fields
from tilerank.parallel.linear import Linear, RowParallelLinear
from tilerank.parallel.norm import LayerNorm
from tilerank.parallel.parameters import Layer, WholeParameter
from tilerank.parallel.sharding import Sharding

from ..media.mllama import TileSettings, fit, read_taken_layers, read_tile_settings, tilings
from ..media.settings import read_if_listed
from ..protocol.errors import EngineError
from ..step.model import Encoder
from .attention import SelfAttention
from .cross_attention import crossing_decoder, read_crossing_layers
from .decoder import Decoder, DecoderNames
from .text_config import MAX_WIDTH, TextConfig, read_heads, read_text_config
from .towers.tower import ROW_UNIT, BlockNames, BlockShape, Grid, RowLayout, TowerBlock, cut_rows, floats_alone, pieces

_SPARE_IDS = 8
"""The embedding has rows for more ids than the head: the token of a picture is embedded and never generated."""
_EPS = 1e-5
_TILE_UNIT = 8
"""Rows of a tile are filled up to a multiple of this."""
_MAX_LAYERS = 1 << 10
_MAX_SIDE = 1 << 13
_BLOCK = BlockNames(
    norms=("input_layernorm", "post_attention_layernorm"),
    attention="self_attn",
    qkv=("q_proj", "k_proj", "v_proj"),
    out="o_proj",
    mlp=("mlp.fc1", "mlp.fc2"),
)
_GATED_BLOCK = replace(_BLOCK, gates=("gate_attn", "gate_ffn"))


@dataclass(frozen=True)
class MllamaVisionConfig:
    """The shape of the tower. side: patches of a tile's side. tiles: the most of a picture. taken: as
    `read_taken_layers` returns it."""

    hidden: int
    heads: int
    head_dim: int
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
    hidden, heads, head_dim = read_heads(c, "hidden_size", "attention_heads")
    image, patch = c.integer("image_size", 1, _MAX_SIDE), c.integer("patch_size", 1, _MAX_SIDE)
    layers = c.integer("num_hidden_layers", 1, _MAX_LAYERS)
    taken = read_taken_layers(c, layers)
    config = MllamaVisionConfig(
        hidden=hidden,
        heads=heads,
        head_dim=head_dim,
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


class TileLayout(RowLayout):
    """The rows of a picture, of which the first `real` ones are real. Real rows attend to all, padding to real rows."""

    def __init__(self, total: int, real: int) -> None:
        self.numbers = self.slots = torch.arange(total)
        self.seen = total
        self._real = real
        # The pages of all rows, for each of two runs: the real rows and the padding.
        self._tables = torch.arange(-(-total // PAGE_TOKENS), dtype=torch.int32).repeat(2, 1)

    def pages(self, kv_heads: int, head_dim: int, dtype: torch.dtype) -> KVPages:
        return KVPages.in_arena(self._tables.shape[1], kv_heads, head_dim, dtype)

    def attend(self, q: Tensor, first: int, pages: KVPages, kv_map: Tensor, scale: float) -> Tensor:
        total, real = self.seen, self._real
        lengths = torch.tensor([total, real], dtype=torch.int32)
        starts = torch.tensor([0, real, total], dtype=torch.int32).clamp(first, first + q.shape[0]) - first
        return attention(q, pages, self._tables, lengths, starts, kv_map, scale, causal=False)


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
        self.class_row = WholeParameter(f"{name}.class_embedding", (c.hidden,), dtype)
        gated = f"{name}.gated_positional_embedding"
        self.positions = WholeParameter(f"{gated}.embedding", (c.rows, c.hidden), dtype)
        of_tiles = c.tiles * c.rows * c.hidden
        self.tile_positions = WholeParameter(f"{gated}.tile_embedding.weight", (c.ids, of_tiles), dtype)
        self.position_gate = WholeParameter(f"{gated}.gate", (1,), dtype)
        of_each = [f"{name}.{when}_tile_positional_embedding" for when in ("pre", "post")]
        table = (c.ids, c.tiles * c.hidden)
        self.tile_tables = [WholeParameter(f"{own}.embedding.weight", table, dtype) for own in of_each]
        self.tile_gates = [WholeParameter(f"{own}.gate", (1,), dtype) for own in of_each]
        self.norm_before = LayerNorm(f"{name}.layernorm_pre", c.hidden, _EPS, sharding)
        self.norm_after = LayerNorm(f"{name}.layernorm_post", c.hidden, _EPS, sharding)
        block = BlockShape(c.hidden, c.heads, c.head_dim, c.width, c.eps, "gelu", bias=False, kind="vision")
        self.blocks = [TowerBlock(f"{name}.transformer.layers.{i}", block, _BLOCK, sharding) for i in range(c.layers)]
        self.global_blocks = [
            TowerBlock(f"{name}.global_transformer.layers.{i}", block, _GATED_BLOCK, sharding)
            for i in range(c.global_layers)
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
        """Write the encoding to `out`. Tasks as in TowerBlock."""
        c = self.config
        rows, columns = grid[1] // c.side, grid[2] // c.side
        aspect, real = 1 + tilings(c.tiles).index((rows, columns)), rows * columns * c.rows
        tokens = c.tiles * c.rows
        layout = TileLayout(tokens + c.tiles * self._filling, real)
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


def mllama(card: ModelCard, sharding: Sharding) -> Decoder:
    """MllamaForConditionalGeneration, and MllamaForCausalLM, whose prompts have no pictures: it is Llama without the
    layers of cross-attention."""
    if not card.fields.has("text_config"):
        c = read_text_config(card.fields)
        crossing = read_crossing_layers(card.fields, c.num_layers)
        names = DecoderNames(left_out=tuple(f"model.layers.{layer}." for layer in crossing))
        return _decoder(card, c, card.fields, sharding, names, None)
    text, vision = card.fields.object("text_config"), card.fields.object("vision_config")
    c = read_text_config(text)
    names = DecoderNames(
        embedding="language_model.model.embed_tokens",
        norm="language_model.model.norm",
        head="language_model.lm_head",
        layer="language_model.model.layers.{}",
    )
    settings = read_if_listed(read_tile_settings, card.fields.path.parent)
    tower = MllamaTower(read_mllama_vision_config(vision), c.hidden_size, settings, floats_alone(sharding))
    return _decoder(card, c, text, sharding, names, tower)


def _decoder(
    card: ModelCard, c: TextConfig, text: Fields, sharding: Sharding, names: DecoderNames, tower: MllamaTower | None
) -> Decoder:
    def self_attention(name: str, _: int) -> SelfAttention:
        return SelfAttention(name, c, sharding, qkv_bias=False, out_bias=False, head_norms=False)

    return crossing_decoder(card, c, text, sharding, names, self_attention, tower, spare_ids=_SPARE_IDS)


MODELS = {"mllama": mllama, "mllama_text_model": mllama}
