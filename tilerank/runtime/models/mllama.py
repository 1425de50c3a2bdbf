"""mllama (Llama-3.2-Vision, model card meta-llama/Llama-3.2-11B-Vision): Llama with layers of gated cross-attention.

The cross-attention layers stand among the others and see the encoded pictures of the prompt. The tokens of a prompt
without pictures pass them unchanged. As transformers 5.23 does it, a token before the first picture attends to all of
them and leaves out the MLPs of these layers.
"""

from tilerank.loader.card import ModelCard
from tilerank.loader.fields import Fields
from tilerank.parallel.sharding import Sharding

from ..media.mllama import read_tile_settings
from ..media.settings import read_if_listed
from .attention import SelfAttention
from .cross_attention import crossing_decoder, read_crossing_layers
from .decoder import Decoder, DecoderNames
from .mllama_vision import MllamaTower, read_mllama_vision_config
from .text_config import TextConfig, read_text_config
from .tower import floats_alone

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
    settings = read_if_listed(read_tile_settings, card.fields.path.parent)
    tower = MllamaTower(read_mllama_vision_config(vision), c.hidden_size, settings, floats_alone(sharding))
    return _decoder(card, c, text, sharding, names, tower)


def _decoder(
    card: ModelCard, c: TextConfig, text: Fields, sharding: Sharding, names: DecoderNames, tower: MllamaTower | None
) -> Decoder:
    def self_attention(name: str, _: int) -> SelfAttention:
        return SelfAttention(name, c, sharding, qkv_bias=False, out_bias=False, head_norms=False)

    return crossing_decoder(card, c, text, sharding, names, self_attention, tower, spare_ids=_SPARE_IDS)


MODELS = {"mllama": mllama, "mllama_text_model": mllama}
