"""The fields of config.json that decoder-only text models share, and bounds of those of other parts."""

from collections.abc import Sequence
from dataclasses import dataclass

from tilerank.kernels import kv_pages
from tilerank.loader.fields import Fields
from tilerank.loader.padding import resolve_head_dim
from tilerank.loader.rope import (
    FULL_ATTENTION,
    RopeConfig,
    Sections,
    read_layer_rope,
    read_rope,
    read_rotary_dim,
)

# Bounds well above any published model: an absurd number becomes an error message instead of an allocation.
MAX_WIDTH = 1 << 20
_MAX_LAYERS = 1 << 12
MAX_HEADS = 1 << 14
MAX_WINDOW = 1 << 30
_MAX_HEAD_DIM = 1 << 12

USUAL_SECTIONS: Sections = (24, 20, 20)
"""The sections of M-RoPE of models with heads of 128, where a file names none, as in transformers."""


@dataclass(frozen=True)
class TextConfig:
    """The shape of a decoder-only transformer; counts are the model's own, before any padding for ranks.

    rotary_dim: the first dimensions of a head, which positions rotate. intermediate_size: the width of dense MLPs, 0 if
    no layer has one. zero_centered_norms: the checkpoint stores the weights of norms minus one.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    zero_centered_norms: bool = False


def read_text_config(
    c: Fields,
    *,
    whole: Fields | None = None,
    sections: Sections | None = None,
    usual_rotary_part: float | None = None,
    dense: bool = True,
    layer_kinds: Sequence[str] = (FULL_ATTENTION,),
    head_dims: tuple[int, int] | None = None,
    rope_kind: str | None = None,
) -> TextConfig:
    """Read and check the fields. Raises ConfigError, also for features that would change the result if ignored.

    c: the fields of the language model alone. whole: those of the file, whose `tie_word_embeddings` comes first if they
    are nested. sections: as in `read_rope`. usual_rotary_part: as in `read_rotary_dim`. dense: it has dense MLPs.
    layer_kinds: those that `layer_types` may list. head_dims: the dimensions of a head, and those that are rotated, of
    latent attention, which has fields of its own for them and no KV heads. rope_kind: the kind of layers whose rotary
    embedding is read, in a model with one for each kind.
    """
    _refuse_unsupported(c)
    holder = whole if whole is not None and whole.has("tie_word_embeddings") else c
    num_layers = c.integer("num_hidden_layers", 1, _MAX_LAYERS)
    read_layer_types(c, num_layers, layer_kinds)
    hidden_size = c.integer("hidden_size", 1, MAX_WIDTH)
    num_heads = c.integer("num_attention_heads", 1, MAX_HEADS)
    if head_dims is not None:
        num_kv_heads = num_heads
        head_dim, rotary_dim = head_dims
    else:
        num_kv_heads = c.integer("num_key_value_heads", 1, num_heads)
        if num_heads % num_kv_heads:
            raise c.fail("num_key_value_heads", f"a divisor of num_attention_heads ({num_heads})")
        head_dim = _head_dim(c, hidden_size, num_heads)
        rotary_dim = read_rotary_dim(c, head_dim, usual_rotary_part)
    return TextConfig(
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        intermediate_size=c.integer("intermediate_size", 1, MAX_WIDTH * 8) if dense else 0,
        rms_norm_eps=c.number("rms_norm_eps", 0.0, 1.0),
        rope=read_layer_rope(c, rotary_dim, rope_kind) if rope_kind else read_rope(c, rotary_dim, sections),
        tie_word_embeddings=holder.flag("tie_word_embeddings"),
    )


def read_heads(c: Fields, hidden_key: str, heads_key: str) -> tuple[int, int, int]:
    """Return the hidden size, the number of heads and their size, of a part that is no text model.

    Raises ConfigError for heads of a size that the attention kernel does not take.
    """
    hidden, heads, most = c.integer(hidden_key, 1, MAX_WIDTH), c.integer(heads_key, 1, 1 << 10), kv_pages.MAX_HEAD_DIM
    if hidden % (8 * heads) or hidden > most * heads:
        raise c.fail(hidden_key, f"{heads} heads of a multiple of 8 up to {most}")
    head_dim = resolve_head_dim({**c.values, "hidden_size": hidden}, heads, is_text_config=False)
    if head_dim != hidden // heads:
        raise c.fail("head_dim", f"{hidden // heads}, since {heads} heads divide {hidden_key} ({hidden})")
    return hidden, heads, head_dim


def read_layer_types(c: Fields, num_layers: int, kinds: Sequence[str]) -> list[str] | None:
    """Return the kind of each layer, one of `kinds`; None if the file does not list them."""
    if not c.has("layer_types"):
        return None
    types = c.values["layer_types"]
    if not isinstance(types, list) or any(kind not in kinds for kind in types):
        raise c.fail("layer_types", f"a list of {' and '.join(repr(kind) for kind in kinds)} only")
    if len(types) != num_layers:
        raise c.fail("layer_types", f"one entry for each of the {num_layers} layers")
    return types


def read_window(c: Fields, context_length: int, *, usual: int = 0) -> int:
    """Return how many tokens a token of any layer attends to, itself included; 0: all before it.

    For families whose `sliding_window` holds for all layers. A window as long as the context is none. usual: where the
    file has no such key; null is no window.
    """
    key = "sliding_window"
    window = c.integer(key, 1, MAX_WINDOW) if c.has(key) else 0 if key in c.values else usual
    return window if window < context_length else 0


def _refuse_unsupported(c: Fields) -> None:
    for key in ("text_config", "thinker_config"):
        if c.has(key):
            raise c.fail(key, "no such key (this family has no other parts than text)")
    if c.flag("use_sliding_window"):
        raise c.fail("use_sliding_window", "false (sliding-window attention is not supported)")
    if c.has("is_causal") and not c.flag("is_causal"):
        raise c.fail("is_causal", "true (attention to later tokens is not supported)")
    if c.has("hidden_act") and c.values["hidden_act"] != "silu":
        raise c.fail("hidden_act", "'silu'")


def _head_dim(c: Fields, hidden_size: int, num_heads: int) -> int:
    """Check `head_dim` where it is given, and that the division is exact where it is not, before resolving it."""
    explicit = {key: c.integer(key, 1, _MAX_HEAD_DIM) for key in ("qk_head_dim", "head_dim") if c.has(key)}
    if not explicit and hidden_size % num_heads:
        raise c.fail("hidden_size", f"a multiple of num_attention_heads ({num_heads}), since there is no head_dim")
    head_dim = resolve_head_dim({**explicit, "hidden_size": hidden_size}, num_heads, is_text_config=True)
    if head_dim is None or head_dim % 2:
        key = next(iter(explicit), "hidden_size")
        raise c.fail(key, f"an even head size (rotary embedding turns pairs), not {head_dim}")
    return head_dim
