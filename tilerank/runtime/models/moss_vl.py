"""MOSS-VL (arXiv 2608.15045): the decoder of Qwen3 with layers of gated cross-attention to the frames of the prompt.

The cross-attention layers stand among the others. Tokens before the first frame pass them unchanged. Queries are
rotated in every step, also of generated tokens, as in a prompt; the remote code of the checkpoints leaves that out.
"""

from tilerank.loader.card import ModelCard
from tilerank.parallel.sharding import Sharding

from ..media.moss_vl_settings import read_preprocessing
from ..media.settings import read_if_listed
from .attention import SelfAttention
from .cross_attention import crossing_decoder
from .decoder import Decoder, DecoderNames
from .moss_vision import MossTower
from .text_config import read_text_config
from .tower import floats_alone
from .vision_config import read_vision_config


def moss_vl(card: ModelCard, sharding: Sharding) -> Decoder:
    """MossVLForConditionalGeneration."""
    text = card.fields.object("text_config")
    c, bias = read_text_config(text, whole=card.fields, sectioned=True), text.flag("attention_bias")
    names = DecoderNames(
        embedding="model.language_model.embed_tokens",
        norm="model.language_model.norm",
        layer="model.language_model.layers.{}",
    )

    def self_attention(name: str, _: int) -> SelfAttention:
        return SelfAttention(name, c, sharding, qkv_bias=bias, out_bias=bias, head_norms=True)

    vision = read_vision_config(card.fields.object("vision_config"), c.hidden_size)
    preprocessing = read_if_listed(read_preprocessing, card.fields.path.parent)
    tower = MossTower("model.visual", "model.separator_token", vision, preprocessing, floats_alone(sharding))
    return crossing_decoder(card, c, text, sharding, names, self_attention, tower, rotates_source=True, bias=bias)


MODELS = {"moss_vl": moss_vl}
