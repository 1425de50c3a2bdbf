"""Qwen3-VL and its mixture of experts (arXiv 2511.21631): a vision tower and the decoder of Qwen3.

The text has interleaved M-RoPE. The router of the mixture always scales the weights of the chosen experts to a sum of
one, whatever `norm_topk_prob` says.
"""

from dataclasses import replace

from tilerank.loader.card import ModelCard
from tilerank.loader.files import is_listed
from tilerank.parallel.sharding import Sharding

from ..media.qwen_vl_settings import read_preprocessing
from ..media.settings import NESTED, PICTURES
from .decoder import Decoder, DecoderNames
from .qwen import qwen3_decoder
from .qwen_moe import read_experts_config, sparse_mlps
from .text_config import TextConfig, read_text_config
from .vision import VisionTower
from .vision_config import read_vision_config

_NAMES = DecoderNames(
    embedding="model.language_model.embed_tokens",
    norm="model.language_model.norm",
    layer="model.language_model.layers.{}",
)


def qwen3_vl(card: ModelCard, sharding: Sharding) -> Decoder:
    """Qwen3VLForConditionalGeneration."""
    c = _text_config(card)
    return qwen3_decoder(card, c, sharding, names=_NAMES, encoder=vision_tower(card, c, sharding))


def qwen3_vl_moe(card: ModelCard, sharding: Sharding) -> Decoder:
    """Qwen3VLMoeForConditionalGeneration."""
    c = _text_config(card)
    experts = replace(read_experts_config(card.text, c.num_layers), renormalize=True)
    mlps = sparse_mlps(c, experts, sharding, fused="in_out")
    return qwen3_decoder(card, c, sharding, names=_NAMES, encoder=vision_tower(card, c, sharding), mlp=mlps)


def _text_config(card: ModelCard) -> TextConfig:
    text = card.fields.object("text_config")
    holder = card.fields if card.fields.has("tie_word_embeddings") else text
    return replace(read_text_config(text, sectioned=True), tie_word_embeddings=holder.flag("tie_word_embeddings"))


def vision_tower(card: ModelCard, text: TextConfig, sharding: Sharding, *, deepstack: bool = True) -> VisionTower:
    """Return the tower. It is held as floats, also where the decoder is quantised, and caches nothing.

    deepstack: as in `read_vision_config`.
    """
    fields = card.fields.object("vision_config")
    config = read_vision_config(fields, text.hidden_size, deepstack=deepstack)
    if len(config.deepstack) >= text.num_layers:
        raise fields.fail(
            "deepstack_visual_indexes", f"fewer blocks than the {text.num_layers} layers of the language model"
        )
    model_dir = fields.path.parent
    preprocessing = read_preprocessing(model_dir) if any(is_listed(model_dir, n) for n in (NESTED, PICTURES)) else None
    floats = replace(sharding, cached_tokens=0, formats=None, kv_dtype=None)
    return VisionTower("model.visual", config, preprocessing, floats)


MODELS = {"qwen3_vl": qwen3_vl, "qwen3_vl_moe": qwen3_vl_moe}
