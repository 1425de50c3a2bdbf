"""Gemma 4: Gemma 3 with heads of two sizes, experts beside the dense MLP, and layers that share keys and values.

    x += post_norm(attention(norm(x)));  x += post_norm(F(x));  x += input of the layer;  x *= layer_scalar
    F(x) = mlp(norm(x)), or norm_1(mlp(norm(x))) + norm_2(experts(pre_norm_2(x)))

Layers that attend to all tokens have larger heads than those with a window, other counts of KV heads, and rotate a part
of their heads; in some models their keys are their values as well. The last layers of some models have neither, and
read those of the last layer of their kind before them. Models with such layers have inputs of each layer
(per_layer_inputs.py). The router reads the residual.
"""

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from tilerank.kernels import ops
from tilerank.kernels.moe import softmax_top_k
from tilerank.loader.card import ModelCard
from tilerank.loader.fields import Fields
from tilerank.loader.headers import stored_prefix
from tilerank.loader.rope import FULL_ATTENTION, SLIDING_ATTENTION, read_layer_rope, read_layer_rotary_dim
from tilerank.parallel.experts import ParallelExperts
from tilerank.parallel.linear import ReplicatedLinear
from tilerank.parallel.norm import RMSNorm
from tilerank.parallel.parameters import WholeParameter
from tilerank.parallel.sharding import Sharding

from ..media.gemma4 import read_gemma4_settings
from ..media.settings import read_if_listed
from .decoder import MLP, Decoder, DecoderNames, ResidualFeedForward
from .gated_mlp import GatedMLP
from .normed_attention import NormedAttention
from .per_layer_inputs import PerLayerInputs
from .qwen_moe import read_expert_count
from .text_config import MAX_WIDTH, MAX_WINDOW, TextConfig, read_layer_types, read_text_config
from .towers.gemma4_vision import Gemma4Tower, read_vision_config
from .towers.tower import floats_alone

_KINDS = (SLIDING_ATTENTION, FULL_ATTENTION)
_MAX_VOCABULARY, _MAX_HEAD_DIM = 1 << 24, 512
_PATTERN = 6
_ACTIVATION = "gelu_pytorch_tanh"
_BIDIRECTIONAL = "use_bidirectional_attention"
_SOUND = ("model.audio_tower.", "model.embed_audio.", "audio_tower.", "embed_audio.")
_PICTURES = ("model.vision_tower.", "model.embed_vision.", "vision_tower.", "embed_vision.")
"""Begin the names of what takes sound, which is not supported, and pictures."""


@dataclass(frozen=True)
class _Experts:
    """The mixture beside the MLP: `count` experts of `width` columns, of which a token chooses `top_k`."""

    count: int
    top_k: int
    width: int


class MixtureBesideMLP(ResidualFeedForward):
    """The sum of an MLP and of experts, each after a norm of its sum over the ranks. name: of the layer."""

    def __init__(self, name: str, c: TextConfig, experts: _Experts, sharding: Sharding) -> None:
        hidden, self._eps, self._sharding = c.hidden_size, c.rms_norm_eps, sharding

        def norm(part: str) -> RMSNorm:
            return RMSNorm(f"{name}.{part}", hidden, c.rms_norm_eps, sharding)

        self.mlp = GatedMLP(f"{name}.mlp", hidden, c.intermediate_size, sharding, activation="gelu_tanh_mul")
        self.mlp_post_norm = norm("post_feedforward_layernorm_1")
        self.experts_norm = norm("pre_feedforward_layernorm_2")
        self.experts_post_norm = norm("post_feedforward_layernorm_2")
        self.router_norm = WholeParameter(f"{name}.router.scale", (hidden,), sharding.dtype)
        # Whole on every rank: all ranks compute the same bits and so choose the same experts.
        self.router = ReplicatedLinear(f"{name}.router.proj", hidden, experts.count, sharding)
        self.weight_scales = WholeParameter(f"{name}.router.per_expert_scale", (experts.count,), torch.float32)
        self.experts = ParallelExperts(
            f"{name}.experts",
            hidden,
            experts.width,
            experts.count,
            sharding,
            top_k=experts.top_k,
            fused="out_in",
            activation="gelu_tanh_mul",
        )
        self._top_k = experts.top_k

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        dense = self.mlp_post_norm(self._sharding.sum(self.mlp(x)))
        routed = ops.rms_norm(residual, self.router_norm.data, self._eps)
        ops.scale_(routed, residual.shape[1] ** -0.5)
        logits = self.router.project(routed, out_dtype=torch.float32)
        ids, weights = softmax_top_k(logits, self._top_k, renormalize=True, scales=self.weight_scales.data)
        mixed = self._sharding.sum(self.experts(self.experts_norm(residual), ids, weights))
        return ops.add(dense, self.experts_post_norm(mixed))


