"""Llama 3.x (arXiv 2407.21783), dense, and two that differ from it in little.

SmolLM3 (huggingface.co/blog/smollm3) has no rotation of heads by positions in every fourth layer. Phi-3, 3.5, 4 and
4-mini (arXiv 2404.14219, 2412.08905, 2503.01743) store projections of one input as one, and have LongRoPE in a part of
each head and a window in all layers, as far as config.json says so.
"""

from tilerank.loader.card import ModelCard
from tilerank.loader.fields import Fields
from tilerank.parallel.sharding import Sharding

from .attention import SelfAttention
from .decoder import Decoder, DecoderNames
from .gated_mlp import dense_mlps
from .text_config import read_text_config, read_window

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


def phi3(card: ModelCard, sharding: Sharding) -> Decoder:
    """Phi3ForCausalLM."""
    c = read_text_config(card.fields, usual_rotary_part=1.0)
    window = read_window(card.fields, card.context_length)

    def mixer(name: str, _: int) -> SelfAttention:
        return SelfAttention(
            name,
            c,
            sharding,
            qkv_bias=False,
            out_bias=False,
            head_norms=False,
            window=window,
            projections=("qkv_proj",),
        )

    mlp = dense_mlps(c, sharding, projections=("gate_up_proj",))
    return Decoder(card, c, sharding, DecoderNames(), mixer, mlp)


MODELS = {"llama": llama, "phi3": phi3, "smollm3": smollm3}
