"""Qwen2, Qwen2.5 (arXiv 2412.15115) and Qwen3 (arXiv 2505.09388), dense.

Qwen2 has biases on q, k and v, unless `qkv_bias` of config.json says otherwise. Qwen3 has biases only with
`attention_bias`, and normalises every query and key head before the rotation.
"""

from collections.abc import Callable

from tilerank.loader.card import ModelCard
from tilerank.parallel.sharding import Sharding

from ..step.model import Encoder
from .attention import SelfAttention
from .decoder import Decoder, DecoderNames, FeedForward
from .gated_mlp import dense_mlps
from .text_config import TextConfig, read_text_config

_NAMES = DecoderNames()


def qwen2(card: ModelCard, sharding: Sharding) -> Decoder:
    """Qwen2ForCausalLM."""
    return qwen2_decoder(card, read_text_config(card.fields), sharding)


def qwen3(card: ModelCard, sharding: Sharding) -> Decoder:
    """Qwen3ForCausalLM."""
    return qwen3_decoder(card, read_text_config(card.fields), sharding)


def qwen2_decoder(
    card: ModelCard, c: TextConfig, sharding: Sharding, *, mlp: Callable[[str, int], FeedForward] | None = None
) -> Decoder:
    """Return the decoder of Qwen2, or that of its mixture. mlp: makes those of a layer (dense)."""
    bias = not card.fields.has("qkv_bias") or card.fields.flag("qkv_bias")

    def mixer(name: str, _: int) -> SelfAttention:
        return SelfAttention(name, c, sharding, qkv_bias=bias, out_bias=False, head_norms=False)

    return Decoder(card, c, sharding, _NAMES, mixer, mlp or dense_mlps(c, sharding))


def qwen3_decoder(
    card: ModelCard,
    c: TextConfig,
    sharding: Sharding,
    *,
    names: DecoderNames = _NAMES,
    encoder: Encoder | None = None,
    mlp: Callable[[str, int], FeedForward] | None = None,
) -> Decoder:
    """Return the decoder of Qwen3, or that of a family with the same layers. mlp: makes those of a layer (dense)."""
    bias = card.text.flag("attention_bias")

    def mixer(name: str, _: int) -> SelfAttention:
        return SelfAttention(name, c, sharding, qkv_bias=bias, out_bias=bias, head_norms=True)

    return Decoder(card, c, sharding, names, mixer, mlp or dense_mlps(c, sharding), encoder)


MODELS = {"qwen2": qwen2, "qwen3": qwen3}
