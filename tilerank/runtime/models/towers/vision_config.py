"""The fields of config.json that vision towers share."""

from dataclasses import dataclass
from math import isqrt

from tilerank.loader.fields import Fields

from ..text_config import MAX_WIDTH, read_heads

_MAX_DEPTH = 1 << 10
_MAX_SIDE = 1 << 10


_DEFAULTS = {
    "depth": 27,
    "hidden_size": 1152,
    "hidden_act": "gelu_pytorch_tanh",
    "intermediate_size": 4304,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [8, 16, 24],
}
"""Defaults of transformers 5.23 for fields that released files may leave out."""


@dataclass(frozen=True)
class VisionConfig:
    """The shape of a vision tower; counts are the model's own, before any padding for ranks.

    merge_size: rows and columns of the block of patches that becomes one token. position_side: rows and columns of the
    table of position embeddings. deepstack: blocks whose output makes another level, ascending.
    """

    depth: int
    hidden_size: int
    num_heads: int
    head_dim: int
    intermediate_size: int
    out_hidden_size: int
    patch_size: int
    temporal_patch_size: int
    merge_size: int
    position_side: int
    deepstack: tuple[int, ...]


def read_vision_config(
    c: Fields, out_hidden_size: int, *, deepstack: bool = True, decoder_layers: int | None = None
) -> VisionConfig:
    """Read and check the fields. Raises ConfigError, also for what would change the result if ignored.

    c: the fields of the tower alone. out_hidden_size: of the decoder. deepstack: False for a family whose towers make
    no other levels, whatever the file lists. decoder_layers: how many layers the decoder has, if it adds levels after
    them; there are fewer levels.
    """
    c = c.with_defaults(_DEFAULTS)
    _expect(c, "hidden_act", "gelu_pytorch_tanh")
    _expect(c, "in_channels", 3)
    _expect(c, "out_hidden_size", out_hidden_size)
    if c.has("rope_parameters"):
        rope = c.object("rope_parameters")
        _expect(rope, "rope_type", "axial")
        if rope.number("rope_theta", 1.0, 1e15) != 10000.0:
            raise rope.fail("rope_theta", "10000")
    hidden, heads, head_dim = read_heads(c, "hidden_size", "num_heads")
    positions = c.integer("num_position_embeddings", 1, _MAX_SIDE**2)
    if isqrt(positions) ** 2 != positions:
        raise c.fail("num_position_embeddings", "the square of an integer")
    depth = c.integer("depth", 1, _MAX_DEPTH)
    return VisionConfig(
        depth=depth,
        hidden_size=hidden,
        num_heads=heads,
        head_dim=head_dim,
        intermediate_size=c.integer("intermediate_size", 1, MAX_WIDTH),
        out_hidden_size=out_hidden_size,
        patch_size=c.integer("patch_size", 1, 256),
        temporal_patch_size=c.integer("temporal_patch_size", 1, 16),
        merge_size=c.integer("spatial_merge_size", 1, 16),
        position_side=isqrt(positions),
        deepstack=_deepstack(c, depth, decoder_layers) if deepstack else (),
    )


def _expect(c: Fields, key: str, value: int | str) -> None:
    found = c.values.get(key)
    if type(found) is not type(value) or found != value:
        raise c.fail(key, repr(value))


def _deepstack(c: Fields, depth: int, decoder_layers: int | None) -> tuple[int, ...]:
    key = "deepstack_visual_indexes"
    blocks = c.values.get(key)
    if not isinstance(blocks, list) or any(type(i) is not int or not 0 <= i < depth for i in blocks):
        raise c.fail(key, f"a list of blocks from 0 to {depth - 1}")
    if blocks != sorted(set(blocks)):
        raise c.fail(key, "blocks in ascending order")
    if decoder_layers is not None and len(blocks) >= decoder_layers:
        raise c.fail(key, f"fewer blocks than the {decoder_layers} layers of the language model")
    return tuple(blocks)
