"""mllama (Llama-3.2-Vision, model card meta-llama/Llama-3.2-11B-Vision): Llama with layers of gated cross-attention.

The cross-attention layers stand among the others and see the encoded pictures of the prompt. The tokens of a prompt
without pictures pass them unchanged. As transformers 5.23 does it, a token before the first picture attends to all of
them and leaves out the MLPs of these layers.
"""

from dataclasses import replace

from tilerank.kernels.kv_pages import KVPages
from tilerank.loader.card import ModelCard
from tilerank.loader.fields import Fields
from tilerank.loader.files import is_listed
from tilerank.parallel.sharding import Sharding

from ..media.mllama import read_tile_settings
from ..media.settings import NESTED, PICTURES
from .attention import SelfAttention
from .cross_attention import CrossAttention, TanhGate, read_crossing_layers
from .decoder import Decoder, DecoderNames, Mixer
from .gated_mlp import GatedMLP
from .mllama_vision import MllamaTower, read_mllama_vision_config
from .text_config import TextConfig, read_text_config

_SPARE_IDS = 8
"""The embedding has rows for more ids than the head: the token of a picture is embedded and never generated."""


def mllama(card: ModelCard, sharding: Sharding) -> Decoder:
    """MllamaForConditionalGeneration, and MllamaForCausalLM, whose prompts have no pictures: it is Llama without the
    layers of cross-attention."""
    if not card.fields.has("text_config"):
        c = read_text_config(card.fields)
        crossing = read_crossing_layers(card.fields, c.num_layers)
        names = DecoderNames(left_out=tuple(f"model.layers.{layer}." for layer in crossing))
        return _decoder(card, c, card.fields, sharding, names, None)
    text, vision = card.fields.object("text_config"), card.fields.object("vision_config")
    c = read_text_config(text)
    names = DecoderNames(
        embedding="language_model.model.embed_tokens",
        norm="language_model.model.norm",
        head="language_model.lm_head",
        layer="language_model.model.layers.{}",
    )
    model_dir = card.fields.path.parent
    settings = read_tile_settings(model_dir) if any(is_listed(model_dir, n) for n in (NESTED, PICTURES)) else None
    floats = replace(sharding, cached_tokens=0, formats=None, kv_dtype=None)
    tower = MllamaTower(read_mllama_vision_config(vision), c.hidden_size, settings, floats)
    return _decoder(card, c, text, sharding, names, tower)


def _decoder(
    card: ModelCard, c: TextConfig, text: Fields, sharding: Sharding, names: DecoderNames, tower: MllamaTower | None
) -> Decoder:
    crossing = read_crossing_layers(text, c.num_layers)

    def mixer(name: str, layer: int) -> Mixer[KVPages]:
        if layer in crossing:
            return CrossAttention(name, c, sharding, f"{names.layer.format(layer)}.cross_attn_attn_gate")
        return SelfAttention(name, c, sharding, qkv_bias=False, out_bias=False, head_norms=False)

    def mlp(name: str, _: int) -> GatedMLP:
        return GatedMLP(name, c.hidden_size, c.intermediate_size, sharding)

    def mlp_gate(layer: int) -> TanhGate | None:
        return TanhGate(f"{names.layer.format(layer)}.cross_attn_mlp_gate", sharding) if layer in crossing else None

    mixers = tuple("cross_attn" if layer in crossing else "self_attn" for layer in range(c.num_layers))
    return Decoder(
        card,
        c,
        sharding,
        replace(names, mixer=mixers),
        mixer,
        mlp,
        tower,
        mlp_gate=mlp_gate,
        spare_ids=_SPARE_IDS,
    )


MODELS = {"mllama": mllama, "mllama_text_model": mllama}
