"""OLMo 3 (arXiv 2512.13961): norms of the sums over the ranks alone, and of all heads of q and k together.

    x += norm(mixer(x));  x += norm(mlp(x))

Most layers attend to a window, every fourth to all tokens; only the latter scale their rotation.
"""

from dataclasses import replace

from tilerank.loader.card import ModelCard
from tilerank.loader.rope import FULL_ATTENTION, SLIDING_ATTENTION, read_layer_rope
from tilerank.parallel.sharding import Sharding

from .attention import SelfAttention
from .decoder import Decoder, DecoderNames
from .gated_mlp import dense_mlps
from .text_config import MAX_WINDOW, read_layer_types, read_text_config

_KINDS = (SLIDING_ATTENTION, FULL_ATTENTION)
_PATTERN = 4
_NAMES = DecoderNames(
    mixer_norm=None,
    mixer_post_norm="post_attention_layernorm",
    mlp_norm=None,
    mlp_post_norm="post_feedforward_layernorm",
)


def olmo3(card: ModelCard, sharding: Sharding) -> Decoder:
    """Olmo3ForCausalLM."""
    fields = card.fields
    full = read_text_config(fields, layer_kinds=_KINDS, rope_kind=FULL_ATTENTION)
    sliding = replace(full, rope=read_layer_rope(fields, full.rotary_dim, SLIDING_ATTENTION))
    usual = [FULL_ATTENTION if (i + 1) % _PATTERN == 0 else SLIDING_ATTENTION for i in range(full.num_layers)]
    kinds = read_layer_types(fields, full.num_layers, _KINDS) or usual
    window = fields.integer("sliding_window", 1, MAX_WINDOW) if SLIDING_ATTENTION in kinds else 0
    bias = fields.flag("attention_bias")

    def mixer(name: str, layer: int) -> SelfAttention:
        slides = kinds[layer] == SLIDING_ATTENTION
        return SelfAttention(
            name,
            sliding if slides else full,
            sharding,
            qkv_bias=bias,
            out_bias=bias,
            head_norms=False,
            joint_norm=True,
            window=window if slides else 0,
        )

    return Decoder(card, full, sharding, _NAMES, mixer, dense_mlps(full, sharding))


MODELS = {"olmo3": olmo3}
