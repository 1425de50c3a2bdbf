"""Phi-3, 3.5, 4 and 4-mini (arXiv 2404.14219, 2412.08905, 2503.01743): Llama, whose projections of one input are stored
as one, with LongRoPE in a part of each head and a window in all layers, as far as config.json says so."""

from tilerank.loader.card import ModelCard
from tilerank.parallel.sharding import Sharding

from .attention import SelfAttention
from .decoder import Decoder, DecoderNames
from .gated_mlp import dense_mlps
from .text_config import read_text_config, read_window


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


MODELS = {"phi3": phi3}
