"""The tower of Pixtral (arXiv 2410.07073) with the projector of Mistral Small 3.1: pictures of any aspect.

    x = norm(embed(patches));  x += attention(norm(x));  x += down(silu(gate(norm(x))) * up(norm(x)))       a block
    token = fc2(gelu(fc1(merge(norm(the patches of a square, channel by channel)))))

All patches of a picture attend to each other. The frequencies of a head follow the row and the column of a patch in
turn. The patches of a token follow each other.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tilerank.kernels import ops
from tilerank.kernels.weight_formats import Float
from tilerank.loader.fields import Fields
from tilerank.parallel.linear import Linear
from tilerank.parallel.norm import RMSNorm
from tilerank.parallel.parameters import Layer, PackedParameter
from tilerank.parallel.sharding import Sharding

from ...media.mistral3 import Mistral3Settings, patches_of_token
from ..gated_mlp import GatedMLP
from ..text_config import MAX_WIDTH, read_heads
from .pictures import PictureConfig, PictureTower
from .tower import BlockNames, BlockShape, ComputedBlock, PackedLayout, TowerAttention, TowerMLP
from .vision import patch_places

_EPS = 1e-5
_MAX_LAYERS = 1 << 10
_BLOCK = BlockNames(
    norms=("attention_norm", "ffn_norm"), attention="attention", qkv=("q_proj", "k_proj", "v_proj"), out="o_proj"
)


@dataclass(frozen=True)
class PixtralConfig(PictureConfig):
    """The shape of the tower. token_eps: of the norm before the projector. bias: whether the last two projections of
    the projector have biases."""

    theta: float
    token_eps: float
    bias: bool


def read_pixtral_config(config: Fields, text: Fields) -> PixtralConfig:
    """Read and check the fields of the tower. config, text: those of config.json and of the text model. Raises
    ConfigError."""
    c = config.object("vision_config").with_defaults({"hidden_act": "gelu", "rope_theta": 10000.0})
    whole = config.with_defaults({"projector_hidden_act": "gelu", "vision_feature_layer": -1})
    if c.text("hidden_act") != "silu":
        raise c.fail("hidden_act", "'silu'")
    if whole.text("projector_hidden_act") != "gelu":
        raise whole.fail("projector_hidden_act", "'gelu'")
    if whole.values["vision_feature_layer"] != -1:
        raise whole.fail("vision_feature_layer", "-1")
    if c.has("num_channels") and c.integer("num_channels", 1, 1 << 10) != 3:
        raise c.fail("num_channels", "3")
    rope = c.object("rope_parameters") if c.has("rope_parameters") else c
    if rope.has("rope_type") and rope.text("rope_type") not in ("default", "axial"):
        raise rope.fail("rope_type", "'default' or 'axial'")
    hidden, heads, head_dim = read_heads(c, "hidden_size", "num_attention_heads")
    patch, merged = patches_of_token(config, c)
    return PixtralConfig(
        hidden=hidden,
        heads=heads,
        head_dim=head_dim,
        width=c.integer("intermediate_size", 1, MAX_WIDTH),
        layers=c.integer("num_hidden_layers", 1, _MAX_LAYERS),
        patch=patch,
        merged=merged,
        theta=rope.number("rope_theta", 1.0, 1e15),
        token_eps=text.number("rms_norm_eps", 0.0, 1.0),
        bias=config.flag("multimodal_projector_bias"),
        out_hidden=text.integer("hidden_size", 1, MAX_WIDTH),
    )


class PixtralLayout(PackedLayout):
    """The patches of a picture. angles: [t, 2, head_dim / 2], cosines and sines of every patch."""

    def __init__(self, angles: Tensor) -> None:
        count = angles.shape[0]
        super().__init__(torch.tensor([0, count], dtype=torch.int32), count)
        self._angles = angles

    def rotate(self, q: Tensor, k: Tensor, rows: slice) -> None:
        ops.rotary_(q, k, self._angles[rows])


class PixtralBlock(ComputedBlock):
    """A block with RMS norms and a gated MLP, without biases."""

    def __init__(self, name: str, shape: BlockShape, sharding: Sharding) -> None:
        mlp = GatedMLP(f"{name}.feed_forward", shape.hidden, shape.width, sharding, dimension=f"{shape.kind} MLP width")
        norms = [RMSNorm(f"{name}.{norm}", shape.hidden, shape.eps, sharding) for norm in _BLOCK.norms]
        attention = TowerAttention(f"{name}.{_BLOCK.attention}", shape, _BLOCK, sharding)
        super().__init__(norms, attention, mlp, shape, 3, sharding)

    def finish(self, which: int, added: Tensor) -> Tensor:
        return added


class _MergingWeight(PackedParameter):
    """A projection of squares of patches, stored for values in the order (channel, patch), held for (patch, channel).

    patches: of a square.
    """

    def __init__(self, hidden: int, patches: int, sharding: Sharding) -> None:
        super().__init__(hidden, hidden * patches, Float(sharding.dtype))
        self._patches = patches

    def write(self, rows: Tensor, row: int) -> None:
        super().write(rows.view(len(rows), -1, self._patches).transpose(1, 2).flatten(1), row)


class PixtralTower(PictureTower):
    """The encoder of Mistral Small 3.1."""

    config: PixtralConfig

    def __init__(
        self, name: str, projector: str, c: PixtralConfig, settings: Mistral3Settings | None, sharding: Sharding
    ) -> None:
        """name, projector: of both in the checkpoint."""
        super().__init__(c, None if settings is None else settings.preprocessing, sharding)
        shape = (c.hidden, 3, c.patch, c.patch)
        self.embedding = Linear(c.hidden, 3 * c.patch**2, Float(sharding.dtype), None)
        self.embedding.weight.fill(f"{name}.patch_conv.weight", shape, *(slice(0, size) for size in shape))
        self.norm = RMSNorm(f"{name}.ln_pre", c.hidden, _EPS, sharding)
        block = BlockShape(c.hidden, c.heads, c.head_dim, c.width, _EPS, "silu_mul", bias=False, kind="vision")
        layers = (f"{name}.transformer.layers.{i}" for i in range(c.layers))
        self.blocks = [PixtralBlock(layer, block, sharding) for layer in layers]
        self.token_norm = RMSNorm(f"{projector}.norm", c.hidden, c.token_eps, sharding)
        merged = (c.hidden, c.hidden * c.merged**2)
        self.merging = Linear(*merged, Float(sharding.dtype), None)
        self.merging.weight = _MergingWeight(c.hidden, c.merged**2, sharding)
        whole = (slice(0, size) for size in merged)
        self.merging.weight.fill(f"{projector}.patch_merger.merging_layer.weight", merged, *whole)
        names, sizes = (f"{projector}.linear_1", f"{projector}.linear_2"), (c.hidden, c.out_hidden, c.out_hidden)
        self.mlp = TowerMLP(names, sizes, "gelu", "vision projector width", sharding, bias=c.bias)

    def layout(self, rows: int, columns: int) -> PixtralLayout:
        """Return the layout, with cosines and sines [t, 2, head_dim / 2]. Even frequencies follow the row."""
        c = self.config
        frequencies = 1.0 / c.theta ** (torch.arange(0, c.head_dim, 2).float() / c.head_dim)
        places = patch_places(slice(0, rows), columns, c.merged)
        parts = []
        for first, place in enumerate(places):
            angles = torch.outer(torch.arange(int(place.max()) + 1).float(), frequencies[first::2])
            parts.append(torch.stack([angles.cos(), angles.sin()], 1)[place])
        return PixtralLayout(torch.cat(parts, 2).to(self._sharding.dtype))

    def embed(self, values: Tensor, row: Tensor, column: Tensor) -> Tensor:
        return self.norm(self.embedding.project(values))

    def project(self, x: Tensor) -> Tensor:
        normed = self.token_norm(x.view(-1, x.shape[2])).view(len(x), -1)
        return self._sharding.sum(self.mlp(self.merging.project(normed)))

    def projections(self) -> tuple[Layer, ...]:
        return self.merging, self.mlp

    @property
    def token_cost(self) -> float:
        c = self.config
        return 2.0 * self._sharding.size * c.hidden**2 * c.merged**2 + 2.0 * c.out_hidden * (c.hidden + c.out_hidden)
