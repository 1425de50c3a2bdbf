"""The tower of pictures of Gemma 4: patches of a picture of any aspect, and a token for each square of them.

    x = embed(patches) + by_column + by_row;  blocks;  mean of each square of patches * sqrt(hidden);  norm;  product

    x += post_norm(attention(norm(x)));  x += post_norm(down(gelu(gate(norm(x))) * up(norm(x))))        a block

Queries, keys and values are normalised, the scores are not scaled, and the halves of a head are rotated by the column
and the row of a patch. The patches of a token follow each other, so that the mean is one of rows. In E2B and E4B, the
projections of blocks clamp what they read and write (clamped.py).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tilerank.kernels import ops
from tilerank.kernels.attention import store_kv
from tilerank.kernels.heads import part_of_heads
from tilerank.kernels.kv_pages import KVPages
from tilerank.kernels.weight_formats import Float
from tilerank.loader.fields import Fields
from tilerank.parallel.linear import Linear
from tilerank.parallel.norm import RMSNorm, WeightlessNorm
from tilerank.parallel.parameters import Layer, PackedParameter, WholeParameter
from tilerank.parallel.sharding import Sharding

from ...media.gemma4 import Gemma4Settings, patches_of_token
from ...protocol.errors import EngineError
from ..gated_mlp import GatedMLP
from ..text_config import MAX_WIDTH, read_heads
from .clamped import Clamp, ClampedMLP, ClampedQKV, ClampedRowParallelLinear
from .pictures import PictureConfig, PictureTower
from .tower import BlockNames, BlockShape, ComputedBlock, PackedLayout, RowLayout, TowerAttention
from .vision import angle_table, patch_places

_MAX_LAYERS, _MAX_PLACES = 1 << 10, 1 << 16
_BLOCK = BlockNames(
    norms=("input_layernorm", "pre_feedforward_layernorm"),
    attention="self_attn",
    qkv=("q_proj.linear", "k_proj.linear", "v_proj.linear"),
    out="o_proj.linear",
)
_POST_NORMS = ("post_attention_layernorm", "post_feedforward_layernorm")
_DEFAULTS = {
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "position_embedding_size": 10240,
    "rope_parameters": {"rope_theta": 100.0},
}


@dataclass(frozen=True)
class Gemma4VisionConfig(PictureConfig):
    """The shape of the tower. places: rows and columns of patches that have a position. standardizes: tokens are
    shifted and scaled. clamps: the projections of blocks have bounds."""

    eps: float
    places: int
    theta: float
    standardizes: bool
    clamps: bool


def read_vision_config(config: Fields, out_hidden: int) -> Gemma4VisionConfig:
    """Read and check the fields of the tower. config: those of config.json. Raises ConfigError."""
    c = config.object("vision_config").with_defaults(_DEFAULTS)
    if c.text("hidden_activation") != "gelu_pytorch_tanh":
        raise c.fail("hidden_activation", "'gelu_pytorch_tanh'")
    if c.flag("attention_bias"):
        raise c.fail("attention_bias", "false (not supported)")
    hidden, heads, head_dim = read_heads(c, "hidden_size", "num_attention_heads")
    if c.has("num_key_value_heads") and c.integer("num_key_value_heads", 1, heads) != heads:
        raise c.fail("num_key_value_heads", f"the {heads} of num_attention_heads")
    rope = c.object("rope_parameters")
    if rope.has("rope_type") and rope.text("rope_type") not in ("default", "axial"):
        raise rope.fail("rope_type", "'default' or 'axial'")
    patch, merged = patches_of_token(c)
    return Gemma4VisionConfig(
        hidden=hidden,
        heads=heads,
        head_dim=head_dim,
        width=c.integer("intermediate_size", 1, MAX_WIDTH),
        layers=c.integer("num_hidden_layers", 1, _MAX_LAYERS),
        eps=c.number("rms_norm_eps", 0.0, 1.0),
        patch=patch,
        merged=merged,
        places=c.integer("position_embedding_size", 1, _MAX_PLACES),
        theta=rope.number("rope_theta", 1.0, 1e15),
        standardizes=c.flag("standardize"),
        clamps=c.flag("use_clipped_linears"),
        out_hidden=out_hidden,
    )


class AxialLayout(PackedLayout):
    """The patches of a picture: the halves of a head are rotated by the column and by the row."""

    def __init__(self, columns: Tensor, rows: Tensor) -> None:
        """columns, rows: [t, 2, head_dim / 4], cosines and sines of every patch."""
        count = columns.shape[0]
        super().__init__(torch.tensor([0, count], dtype=torch.int32), count)
        self._angles = columns, rows

    def rotate(self, q: Tensor, k: Tensor, rows: slice) -> None:
        half = q.shape[2] // 2
        for number, angles in enumerate(self._angles):
            first = number * half
            ops.rotary_(part_of_heads(q, first, half), part_of_heads(k, first, half), angles[rows])


class NormedTowerAttention(TowerAttention):
    """Attention with norms of queries, keys and values, whose scores are not scaled."""

    def __init__(self, name: str, shape: BlockShape, names: BlockNames, sharding: Sharding) -> None:
        super().__init__(name, shape, names, sharding)
        self.q_norm = RMSNorm(f"{name}.q_norm", shape.head_dim, shape.eps, sharding)
        self.k_norm = RMSNorm(f"{name}.k_norm", shape.head_dim, shape.eps, sharding)
        self.v_norm = WeightlessNorm(shape.head_dim, shape.eps, sharding)
        self.scale = 1.0

    def project(self, x: Tensor, rows: slice, layout: RowLayout, pages: KVPages) -> Tensor:
        q, k, v = self.qkv(x)
        q, k = self.q_norm(q), self.k_norm(k)
        layout.rotate(q, k, rows)
        store_kv(k, self.v_norm(v), pages, layout.slots[rows])
        return q


class ClampedTowerAttention(NormedTowerAttention):
    """This attention with bounds of its projections."""

    qkv_type = ClampedQKV
    out_type = ClampedRowParallelLinear


class NormedTowerBlock(ComputedBlock):
    """A block with norms before and after attention and MLP.

    clamps: the projections have bounds.
    """

    def __init__(self, name: str, shape: BlockShape, sharding: Sharding, *, clamps: bool) -> None:
        def norms(names: tuple[str, str]) -> list[RMSNorm]:
            return [RMSNorm(f"{name}.{norm}", shape.hidden, shape.eps, sharding) for norm in names]

        kind = ClampedTowerAttention if clamps else NormedTowerAttention
        attention = kind(f"{name}.{_BLOCK.attention}", shape, _BLOCK, sharding)
        mlp = (ClampedMLP if clamps else _plain_mlp)(f"{name}.mlp", shape, sharding)
        super().__init__(norms(_BLOCK.norms), attention, mlp, shape, 3, sharding)
        self.post_norms = norms(_POST_NORMS)
        ends = (f"{_BLOCK.attention}.{_BLOCK.out}", "mlp.down_proj") if clamps else ()
        self.outputs = [Clamp(f"{name}.{end}", "output", sharding) for end in ends]

    def finish(self, which: int, added: Tensor) -> Tensor:
        return self.post_norms[which](self.outputs[which](added) if self.outputs else added)


def _plain_mlp(name: str, shape: BlockShape, sharding: Sharding) -> GatedMLP:
    return GatedMLP(
        name,
        shape.hidden,
        shape.width,
        sharding,
        projections=("gate_proj.linear", "up_proj.linear"),
        down="down_proj.linear",
        activation="gelu_tanh_mul",
        dimension=f"{shape.kind} MLP width",
    )


class _PatchWeight(PackedParameter):
    """A projection of patches, stored for values in the order (y, x, channel) and held for (channel, y, x)."""

    def write(self, rows: Tensor, row: int) -> None:
        side = int((self.k // 3) ** 0.5)
        super().write(rows.view(-1, side, side, 3).permute(0, 3, 1, 2).flatten(1), row)


class Gemma4Tower(PictureTower):
    """The encoder of Gemma 4. whole_media: the tokens of a picture attend to all of it."""

    config: Gemma4VisionConfig

    def __init__(
        self,
        name: str,
        projector: str,
        c: Gemma4VisionConfig,
        settings: Gemma4Settings | None,
        sharding: Sharding,
        *,
        whole_media: bool,
    ) -> None:
        """name, projector: of both in the checkpoint."""
        super().__init__(c, None if settings is None else settings.preprocessing, sharding)
        self.whole_tokens = settings.most if settings is not None and whole_media else 0
        values = 3 * c.patch**2
        self.embedding = Linear(c.hidden, values, Float(sharding.dtype), None)
        self.embedding.weight = _PatchWeight(c.hidden, values, Float(sharding.dtype))
        shape = (c.hidden, values)
        self.embedding.weight.fill(f"{name}.patch_embedder.input_proj.weight", shape, *(slice(0, n) for n in shape))
        table = (2, c.places, c.hidden)
        self.positions = WholeParameter(f"{name}.patch_embedder.position_embedding_table", table, sharding.dtype)
        block = BlockShape(c.hidden, c.heads, c.head_dim, c.width, c.eps, "gelu_tanh", bias=False, kind="vision")
        layers = (f"{name}.encoder.layers.{i}" for i in range(c.layers))
        self.blocks = [NormedTowerBlock(layer, block, sharding, clamps=c.clamps) for layer in layers]
        parts = ("std_bias", "std_scale") if c.standardizes else ()
        self.standard = [WholeParameter(f"{name}.{part}", (c.hidden,), torch.float32) for part in parts]
        self.token_norm = WeightlessNorm(c.hidden, c.eps, sharding)
        self.projection = Linear(c.out_hidden, c.hidden, Float(sharding.dtype), None)
        whole = (c.out_hidden, c.hidden)
        self.projection.weight.fill(f"{projector}.embedding_projection.weight", whole, *(slice(0, n) for n in whole))

    def layout(self, rows: int, columns: int) -> AxialLayout:
        c = self.config
        if (most := max(rows, columns)) > c.places:
            raise EngineError(f"encoding: expected at most {c.places} patches of a side, found {most}")
        row, column = patch_places(slice(0, rows), columns, c.merged)
        angles = angle_table(most, c.head_dim, c.theta).to(self._sharding.dtype)
        return AxialLayout(angles[column], angles[row])

    def embed(self, values: Tensor, row: Tensor, column: Tensor) -> Tensor:
        by_column, by_row = self.positions.data
        places = ops.add(ops.take_rows(by_column, column), ops.take_rows(by_row, row))
        return ops.add(self.embedding.project(values), places)

    def project(self, x: Tensor) -> Tensor:
        dtype = self._sharding.dtype
        means = ops.sum_parts(x.float().transpose(0, 1).contiguous())
        ops.scale_(means, 1 / x.shape[1])
        tokens = means.to(dtype).float() * self.config.hidden**0.5
        if self.standard:
            bias, scale = self.standard
            tokens = (tokens - bias.data) * scale.data
        return self.projection.project(self.token_norm(tokens.to(dtype)))

    def projections(self) -> tuple[Layer, ...]:
        return (self.projection,)