@dataclass(frozen=True)
class _Attention:
    """The attention of a layer. shared: the layer whose keys and values it reads; None for its own."""

    config: TextConfig
    window: int
    keys_are_values: bool
    shared: int | None


def gemma4_text(card: ModelCard, sharding: Sharding) -> Decoder:
    """Gemma4ForCausalLM."""
    return _decoder(card, sharding, "model")


def gemma4(card: ModelCard, sharding: Sharding) -> Decoder:
    """Gemma4ForConditionalGeneration."""
    first_of = partial(stored_prefix, card.fields.path.parent)
    tower = None
    if card.fields.has("vision_config"):
        tower = Gemma4Tower(
            first_of("model.vision_tower", "vision_tower"),
            first_of("model.embed_vision", "embed_vision"),
            read_vision_config(card.fields, card.text.integer("hidden_size", 1, MAX_WIDTH)),
            read_if_listed(read_gemma4_settings, card.fields.path.parent),
            floats_alone(sharding),
            whole_media=card.text.has(_BIDIRECTIONAL),
        )
    return _decoder(card, sharding, first_of("model.language_model", "language_model.model"), tower)


def _decoder(card: ModelCard, sharding: Sharding, prefix: str, tower: Gemma4Tower | None = None) -> Decoder:
    text = card.text
    _refuse_unsupported(text)
    c = read_text_config(text, whole=card.fields, layer_kinds=_KINDS, rope_kind=SLIDING_ATTENTION)
    attention = _read_attention(text, c)
    wider = 2 if text.flag("use_double_wide_mlp") else 1
    experts = _read_experts(text) if text.flag("enable_moe_block") else None

    def mixer(name: str, layer: int) -> NormedAttention:
        found = attention[layer]
        return NormedAttention(
            name,
            found.config,
            sharding,
            keys_are_values=found.keys_are_values,
            window=found.window,
            shared=found.shared,
        )

    def mlp(name: str, layer: int) -> MLP:
        if experts is not None:
            return MixtureBesideMLP(f"{prefix}.layers.{layer}", c, experts, sharding)
        width = c.intermediate_size * (1 if attention[layer].shared is None else wider)
        return GatedMLP(name, c.hidden_size, width, sharding, activation="gelu_tanh_mul")

    unused = [
        f"{prefix}.layers.{layer}.self_attn.{part}."
        for layer, found in enumerate(attention)
        if found.shared is not None
        for part in ("k_proj", "v_proj", "k_norm", "v_norm")
    ]
    names = DecoderNames(
        embedding=f"{prefix}.embed_tokens",
        norm=f"{prefix}.norm",
        layer=f"{prefix}.layers.{{}}",
        mixer_post_norm="post_attention_layernorm",
        mlp_norm="pre_feedforward_layernorm",
        mlp_post_norm="post_feedforward_layernorm",
        scale="layer_scalar",
        left_out=(*unused, *_SOUND, *(_PICTURES if tower is None else ())),
    )
    factor = float(torch.tensor(c.hidden_size**0.5).to(sharding.dtype))  # rounded, as in transformers
    cap = "final_logit_softcapping"
    return Decoder(
        card,
        c,
        sharding,
        names,
        mixer,
        mlp,
        tower,
        inputs=_read_inputs(card, c, sharding, prefix),
        embedding_factor=factor,
        logits_cap=text.number(cap, 0.0, 1e6) if text.has(cap) else None,
    )


