"""MOSS-VL (arXiv 2608.15045): the decoder of Qwen3 with layers of gated cross-attention to the frames of the prompt.

The cross-attention layers stand among the others. Tokens before the first frame pass them unchanged. Queries are
rotated in every step, also of generated tokens, as in a prompt; the remote code of the checkpoints leaves that out.

The vision tower has the blocks of Qwen3-VL, whose levels one merger joins:

    level_j = norm_j(x after block j), of the last block and of those of `deepstack_visual_indexes`
    token = fc2(gelu(fc1(the levels of a patch, patch after patch of a block of patches)))

The tokens of every frame are followed by a separator.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from tilerank.kernels import core
from tilerank.loader.card import ModelCard
from tilerank.parallel.norm import LayerNorm
from tilerank.parallel.parameters import Layer, WholeParameter
from tilerank.parallel.sharding import Sharding

from ..media.moss_vl import read_settings
from ..media.qwen_vl import Preprocessing
from ..media.settings import read_if_listed
from ..step.model import Encoder
from .attention import SelfAttention
from .cross_attention import crossing_decoder
from .decoder import Decoder, DecoderNames
from .text_config import USUAL_SECTIONS, read_text_config
from .towers.tower import ROW_UNIT, Grid, TowerMLP, cut_rows, floats_alone, pieces
from .towers.vision import EPS, VisionTransformer
from .towers.vision_config import VisionConfig, read_vision_config

_GROUP = 4096
"""Patches of small frames that are computed together, so that few rows do not read all weights."""
_NORM_COST = 100.0
"""Operations that take as long as normalising a number."""


class LevelMerger(Layer):
    """Makes one token of the levels of a block of patches, the same bits on every rank. levels: their number."""

    def __init__(self, name: str, config: VisionConfig, levels: int, sharding: Sharding) -> None:
        self._joined = joined = config.hidden_size * levels * config.merge_size**2
        self.norms = [LayerNorm(f"{name}.norms.{i}", config.hidden_size, EPS, sharding) for i in range(levels)]
        sizes = (joined, joined, config.out_hidden_size)
        projections = f"{name}.linear_fc1", f"{name}.linear_fc2"
        self.mlp = TowerMLP(projections, sizes, "gelu", "vision merger width", sharding)
        self._cost = 2 * joined * (joined + config.out_hidden_size)
        self._sharding = sharding

    def take(self, x: Tensor, level: int, levels: Tensor, limit: float) -> Iterator[float]:
        """Write x [t, hidden] to level `level` of levels [t, levels, hidden]. Tasks as in TowerBlock."""
        for rows, cost in cut_rows(x.shape[0], _NORM_COST * x.shape[1], limit, ROW_UNIT):
            yield cost
            levels[rows, level] = self.norms[level](x[rows])

    def merge(self, levels: Tensor, out: Tensor, places: Tensor, limit: float) -> Iterator[float]:
        """Write the tokens of levels [t, levels, hidden] to rows `places` [t / merge^2] int64 of out [.., out]. Tasks
        as in TowerBlock."""
        blocks = levels.view(-1, self._joined)
        for rows, cost in cut_rows(blocks.shape[0], self._cost, limit, ROW_UNIT):
            yield cost
            out[places[rows]] = self._sharding.sum(self.mlp(blocks[rows]))


class MossTower(Encoder):
    """The encoder of MOSS-VL, under its names in the checkpoint. An encoding has one level.

    preprocessing: as in VisionTransformer.
    """

    def __init__(
        self, name: str, separator: str, config: VisionConfig, preprocessing: Preprocessing | None, sharding: Sharding
    ) -> None:
        """separator: the name of its tensor."""
        self.config = config
        self.transformer = VisionTransformer(name, config, preprocessing, sharding)
        self._taken = (config.depth - 1, *config.deepstack)
        self.merger = LevelMerger(f"{name}.merger", config, len(self._taken), sharding)
        self.separator = WholeParameter(separator, (config.out_hidden_size,), sharding.dtype)
        self._dtype = sharding.dtype

    def shape(self, grid: Grid) -> tuple[int, int, int]:
        return 1, grid[0] * (self._of_frame(grid) + 1), self.config.out_hidden_size

    def parts(self, grid: Grid) -> Iterator[tuple[Layer, int, int]]:
        yield from self.transformer.parts(grid)
        yield self.merger, grid[0] * self._of_frame(grid), 0

    def encode(self, frames: Tensor, grid: Grid, operations: float) -> Iterator[Tensor | None]:
        out = torch.empty(self.shape(grid), dtype=self._dtype)
        yield from pieces(self._tasks(frames, grid, out[0], operations), operations)
        yield out

    def _tasks(self, frames: Tensor, grid: Grid, out: Tensor, limit: float) -> Iterator[float]:
        """Write the encoding to `out`, some frames after the other. Tasks as in TowerBlock."""
        t, rows, columns = grid
        of_frame = self._of_frame(grid) + 1
        out[of_frame - 1 :: of_frame] = self.separator.data
        step = max(_GROUP // (rows * columns), 1)
        for first in range(0, t, step):
            own = frames[first : first + step]
            yield from self._frames(own, (len(own), rows, columns), out[first * of_frame :], limit)

    def _frames(self, frames: Tensor, grid: Grid, out: Tensor, limit: float) -> Iterator[float]:
        t, rows, columns = grid
        levels = core.empty((t * rows * columns, len(self._taken), self.config.hidden_size), self._dtype)

        def take(block: int, x: Tensor) -> Iterator[float]:
            for level, taken in enumerate(self._taken):
                if taken == block:
                    yield from self.merger.take(x, level, levels, limit)

        yield from self.transformer.tasks(frames, grid, limit, take)
        of_frame = self._of_frame(grid)
        places = torch.arange(t * (of_frame + 1)).view(t, of_frame + 1)[:, :of_frame].flatten()
        yield from self.merger.merge(levels, out, places, limit)

    def _of_frame(self, grid: Grid) -> int:
        """Return the tokens of a frame without its separator."""
        return grid[1] * grid[2] // self.config.merge_size**2


def moss_vl(card: ModelCard, sharding: Sharding) -> Decoder:
    """MossVLForConditionalGeneration."""
    text = card.fields.object("text_config")
    c, bias = read_text_config(text, whole=card.fields, sections=USUAL_SECTIONS), text.flag("attention_bias")
    names = DecoderNames(
        embedding="model.language_model.embed_tokens",
        norm="model.language_model.norm",
        layer="model.language_model.layers.{}",
    )

    def self_attention(name: str, _: int) -> SelfAttention:
        return SelfAttention(name, c, sharding, qkv_bias=bias, out_bias=bias, head_norms=True)

    vision = read_vision_config(card.fields.object("vision_config"), c.hidden_size)
    preprocessing = read_if_listed(lambda folder: read_settings(folder).preprocessing, card.fields.path.parent)
    tower = MossTower("model.visual", "model.separator_token", vision, preprocessing, floats_alone(sharding))
    return crossing_decoder(card, c, text, sharding, names, self_attention, tower, rotates_source=True, bias=bias)


MODELS = {"moss_vl": moss_vl}
