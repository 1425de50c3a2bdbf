"""The padding of heads that do not divide by the number of ranks, the same in decoders and towers."""

from tilerank.loader.padding import get_head_dim_and_projection_size, get_num_heads_padding_size
from tilerank.parallel.shard import HeadCut
from tilerank.parallel.sharding import Sharding


def head_multiple(head_dim: int, sharding: Sharding) -> int:
    """Return the number of which padded counts of heads of this size are a multiple."""
    return get_num_heads_padding_size(sharding.size, sharding.head_block(head_dim), head_dim)


def attention_scale(width: int, cut: HeadCut, heads: int) -> float:
    """Return the factor of the scores of `heads` heads together `width` wide, which padding does not change."""
    head_dim, _ = get_head_dim_and_projection_size(width, sum(span.size for span in cut.q), heads)
    return float(head_dim**-0.5)
