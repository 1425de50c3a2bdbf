"""The tower of SigLIP (arXiv 2303.15343) with the projector of Gemma 3: a square picture as a square of tokens.

    x = embed(patches) + positions;  the blocks of tower.py;  norm;  mean of each square of patches;  norm;  product

All patches attend to each other. The patches of a token follow each other, so that the mean is one of rows.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tilerank.kernels import ops
from tilerank.kernels.weight_formats import Float
from tilerank.loader.fields import Fields
from tilerank.parallel.linear import Linear
from tilerank.parallel.norm import LayerNorm, RMSNorm
from tilerank.parallel.parameters import FusedPlace, Layer, WholeParameter
from tilerank.parallel.sharding import Sharding

from ...media.gemma3 import Gemma3Settings, patches_of_token
from ..text_config import MAX_WIDTH, read_heads
from .pictures import PictureConfig, PictureTower
from .tower import BlockNames, BlockShape, PackedLayout, TowerBlock

_MAX_LAYERS = 1 << 10
_BLOCK = BlockNames(
    norms=("layer_norm1", "layer_norm2"),
    attention="self_attn",
    qkv=("q_proj", "k_proj", "v_proj"),
    out="out_proj",
    mlp=("mlp.fc1", "mlp.fc2"),
)


@dataclass(frozen=True)
class SiglipConfig(PictureConfig):
    """The shape of the tower. side: patches of a side of a picture."""

    eps: float
    side: int

    @property
    def tokens(self) -> int:
        """Tokens of a picture."""
        return (self.side // self.merged) ** 2


def read_siglip_config(config: Fields, out_hidden: int) -> SiglipConfig:
    """Read and check the fields of the tower. config: those of config.json. Raises ConfigError."""
    c = config.object("vision_config").with_defaults({"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6})
    if c.text("hidden_act") != "gelu_pytorch_tanh":
        raise c.fail("hidden_act", "'gelu_pytorch_tanh'")
    if c.has("num_channels") and c.integer("num_channels", 1, 1 << 10) != 3:
        raise c.fail("num_channels", "3")
    hidden, heads, head_dim = read_heads(c, "hidden_size", "num_attention_heads")
    patch, side, merged = patches_of_token(config, c)
    return SiglipConfig(
        hidden=hidden,
        heads=heads,
        head_dim=head_dim,
        width=c.integer("intermediate_size", 1, MAX_WIDTH),
        layers=c.integer("num_hidden_layers", 1, _MAX_LAYERS),
        eps=c.number("layer_norm_eps", 0.0, 1.0),
        patch=patch,
        side=side,
        merged=merged,
        out_hidden=out_hidden,
    )


class SiglipTower(PictureTower):
    """The encoder of Gemma 3, for pictures of `side` by `side` patches."""

    config: SiglipConfig

    def __init__(
        self, name: str, projector: str, c: SiglipConfig, settings: Gemma3Settings | None, sharding: Sharding
    ) -> None:
        """name, projector: of both in the checkpoint."""
        super().__init__(c, None if settings is None else settings.preprocessing, sharding)
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

    def layout(self, rows: int, columns: int) -> PackedLayout:
        patches = rows * columns
        return PackedLayout(torch.tensor([0, patches], dtype=torch.int32), patches)

    def embed(self, values: Tensor, row: Tensor, column: Tensor) -> Tensor:
        places = ops.take_rows(self.positions.data, row * self.config.side + column)
        return ops.add(self.embedding.project(values), places)

    def project(self, x: Tensor) -> Tensor:
        n, count, hidden = x.shape
        means = ops.sum_parts(self.norm(x.reshape(n * count, hidden)).view(n, count, hidden).transpose(0, 1))
        ops.scale_(means, 1 / count)
        return self.projection.project(self.token_norm(means))

    def projections(self) -> tuple[Layer, ...]:
        return (self.projection,)
