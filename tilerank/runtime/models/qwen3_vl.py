"""Qwen3-VL and its mixture of experts (arXiv 2511.21631): a vision tower and the decoder of Qwen3.

The text has interleaved M-RoPE. The router of the mixture always scales the weights of the chosen experts to a sum of
one, whatever `norm_topk_prob` says.
"""

from dataclasses import replace

from tilerank.loader.card import ModelCard
from tilerank.parallel.sharding import Sharding

from ..media.qwen_vl import read_settings
from ..media.settings import read_if_listed
from .decoder import Decoder, DecoderNames
from .qwen import qwen3_decoder
from .qwen_moe import read_experts_config, sparse_mlps
from .text_config import USUAL_SECTIONS, TextConfig, read_text_config
from .towers.tower import floats_alone
from .towers.vision import VisionTower
from .towers.vision_config import read_vision_config

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
    return read_text_config(card.fields.object("text_config"), whole=card.fields, sections=USUAL_SECTIONS)


def vision_tower(card: ModelCard, text: TextConfig, sharding: Sharding, *, deepstack: bool = True) -> VisionTower:
    """Return the tower of a checkpoint. deepstack: as in `read_vision_config`."""
    fields = card.fields.object("vision_config")
    config = read_vision_config(fields, text.hidden_size, deepstack=deepstack, decoder_layers=text.num_layers)
    preprocessing = read_if_listed(lambda folder: read_settings(folder).preprocessing, fields.path.parent)
    return VisionTower("model.visual", config, preprocessing, floats_alone(sharding))


MODELS = {"qwen3_vl": qwen3_vl, "qwen3_vl_moe": qwen3_vl_moe}
