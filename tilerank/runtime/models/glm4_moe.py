"""GLM-4.5, 4.6 and 4.7 (arXiv 2508.06471): grouped-query attention, and the mixture of experts of DeepSeek-V3.

The first half of the dimensions of a head is rotated. GLM-4.5-Air does not normalise heads. The layer after the last is
a multi-token-prediction head (mtp.py).
"""

from tilerank.loader.card import ModelCard
from tilerank.parallel.sharding import Sharding

from .attention import SelfAttention
from .decoder import Decoder, DecoderNames
from .deepseek import read_routed_config, routed_mlps
from .mtp import MTPHead, names_after_last
from .text_config import read_text_config

_ROTATED_PART = 0.5


def glm4_moe(card: ModelCard, sharding: Sharding) -> Decoder:
    """Glm4MoeForCausalLM."""
    fields = card.fields
    c = read_text_config(fields, usual_rotary_part=_ROTATED_PART)
    bias, head_norms = fields.flag("attention_bias"), fields.flag("use_qk_norm")

    def mixer(name: str, _: int) -> SelfAttention:
        return SelfAttention(name, c, sharding, qkv_bias=bias, out_bias=False, head_norms=head_norms)

    mlp = routed_mlps(c, read_routed_config(fields, c.num_layers), sharding)
    head = MTPHead(card, c, sharding, names_after_last(c.num_layers), mixer, mlp) if card.draft_head else None
    return Decoder(card, c, sharding, DecoderNames(drafts=True), mixer, mlp, draft_head=head)


MODELS = {"glm4_moe": glm4_moe}
