"""MOSS-VL (arXiv 2608.15045): the decoder of Qwen3 with layers of gated cross-attention to the frames of the prompt.

The cross-attention layers stand among the others. Tokens before the first frame pass them unchanged. Queries are
rotated in every step, also of generated tokens, as in a prompt; the remote code of the checkpoints leaves that out.
"""

from dataclasses import replace

from tilerank.kernels.kv_pages import KVPages
from tilerank.loader.card import ModelCard
from tilerank.loader.files import is_listed
from tilerank.parallel.sharding import Sharding

from ..media.moss_vl_settings import read_settings
from ..media.settings import NESTED, PICTURES
from .attention import SelfAttention
from .cross_attention import CrossAttention, TanhGate, read_crossing_layers
from .decoder import Decoder, DecoderNames, Mixer
from .gated_mlp import GatedMLP
from .moss_vision import MossTower
from .text_config import read_text_config
from .vision_config import read_vision_config


def moss_vl(card: ModelCard, sharding: Sharding) -> Decoder:
    """MossVLForConditionalGeneration."""
    text, vision = card.fields.object("text_config"), card.fields.object("vision_config")
    holder = card.fields if card.fields.has("tie_word_embeddings") else text
    c = replace(read_text_config(text, sectioned=True), tie_word_embeddings=holder.flag("tie_word_embeddings"))
    crossing, bias = read_crossing_layers(text, c.num_layers), text.flag("attention_bias")
    names = DecoderNames(
        embedding="model.language_model.embed_tokens",
        norm="model.language_model.norm",
        layer="model.language_model.layers.{}",
        mixer=tuple("cross_attn" if layer in crossing else "self_attn" for layer in range(c.num_layers)),
    )

    def mixer(name: str, layer: int) -> Mixer[KVPages]:
        if layer in crossing:
            gate = f"{names.layer.format(layer)}.cross_attn_attn_gate"
            return CrossAttention(name, c, sharding, gate, rotates_source=True, bias=bias)
        return SelfAttention(name, c, sharding, qkv_bias=bias, out_bias=bias, head_norms=True)

    def mlp(name: str, _: int) -> GatedMLP:
        return GatedMLP(name, c.hidden_size, c.intermediate_size, sharding)

    def mlp_gate(layer: int) -> TanhGate | None:
        return TanhGate(f"{names.layer.format(layer)}.cross_attn_mlp_gate", sharding) if layer in crossing else None

    model_dir = card.fields.path.parent
    is_readable = any(is_listed(model_dir, name) for name in (NESTED, PICTURES))
    preprocessing = read_settings(model_dir).preprocessing if is_readable else None
    floats = replace(sharding, cached_tokens=0, formats=None, kv_dtype=None)
    config = read_vision_config(vision, c.hidden_size)
    tower = MossTower("model.visual", "model.separator_token", config, preprocessing, floats)
    return Decoder(card, c, sharding, names, mixer, mlp, tower, mlp_gate=mlp_gate)


MODELS = {"moss_vl": moss_vl}
