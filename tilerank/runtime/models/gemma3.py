"""Gemma 3 (arXiv 2503.19786): a language model, alone or with the tower of siglip.py.

    x += post_norm(mixer(norm(x)));  x += post_norm(mlp(norm(x))),  mlp(x) = down(gelu(gate(x)) * up(x))

The second norm is that of the sum over the ranks. The weights of norms are stored minus one. Most layers attend to a
window, every sixth to all tokens; the two kinds have rotations of their own. Embeddings are scaled by
sqrt(hidden size), but not the rows of the output head, which is the same weight. In EmbeddingGemma, which has no head,
tokens attend to those after them as well.
"""

from dataclasses import replace
from functools import partial

import torch

from tilerank.loader.card import ModelCard
from tilerank.loader.fields import Fields
from tilerank.loader.headers import stored_prefix
from tilerank.loader.rope import FULL_ATTENTION, SLIDING_ATTENTION, read_layer_rope
from tilerank.parallel.sharding import Sharding

from ..media.gemma3 import read_gemma3_settings
from ..media.settings import read_if_listed
from .attention import SelfAttention
from .decoder import Decoder, DecoderNames
from .gated_mlp import dense_mlps
from .text_config import MAX_WIDTH, MAX_WINDOW, read_layer_types, read_text_config
from .towers.siglip import SiglipTower, read_siglip_config
from .towers.tower import floats_alone

_KINDS = (SLIDING_ATTENTION, FULL_ATTENTION)
_PATTERNS = ("sliding_window_pattern", "_sliding_window_pattern")
_USUAL_PATTERN, _MAX_PATTERN = 6, 1 << 12
_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")


def gemma3_text(card: ModelCard, sharding: Sharding) -> Decoder:
    """Gemma3ForCausalLM."""
    return _decoder(card, sharding, "model")


def gemma3(card: ModelCard, sharding: Sharding) -> Decoder:
    """Gemma3ForConditionalGeneration. A picture attends to all of itself, in every layer."""
    first_of = partial(stored_prefix, card.fields.path.parent)
    hidden = card.text.integer("hidden_size", 1, MAX_WIDTH)
    settings = read_if_listed(read_gemma3_settings, card.fields.path.parent)
    tower = SiglipTower(
        # transformers saves it without the inner name, and all parts of the model with an outer one.
        first_of("vision_tower.vision_model", "vision_tower", "model.vision_tower"),
        first_of("multi_modal_projector", "model.multi_modal_projector"),
        read_siglip_config(card.fields, hidden),
        settings,
        floats_alone(sharding),
    )
    return _decoder(card, sharding, first_of("language_model.model", "model.language_model"), tower)


def _decoder(card: ModelCard, sharding: Sharding, prefix: str, tower: SiglipTower | None = None) -> Decoder:
    text = card.text
    both_sides = _attends_to_both_sides(card, tower)
    _refuse_unsupported(text)
    c = read_text_config(text, whole=card.fields, layer_kinds=_KINDS, rope_kind=FULL_ATTENTION)
    c = replace(c, zero_centered_norms=True)
    sliding = replace(c, rope=read_layer_rope(text, c.rotary_dim, SLIDING_ATTENTION))
    windows = _windows(text, c.num_layers, both_sides=both_sides)
    bias = text.flag("attention_bias")
    scale = text.number("query_pre_attn_scalar", 0.0, 1e6) ** -0.5

    def mixer(name: str, layer: int) -> SelfAttention:
        return SelfAttention(
            name,
            sliding if windows[layer] else c,
            sharding,
            qkv_bias=bias,
            out_bias=bias,
            head_norms=True,
            scale=scale,
            window=windows[layer],
            both_sides=both_sides,
        )

    names = DecoderNames(
        embedding=f"{prefix}.embed_tokens",
        head="lm_head" if tower is None else "language_model.lm_head",
        norm=f"{prefix}.norm",
        layer=f"{prefix}.layers.{{}}",
        mixer_post_norm="post_attention_layernorm",
        mlp_norm="pre_feedforward_layernorm",
        mlp_post_norm="post_feedforward_layernorm",
        left_out=("vision_tower.vision_model.head.",),
    )
    mlp = dense_mlps(c, sharding, activation="gelu_tanh_mul")
    factor = float(torch.tensor(c.hidden_size**0.5).to(sharding.dtype))  # rounded, as in transformers
    spare = text.integer("vocab_size", card.vocab_size, 1 << 24) - card.vocab_size
    return Decoder(card, c, sharding, names, mixer, mlp, tower, spare_ids=spare, embedding_factor=factor)


def _windows(c: Fields, num_layers: int, *, both_sides: bool) -> list[int]:
    """Return the tokens that a token of each layer attends to; 0: all before it.

    Layers are as listed, or else every n-th attends to all. transformers ignores the second of _PATTERNS. both_sides:
    the stored window counts the tokens on both sides; half of them are before a token.
    """

    def every(n: int) -> list[str]:
        return [SLIDING_ATTENTION if (i + 1) % n else FULL_ATTENTION for i in range(num_layers)]

    patterns = {key: every(c.integer(key, 1, _MAX_PATTERN)) for key in _PATTERNS if c.has(key)}
    usual = next(iter(patterns.values()), every(_USUAL_PATTERN))
    kinds = read_layer_types(c, num_layers, _KINDS) or usual
    for key, of_pattern in patterns.items():
        if of_pattern != kinds:
            raise c.fail(key, f"the pattern of {'layer_types' if c.has('layer_types') else _PATTERNS[0]}")
    window = c.integer("sliding_window", 1, MAX_WINDOW) if SLIDING_ATTENTION in kinds else 0
    window = window // 2 + 1 if both_sides and window else window
    return [window if kind == SLIDING_ATTENTION else 0 for kind in kinds]


def _attends_to_both_sides(card: ModelCard, tower: SiglipTower | None) -> bool:
    """Return whether tokens attend to later ones, as in EmbeddingGemma. Raises ConfigError for a model that generates
    text from them."""
    key, c = "use_bidirectional_attention", card.text
    if not c.has(key) or c.values[key] is False:
        return False
    if card.pooling is None or tower is not None:
        raise c.fail(key, "false (a model that generates text cannot attend to later tokens)")
    return c.flag(key)


def _refuse_unsupported(c: Fields) -> None:
    if c.text("hidden_activation") != "gelu_pytorch_tanh":
        raise c.fail("hidden_activation", "'gelu_pytorch_tanh'")
    for key in _CAPS:
        if c.has(key):
            raise c.fail(key, "null (capped scores and logits are not supported)")


MODELS = {"gemma3_text": gemma3_text, "gemma3": gemma3}
