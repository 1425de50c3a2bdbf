"""Padding of head counts and of loaded tensors, for equal shapes on every rank.

The names and signatures are those of other CPU inference servers, so that code and configs adapted to them carry over.
`cfg` may be an object with attributes (a transformers config) or a mapping (a parsed config.json).
"""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .errors import CheckpointError, ConfigError

if TYPE_CHECKING:  # commands read configs before they start ranks, without the delay of importing torch
    from torch import Tensor


def resolve_head_dim(cfg: Any, num_heads: int, is_text_config: bool) -> int | None:
    """Return the head size before any padding; None if the config gives neither a head size nor a hidden size.

    Default: `hidden_size // num_heads` (`d_model` where there is no `hidden_size`). Text: `qk_head_dim` of the
    top-level config wins, then `head_dim` of the text config, then `head_dim` of the top-level config. Vision and
    audio: `head_dim` of that config. A key that is null counts as absent.

    For text, `cfg` is the top-level config with its text config in `text_config` (or itself a text config), or a holder
    of both under `hf_config` and `hf_text_config`.
    """
    levels = [cfg]
    if is_text_config:
        top = _get(cfg, "hf_config") or cfg
        text = _get(cfg, "hf_text_config") or _get(top, "text_config") or top
        explicit = _first((top, "qk_head_dim"), (text, "head_dim"), (top, "head_dim"))
        levels += [text, top]
    else:
        explicit = _get(cfg, "head_dim")
    if explicit is not None:
        return int(explicit)
    hidden = _first(*((level, key) for level in levels for key in ("hidden_size", "d_model")))
    if hidden is None:
        return None
    if num_heads < 1:
        raise ConfigError(
            f"the head size of a config with hidden size {hidden} needs at least 1 head, found {num_heads}"
        )
    return int(hidden) // num_heads


def get_num_heads_padding_size(
    tp_size: int, weight_block_size: Sequence[int] | None, head_dim: int | None = None
) -> int:
    """Return the number of which padded head counts are a multiple.

    `weight_block_size` is [rows, columns] of a quantisation block, or None. Without blocks: `tp_size`. With blocks
    whose rows do not divide `head_dim`: `tp_size * lcm(head_dim, rows) / rows`. `head_dim` None (not a text config):
    twice `tp_size` for odd `tp_size` with blocks, else `tp_size`.

    Other servers use this multiple. It does not make every rank's rows start at the edge of a block: that needs a
    multiple of `tp_size * lcm(head_dim, rows) / head_dim`, such as two 64-row heads a rank for 128-row blocks.
    """
    if weight_block_size is None:
        return tp_size
    if head_dim is None:
        return 2 * tp_size if tp_size % 2 else tp_size
    rows = weight_block_size[0]
    if head_dim % rows == 0:
        return tp_size
    return tp_size * (math.lcm(head_dim, rows) // rows)


def get_head_dim_and_projection_size(embed_dim: int, num_heads: int, original_num_heads: int) -> tuple[int, int]:
    """Return the head size and the projection width of a tower whose head count was padded.

    original_num_heads, num_heads: the count before and after padding. The head size, and with it the softmax scale,
    remains embed_dim // original_num_heads; the projection grows to num_heads * head size.
    """
    if not 1 <= original_num_heads <= num_heads:
        raise ConfigError(f"{original_num_heads} heads cannot be padded to {num_heads}")
    head_dim = embed_dim // original_num_heads
    return head_dim, num_heads * head_dim


def pad_loaded_weight(loaded_weight: "Tensor", output_dim: int, output_sizes: Sequence[int]) -> "Tensor":
    """Zero-pad every part of a fused checkpoint tensor (q|k|v, gate|up, ...) at its own end.

    output_sizes: the padded sizes of the parts along `output_dim`; the tensor is split in their proportions. Returns
    the tensor itself if there is nothing to pad. Raises CheckpointError if the parts cannot add up to the tensor; the
    sentence lacks the tensor's name, which a caller may prepend.
    """
    shape, total = list(loaded_weight.shape), sum(output_sizes)
    found = shape[output_dim]
    if found == total:
        return loaded_weight
    where = f"loaded_weight of shape {shape} has {found} rows in dimension {output_dim}"
    if found > total:
        raise CheckpointError(f"{where}, expected at most {total} = {_sum(output_sizes)}")
    if any(size * found % total for size in output_sizes):
        raise CheckpointError(f"{where}, expected whole parts in the proportions {_sum(output_sizes)} of {total}")
    shape[output_dim] = total
    padded = loaded_weight.new_zeros(shape)
    source = target = 0
    for size in output_sizes:
        real = size * found // total
        padded.narrow(output_dim, target, real).copy_(loaded_weight.narrow(output_dim, source, real))
        source, target = source + real, target + size
    return padded


def _sum(sizes: Sequence[int]) -> str:
    return " + ".join(map(str, sizes))


def _get(cfg: Any, key: str) -> Any:
    return cfg.get(key) if isinstance(cfg, Mapping) else getattr(cfg, key, None)


def _first(*places: tuple[Any, str]) -> Any:
    return next((value for cfg, key in places if (value := _get(cfg, key)) is not None), None)
