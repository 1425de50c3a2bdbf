"""Llama 3.x (arXiv 2407.21783), dense, and SmolLM3 (huggingface.co/blog/smollm3).

SmolLM3 is Llama without the rotation of heads by positions in every fourth layer.
"""

from tilerank.loader.card import ModelCard
from tilerank.loader.fields import Fields
from tilerank.parallel.sharding import Sharding

from .attention import SelfAttention
from .decoder import Decoder, DecoderNames
from .gated_mlp import dense_mlps
from .text_config import read_text_config

_USUAL_INTERVAL, _MAX_INTERVAL = 4, 1 << 12


def llama(card: ModelCard, sharding: Sharding) -> Decoder:
    """LlamaForCausalLM. `attention_bias` and `mlp_bias` of config.json give all projections of that part a bias."""
    c = read_text_config(card.fields)
    bias, mlp_bias = card.fields.flag("attention_bias"), card.fields.flag("mlp_bias")

    def mixer(name: str, _: int) -> SelfAttention:
        return SelfAttention(name, c, sharding, qkv_bias=bias, out_bias=bias, head_norms=False)

    return Decoder(card, c, sharding, DecoderNames(), mixer, dense_mlps(c, sharding, bias=mlp_bias))


def smollm3(card: ModelCard, sharding: Sharding) -> Decoder:
    """SmolLM3ForCausalLM."""
    c = read_text_config(card.fields)
    rotated = _rotated_layers(card.fields, c.num_layers)
    bias, mlp_bias = card.fields.flag("attention_bias"), card.fields.flag("mlp_bias")

    def mixer(name: str, layer: int) -> SelfAttention:
        return SelfAttention(name, c, sharding, qkv_bias=bias, out_bias=bias, head_norms=False, rotated=rotated[layer])

    return Decoder(card, c, sharding, DecoderNames(), mixer, dense_mlps(c, sharding, bias=mlp_bias))


def _rotated_layers(c: Fields, num_layers: int) -> list[bool]:
    """Return which layers have rotations: as `no_rope_layers` lists them, where 1 is one that has; or else all but
    every n-th."""
    key, interval = "no_rope_layers", "no_rope_layer_interval"
    if not c.has(key):
        n = c.integer(interval, 1, _MAX_INTERVAL) if c.has(interval) else _USUAL_INTERVAL
        return [(i + 1) % n != 0 for i in range(num_layers)]
    listed = c.values[key]
    if not isinstance(listed, list) or len(listed) != num_layers or any(one not in (0, 1) for one in listed):
        raise c.fail(key, f"0 or 1 for each of the {num_layers} layers")
    return [bool(one) for one in listed]


MODELS = {"llama": llama, "smollm3": smollm3}
