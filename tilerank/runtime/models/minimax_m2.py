"""MiniMax-M2, 2.1, 2.5 and 2.7: norms over all heads of the queries and of the keys, and a mixture in every layer.

mlp(x) = sum over the chosen experts e of weight_e * w2_e(silu(w1_e(x)) * w3_e(x))

The weights are the sigmoids of the chosen experts' logits, divided by their sum; experts are chosen by sigmoid + bias.
Layers after the last, which predict several tokens at once, are not used.
"""

from tilerank.loader.card import ModelCard
from tilerank.loader.fields import Fields
from tilerank.parallel.sharding import Sharding

from .attention import SelfAttention
from .decoder import Decoder, DecoderNames
from .deepseek import RoutedConfig, RoutedMLP
from .qwen_moe import read_expert_count
from .text_config import MAX_WIDTH, TextConfig, read_text_config

_NAMES = DecoderNames(mlp="block_sparse_moe", drafts=True)
_SUPPORTED = {
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
    "use_routing_bias": True,
    "scoring_func": "sigmoid",
    "shared_intermediate_size": 0,
}
_FULL_ATTENTION = 1
_ROTATED = "rotary_dim"


def minimax_m2(card: ModelCard, sharding: Sharding) -> Decoder:
    """MiniMaxM2ForCausalLM."""
    fields = card.fields
    _refuse_unsupported(fields)
    c = _text_config(fields)
    count = read_expert_count(fields, "num_local_experts", 1)
    routed = RoutedConfig(
        count=count,
        top_k=fields.integer("num_experts_per_tok", 1, count),
        width=fields.integer("intermediate_size", 1, MAX_WIDTH),
    )

    def mixer(name: str, _: int) -> SelfAttention:
        return SelfAttention(name, c, sharding, qkv_bias=False, out_bias=False, head_norms=False, joint_norm=True)

    def mlp(name: str, _: int) -> RoutedMLP:
        projections, bias = ("w1", "w3", "w2"), "e_score_correction_bias"
        return RoutedMLP(name, c.hidden_size, routed, sharding, bias=bias, projections=projections)

    return Decoder(card, c, sharding, _NAMES, mixer, mlp)


def _text_config(fields: Fields) -> TextConfig:
    """Return the fields of the decoder. The released files say how many dimensions of a head are rotated; files of
    transformers 5 say which part."""
    part = (
        fields.integer(_ROTATED, 2, 1 << 12) / fields.integer("head_dim", 2, 1 << 12) if fields.has(_ROTATED) else 1.0
    )
    c = read_text_config(fields.with_defaults({"partial_rotary_factor": part}), dense=False, usual_rotary_part=part)
    if fields.has(_ROTATED) and fields.values[_ROTATED] != c.rotary_dim:
        raise fields.fail(_ROTATED, f"{c.rotary_dim} dimensions, the part of a head that partial_rotary_factor says")
    return c


def _refuse_unsupported(c: Fields) -> None:
    for key, supported in _SUPPORTED.items():
        if c.has(key) and c.values[key] != supported:
            raise c.fail(key, repr(supported))
    key = "attn_type_list"
    kinds = c.values[key] if c.has(key) else []
    if not isinstance(kinds, list) or any(kind != _FULL_ATTENTION for kind in kinds):
        raise c.fail(key, f"a list of {_FULL_ATTENTION} only (other kinds of attention are not supported)")


MODELS = {"minimax_m2": minimax_m2}
