"""What the bytes of a page of the KV cache depend on beside its tokens.

A page is read back only where it would be computed with the same bits. Whatever may change a bit is part of the
identity: in doubt, a page is computed again.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path

from tilerank.kernels import core
from tilerank.kernels.kv_pages import PAGE_TOKENS
from tilerank.loader.card import ModelCard
from tilerank.loader.checkpoint import Checkpoint, file_states
from tilerank.parallel.sharding import Sharding

from ..step.cache import CacheSpec
from .rank_config import RankConfig

_SOURCES = Path(__file__).parents[2]


def cache_identity(
    checkpoint: Checkpoint, card: ModelCard, config: RankConfig, sharding: Sharding, specs: Sequence[CacheSpec]
) -> bytes:
    """Return 32 bytes that identify the files of the model, how it is loaded and cut, and the code that computes it."""
    files = file_states(checkpoint, None if config.quantization is None else config.quantization.calibration)
    cut = (sharding.rank, sharding.size, sharding.strategy, sharding.cached_tokens, sharding.kv_split, list(specs))
    loaded = (config.dtype, config.kv_dtype, config.quantization, config.activation_bits)
    options = (card.context_length, sorted(config.family_options.items()))
    kernels = (core.build_digest(), core.isa(), sorted(core.rungs().items()), PAGE_TOKENS)
    text = repr((files, cut, loaded, options, kernels, _digest_of_sources()))
    return hashlib.blake2b(text.encode(), digest_size=32).digest()


def _digest_of_sources() -> str:
    """Return a digest of the Python code of the package."""
    digest = hashlib.blake2b(digest_size=32)
    for path in sorted(_SOURCES.rglob("*.py")):
        digest.update(repr((str(path.relative_to(_SOURCES)), path.read_bytes())).encode())
    return digest.hexdigest()
