"""Qwen3.5, 3.6 and 3.8, dense and mixtures of experts, with a vision tower or without, and Qwen3-Next (configs and code
of transformers 5.23).

Most layers are gated delta nets, every fourth is self-attention with an output gate, whose heads are rotated in a
quarter of their dimensions, with interleaved M-RoPE. The weights of norms are stored minus one, but for those of delta
nets. The mixture adds a shared expert:

    mlp(x) = sum over the chosen experts e of weight_e * e(x) + sigmoid(x w) * shared(x)

and always scales the weights of the chosen experts to a sum of one. `mtp.*` is a multi-token-prediction head (mtp.py),
whose layer has self-attention.

Qwen3-Next stores experts one by one, and the projections of delta nets grouped by key heads, all or some of them. It
scales the weights of experts only with `norm_topk_prob`.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tilerank.kernels.delta import MAX_CONV_WIDTH, MAX_HEAD_DIM
from tilerank.loader.card import ModelCard
from tilerank.loader.fields import Fields
from tilerank.loader.headers import stored_tensors
from tilerank.loader.rope import FULL_ATTENTION, Sections
from tilerank.parallel.delta_projection import DeltaHeads
from tilerank.parallel.sharding import Sharding

from .attention import SelfAttention
from .decoder import Decoder, DecoderNames, FeedForward, Mixer
from .delta_net import GatedDeltaNet
from .gated_mlp import dense_mlps
from .mtp import MTPHead, MTPNames
from .qwen3_vl import vision_tower
from .qwen_moe import read_experts_config, sparse_mlps
from .text_config import MAX_HEADS, MAX_WIDTH, TextConfig, read_layer_types, read_text_config

_DELTA_NET = "linear_attention"
_ROTATED_PART = 0.25
_SECTIONS: Sections = (11, 11, 10)
_PUBLISHED, _TEXT_ALONE = "model.language_model", "model"
_MTP = MTPNames(
    "mtp.",
    "mtp.layers.0",
    "mtp.pre_fc_norm_embedding",
    "mtp.pre_fc_norm_hidden",
    "mtp.fc",
    "mtp.norm",
)


def qwen3_5(card: ModelCard, sharding: Sharding) -> Decoder:
    """Qwen3_5ForConditionalGeneration and, without vision_config, Qwen3_5ForCausalLM."""
    c = _text_config(card, dense=True)
    return _decoder(card, c, sharding, dense_mlps(c, sharding))


def qwen3_5_moe(card: ModelCard, sharding: Sharding) -> Decoder:
    """Qwen3_5MoeForConditionalGeneration and, without vision_config, Qwen3_5MoeForCausalLM."""
    c = _text_config(card, dense=False)
    experts = read_experts_config(card.text, c.num_layers)
    experts = replace(experts, renormalize=True, dense_layers=frozenset())
    shared_width = card.text.integer("shared_expert_intermediate_size", 1, MAX_WIDTH)
    mlps = sparse_mlps(c, experts, sharding, fused="out_in", shared_width=shared_width)
    return _decoder(card, c, sharding, mlps)


def qwen3_next(card: ModelCard, sharding: Sharding) -> Decoder:
    """Qwen3NextForCausalLM, also Qwen3-Coder-Next."""
    c = _text_config(card, dense=True)
    experts = read_experts_config(card.fields, c.num_layers)
    shared_width = card.fields.integer("shared_expert_intermediate_size", 1, MAX_WIDTH)
    mlps = sparse_mlps(c, experts, sharding, shared_width=shared_width)
    return _decoder(card, c, sharding, mlps, grouped=_grouped_projections(card))


def _text_config(card: ModelCard, *, dense: bool) -> TextConfig:
    """Files of text alone may lack the sections of positions, whose axes are equal without pictures."""
    ropes = [card.text.object(key) for key in ("rope_parameters", "rope_scaling") if card.text.has(key)]
    sectioned = card.fields.has("vision_config") or any(rope.has("mrope_section") for rope in ropes)
    config = read_text_config(
        card.text,
        whole=card.fields,
        sections=_SECTIONS if sectioned else None,
        usual_rotary_part=_ROTATED_PART,
        dense=dense,
        layer_kinds=(_DELTA_NET, FULL_ATTENTION),
    )
    return replace(config, zero_centered_norms=True)


def _decoder(
    card: ModelCard,
    c: TextConfig,
    sharding: Sharding,
    mlp: Callable[[str, int], FeedForward],
    *,
    grouped: tuple[str, ...] = (),
) -> Decoder:
    """mlp: makes those of a layer. grouped: as in GatedDeltaNet."""
    text = card.text
    _refuse_unsupported(text)
    kinds = [*_layer_kinds(text, c.num_layers), FULL_ATTENTION]  # the last is that of the draft head
    heads, conv_width = _delta_heads(text), text.integer("linear_conv_kernel_dim", 1, MAX_CONV_WIDTH)
    bias = text.flag("attention_bias")
    sees = card.fields.has("vision_config")

    def mixer(name: str, layer: int) -> Mixer[Any]:
        if kinds[layer] == _DELTA_NET:
            return GatedDeltaNet(name, c.hidden_size, heads, conv_width, c.rms_norm_eps, sharding, grouped=grouped)
        return SelfAttention(name, c, sharding, qkv_bias=bias, out_bias=bias, head_norms=True, gated=True)

    prefix = _prefix(card)
    names = DecoderNames(
        embedding=f"{prefix}.embed_tokens",
        norm=f"{prefix}.norm",
        layer=f"{prefix}.layers.{{}}",
        mixer=["linear_attn" if kind == _DELTA_NET else "self_attn" for kind in kinds[:-1]],
        left_out=("mtp.",) if sees else ("mtp.", "model.visual."),
    )
    tower = vision_tower(card, c, sharding, deepstack=False) if sees else None
    head = MTPHead(card, c, sharding, _MTP, mixer, mlp) if card.draft_head else None
    return Decoder(card, c, sharding, names, mixer, mlp, tower, draft_head=head)


def _layer_kinds(c: Fields, num_layers: int) -> list[str]:
    """Return the kind of each layer: as listed, or self-attention once in so many layers."""
    listed = read_layer_types(c, num_layers, (_DELTA_NET, FULL_ATTENTION))
    if listed is not None:
        return listed
    interval = c.integer("full_attention_interval", 1, 1 << 12)
    return [_DELTA_NET if (i + 1) % interval else FULL_ATTENTION for i in range(num_layers)]


def _delta_heads(c: Fields) -> DeltaHeads:
    key_heads = c.integer("linear_num_key_heads", 1, MAX_HEADS)
    value_heads = c.integer("linear_num_value_heads", 1, MAX_HEADS)
    if value_heads % key_heads:
        raise c.fail("linear_num_value_heads", f"a multiple of linear_num_key_heads ({key_heads})")
    return DeltaHeads(
        key_heads,
        value_heads,
        c.integer("linear_key_head_dim", 1, MAX_HEAD_DIM),
        c.integer("linear_value_head_dim", 1, MAX_HEAD_DIM),
    )


def _refuse_unsupported(c: Fields) -> None:
    if c.has("attn_output_gate") and not c.flag("attn_output_gate"):
        raise c.fail("attn_output_gate", "true (self-attention without an output gate is not supported)")
    for key, supported in (("output_gate_type", "swish"), ("mamba_ssm_dtype", "float32")):
        if c.has(key) and c.text(key) != supported:
            raise c.fail(key, repr(supported))


def _grouped_projections(card: ModelCard) -> tuple[str, ...]:
    """Return which projections of Qwen3-Next have rows grouped by key heads: all but those that GGUF files sort."""
    names = stored_tensors(card.fields.path.parent) or ()
    is_sorted = any(".in_proj_qkv." in name for name in names)
    return ("ba",) if is_sorted else ("qkvz", "ba")


def _prefix(card: ModelCard) -> str:
    """Return the name under which the checkpoint has the language model; without files, as config.json suggests."""
    names = stored_tensors(card.fields.path.parent) or ()
    for prefix in (_PUBLISHED, _TEXT_ALONE):
        if any(name.startswith(f"{prefix}.embed_tokens.") for name in names):
            return prefix
    return _PUBLISHED if card.fields.has("text_config") else _TEXT_ALONE


MODELS = {
    "qwen3_next": qwen3_next,
    "qwen3_5": qwen3_5,
    "qwen3_5_text": qwen3_5,
    "qwen3_5_moe": qwen3_5_moe,
    "qwen3_5_moe_text": qwen3_5_moe,
}
