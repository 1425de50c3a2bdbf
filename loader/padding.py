"""Padding of head counts and fused tensors: the arithmetic of equal shapes on every rank.

The names and signatures are those that CPU servers of this field use, so that a config adapted for them reads the same
here. `cfg` may be an object with attributes (a transformers config) or a mapping (a parsed config.json).
"""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .errors import CheckpointError, ConfigError

if TYPE_CHECKING:  # the command reads configs before it starts ranks, and must not wait for torch
    from torch import Tensor


def resolve_head_dim(cfg: Any, num_heads: int, is_text_config: bool) -> int | None:
    """Head size before any padding, or None where the config does not tell.

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
    """The multiple that head counts are padded to.

    `weight_block_size` is [rows, columns] of a quantisation block, or None. Without blocks: `tp_size`. With blocks
    whose rows do not divide `head_dim`: `tp_size * lcm(head_dim, rows) / rows`. `head_dim` None (not a text config):
    twice `tp_size` for odd `tp_size` with blocks, else `tp_size`.

    This is the multiple that is in use in the field. Rows of a rank that must start on a block edge need a multiple of
    `tp_size * lcm(head_dim, rows) / head_dim` as well: 64-row heads and 128-row blocks, two heads a rank.
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
    """Head size and projection width of a tower whose head count was padded from `original_num_heads` to `num_heads`.

    The head size, and with it the softmax scale, stays that of the original; the projection grows.
    """
    if not 1 <= original_num_heads <= num_heads:
        raise ConfigError(f"{original_num_heads} heads cannot be padded to {num_heads}")
    head_dim = embed_dim // original_num_heads
    return head_dim, num_heads * head_dim


def pad_loaded_weight(loaded_weight: "Tensor", output_dim: int, output_sizes: Sequence[int]) -> "Tensor":
    """Zero-pad every part of a fused checkpoint tensor (q|k|v, gate|up, ...) at its own end.

    `output_sizes` are the padded sizes of the parts along `output_dim`; the tensor is split in their proportions.
    Nothing to pad: the tensor itself comes back. Raises CheckpointError where the parts cannot add up to the tensor; a
    caller that knows its name in the checkpoint puts it in front.
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