def _read_attention(c: Fields, config: TextConfig) -> list[_Attention]:
    """Return the attention of each layer. config: with heads and rotation of layers with a window."""
    layers, keys_are_values = config.num_layers, c.flag("attention_k_eq_v")
    kinds = read_layer_types(c, layers, _KINDS)
    if kinds is None:
        kinds = [SLIDING_ATTENTION if (i + 1) % _PATTERN else FULL_ATTENTION for i in range(layers - 1)]
        kinds.append(FULL_ATTENTION)
    if kinds[-1] != FULL_ATTENTION:
        raise c.fail("layer_types", f"{FULL_ATTENTION!r} at the end")
    window = c.integer("sliding_window", 1, MAX_WINDOW) if SLIDING_ATTENTION in kinds else 0
    shared = c.integer("num_kv_shared_layers", 0, layers - 1) if c.has("num_kv_shared_layers") else 0
    found = list[_Attention]()
    for layer, kind in enumerate(kinds):
        is_full = kind == FULL_ATTENTION
        dim, kv_heads = _read_heads_of(c, config, layer, is_full)
        rotary_dim, rope = read_layer_rotary_dim(c, dim, kind), read_layer_rope(c, dim, kind)
        of_layer = replace(config, num_kv_heads=kv_heads, head_dim=dim, rotary_dim=rotary_dim, rope=rope)
        source = None
        if layer >= layers - shared:
            source = next((i for i in reversed(range(layers - shared)) if kinds[i] == kind), None)
            if source is None or found[source].config != of_layer:
                raise c.fail(
                    "num_kv_shared_layers", f"a layer before them like layer {layer}, which has keys and values"
                )
        found.append(_Attention(of_layer, 0 if is_full else window, keys_are_values and is_full, source))
    return found


def _read_heads_of(c: Fields, config: TextConfig, layer: int, is_full: bool) -> tuple[int, int]:
    """Return the size of the heads of a layer and the number of its KV heads.

    transformers 5.23 writes `per_layer_config`, with the layers that differ from the others; older files have keys for
    all layers that attend to all tokens.
    """
    key, size, count = "per_layer_config", "head_dim", "num_key_value_heads"
    if c.has(key):
        layers = c.object(key)
        own = layers.object(str(layer)) if layers.has(str(layer)) else c
    elif is_full:
        own, size = c, "global_head_dim"
        count = "num_global_key_value_heads" if c.flag("attention_k_eq_v") else count
    else:
        own = c
    dim = own.integer(size, 8, _MAX_HEAD_DIM) if own.has(size) else config.head_dim
    kv_heads = own.integer(count, 1, config.num_heads) if own.has(count) else config.num_kv_heads
    if dim % 8:
        raise own.fail(size, "a multiple of 8")
    if config.num_heads % kv_heads:
        raise own.fail(count, f"a divisor of num_attention_heads ({config.num_heads})")
    return dim, kv_heads


def _read_experts(c: Fields) -> _Experts:
    count = read_expert_count(c, "num_experts", 1)
    return _Experts(count, c.integer("top_k_experts", 1, count), c.integer("moe_intermediate_size", 1, MAX_WIDTH))


def _read_inputs(card: ModelCard, c: TextConfig, sharding: Sharding, prefix: str) -> PerLayerInputs | None:
    width = card.text.integer("hidden_size_per_layer_input", 0, MAX_WIDTH)
    if not width:
        return None
    vocab = card.text.integer("vocab_size_per_layer_input", card.vocab_size, _MAX_VOCABULARY)
    pad = card.text.integer("pad_token_id", 0, vocab - 1)
    return PerLayerInputs(prefix, vocab, pad, c.hidden_size, width, c.num_layers, c.rms_norm_eps, sharding)


def _refuse_unsupported(c: Fields) -> None:
    if c.text("hidden_activation") != _ACTIVATION:
        raise c.fail("hidden_activation", repr(_ACTIVATION))
    if c.has(_BIDIRECTIONAL) and c.values[_BIDIRECTIONAL] != "vision":
        raise c.fail(_BIDIRECTIONAL, "null or 'vision' (attention to later tokens of text is not supported)")
    if c.flag("attention_bias"):
        raise c.fail("attention_bias", "false (biases of attention are not supported)")


MODELS = {"gemma4_text": gemma4_text, "gemma4": gemma4}
