"""Llama 3.x (arXiv 2407.21783), dense."""

from tilerank.loader.card import ModelCard
from tilerank.parallel.sharding import Sharding

from .attention import SelfAttention
from .decoder import Decoder, DecoderNames
from .gated_mlp import dense_mlps
from .text_config import read_text_config


def llama(card: ModelCard, sharding: Sharding) -> Decoder:
    """LlamaForCausalLM. `attention_bias` and `mlp_bias` of config.json give all projections of that part a bias."""
    c = read_text_config(card.fields)
    bias, mlp_bias = card.fields.flag("attention_bias"), card.fields.flag("mlp_bias")

    def mixer(name: str, _: int) -> SelfAttention:
        return SelfAttention(name, c, sharding, qkv_bias=bias, out_bias=bias, head_norms=False)

    return Decoder(card, c, sharding, DecoderNames(), mixer, dense_mlps(c, sharding, bias=mlp_bias))


MODELS = {"llama": llama}
