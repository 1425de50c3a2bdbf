"""The tower of SigLIP (arXiv 2303.15343) with the projector of Gemma 3: a square picture as a square of tokens.

    x = embed(patches) + positions;  the blocks of tower.py;  norm;  mean of each square of patches;  norm;  product

All patches attend to each other. The patches of a token follow each other, so that the mean is one of rows.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tilerank.kernels import core, ops
from tilerank.kernels.weight_formats import Float
from tilerank.loader.fields import Fields
from tilerank.parallel.linear import Linear
from tilerank.parallel.norm import LayerNorm, RMSNorm
from tilerank.parallel.parameters import FusedPlace, Layer, WholeParameter
from tilerank.parallel.sharding import Sharding

from ...media.gemma3 import Gemma3Settings, patches_of_token
from ...step.model import Encoder
from ..text_config import MAX_WIDTH, read_heads
from .tower import ROW_UNIT, BlockNames, BlockShape, Grid, PackedLayout, TowerBlock, cut_rows, pieces
from .vision import cut_patches, patch_places

_MAX_LAYERS = 1 << 10
_PIXEL = 1000.0
"""Operations that take as long as preprocessing a pixel."""
_BLOCK = BlockNames(
    norms=("layer_norm1", "layer_norm2"),
    attention="self_attn",
    qkv=("q_proj", "k_proj", "v_proj"),
    out="out_proj",
    mlp=("mlp.fc1", "mlp.fc2"),
)


@dataclass(frozen=True)
class SiglipConfig:
    """The shape of the tower. patch: pixels of its side. side: patches of a side of a picture. pooled: those of a side
    of a token. out_hidden: columns of a token."""

    hidden: int
    heads: int
    head_dim: int
    width: int
    layers: int
    eps: float
    patch: int
    side: int
    pooled: int
    out_hidden: int

    @property
    def tokens(self) -> int:
        """Tokens of a picture."""
        return (self.side // self.pooled) ** 2


def read_siglip_config(config: Fields, out_hidden: int) -> SiglipConfig:
    """Read and check the fields of the tower. config: those of config.json. Raises ConfigError."""
    c = config.object("vision_config").with_defaults({"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6})
    if c.text("hidden_act") != "gelu_pytorch_tanh":
        raise c.fail("hidden_act", "'gelu_pytorch_tanh'")
    if c.has("num_channels") and c.integer("num_channels", 1, 1 << 10) != 3:
        raise c.fail("num_channels", "3")
    hidden, heads, head_dim = read_heads(c, "hidden_size", "num_attention_heads")
    patch, side, pooled = patches_of_token(config, c)
    return SiglipConfig(
        hidden=hidden,
        heads=heads,
        head_dim=head_dim,
        width=c.integer("intermediate_size", 1, MAX_WIDTH),
        layers=c.integer("num_hidden_layers", 1, _MAX_LAYERS),
        eps=c.number("layer_norm_eps", 0.0, 1.0),
        patch=patch,
        side=side,
        pooled=pooled,
        out_hidden=out_hidden,
    )


class SiglipTower(Encoder):
    """The encoder of Gemma 3. An encoding has one level.

    settings: None if the model directory does not say how a picture becomes numbers; then nothing can be encoded.
    """

    def __init__(
        self, name: str, projector: str, c: SiglipConfig, settings: Gemma3Settings | None, sharding: Sharding
    ) -> None:
        """name, projector: of both in the checkpoint."""
        self.config, self._dtype, self._ranks = c, sharding.dtype, sharding.size
        self._preprocessing = None if settings is None else settings.preprocessing
        self.whole_tokens = c.tokens
        shape = (c.hidden, 3, c.patch, c.patch)
        self.embedding = Linear(c.hidden, 3 * c.patch**2, Float(sharding.dtype), sharding.dtype)
        embedding = f"{name}.embeddings.patch_embedding"
        self.embedding.weight.fill(f"{embedding}.weight", shape, *(slice(0, size) for size in shape))
        if self.embedding.bias is not None:
            self.embedding.bias.fill(f"{embedding}.bias", shape[:1], slice(0, c.hidden))
        table = (c.side**2, c.hidden)
        self.positions = WholeParameter(f"{name}.embeddings.position_embedding.weight", table, sharding.dtype)
        block = BlockShape(c.hidden, c.heads, c.head_dim, c.width, c.eps, "gelu_tanh", bias=True, kind="vision")
        layers = (f"{name}.encoder.layers.{i}" for i in range(c.layers))
        self.blocks = [TowerBlock(layer, block, _BLOCK, sharding) for layer in layers]
        self.norm = LayerNorm(f"{name}.post_layernorm", c.hidden, c.eps, sharding)
        self.token_norm = RMSNorm(f"{projector}.mm_soft_emb_norm", c.hidden, c.eps, sharding, zero_centered=True)
        self.projection = Linear(c.out_hidden, c.hidden, Float(sharding.dtype), None)
        stored = f"{projector}.mm_input_projection_weight"
        transposed = FusedPlace(stored, (c.hidden, c.out_hidden), (0, 0), transposed=True)
        whole = (c.out_hidden, c.hidden)
        # The checkpoint has it as [in, out], under a name of its own.
        self.projection.weight.fill(
            f"{projector}.mm_input_projection.weight", whole, *(slice(0, n) for n in whole), places=(transposed,)
        )

    def shape(self, grid: Grid) -> tuple[int, int, int]:
        return 1, self.config.tokens, self.config.out_hidden

    def parts(self, grid: Grid) -> Iterator[tuple[Layer, int, int]]:
        rows = self.config.side**2
        yield self.embedding, rows, 0
        for block in self.blocks:
            yield block, rows, rows**2
        yield self.projection, self.config.tokens, 0

    def encode(self, frames: Tensor, grid: Grid, operations: float) -> Iterator[Tensor | None]:
        out = torch.empty(self.shape(grid), dtype=self._dtype)
        yield from pieces(self._tasks(frames, out[0], operations), operations)
        yield out

    def _tasks(self, frames: Tensor, out: Tensor, limit: float) -> Iterator[float]:
        """Write the encoding of a picture to out [tokens, out_hidden]. Tasks as in TowerBlock."""
        c = self.config
        rows = c.side**2
        x = core.empty((rows, c.hidden), self._dtype)
        yield from self._embed(x, frames, limit)
        layout = PackedLayout(torch.tensor([0, rows], dtype=torch.int32), rows)
        for block in self.blocks:
            yield from block.tasks(x, layout, limit)
        for part, cost in cut_rows(c.tokens, self._ranks * 2 * c.hidden * c.out_hidden, limit, ROW_UNIT):
            yield cost
            out[part] = self._project(x.view(c.tokens, c.pooled**2, c.hidden)[part])

    def _embed(self, x: Tensor, frames: Tensor, limit: float) -> Iterator[float]:
        """Write the embeddings of all patches to x; each task is some rows of them. Every rank computes all."""
        c = self.config
        row_cost = self._ranks * c.side * c.patch**2 * (2 * 3 * c.hidden + _PIXEL)
        for band, cost in cut_rows(c.side, row_cost, limit, c.pooled):
            yield cost
            row, column = patch_places(band, c.side, c.pooled)
            values = cut_patches(frames, (1, c.side, c.side), band, self._preprocessing, self._dtype)
            embedded = self.embedding.project(values)
            places = ops.take_rows(self.positions.data, row * c.side + column)
            x[band.start * c.side : band.stop * c.side] = ops.add(embedded, places)

    def _project(self, x: Tensor) -> Tensor:
        """x: [n, patches of a token, hidden] -> [n, out_hidden]"""
        n, count, hidden = x.shape
        means = ops.sum_parts(self.norm(x.reshape(n * count, hidden)).view(n, count, hidden).transpose(0, 1))
        ops.scale_(means, 1 / count)
        return self.projection.project(self.token_norm(means))
