"""A small model that drafts for the model of a rank (--draft-model), cut over the same ranks.

The entry of a token in its caches has the page and the index that it has in the caches of the model. Page tables,
shared prefixes and preemption are therefore those of the model. Entries that it has not computed, such as those of
tokens that came while nothing was drafted, only make drafts wrong.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tilerank.loader.checkpoint import Checkpoint
from tilerank.loader.weight_formats import weight_formats
from tilerank.loader.weights import load_weights
from tilerank.parallel.sharding import Sharding

from ..protocol.rank_messages import Chunk
from ..step.batch import Batch
from ..step.bytes_per_step import bytes_per_step
from ..step.cache import allocate, bytes_per_token
from ..step.step_graphs import Forward
from .drafter import Drafter
from .rank_config import RankConfig
from .registry import build_draft_model, read_draft_card

log = logging.getLogger(__name__)


class DraftModel(Drafter):
    """The model in `model_dir`. The constructor loads its weights.

    context_length: that of the model it drafts for. sharding: of that model, whose cut, group and dtype it has; its
    weights have the formats of its own checkpoint. tokens: in its caches.
    specs, caches: those of its layers. Raises as `Worker` does.
    """

    def __init__(
        self, model_dir: Path, context_length: int, sharding: Sharding, config: RankConfig, tokens: int
    ) -> None:
        card = read_draft_card(model_dir, context_length)
        formats = weight_formats(card.quantization, config.dtype, None, config.activation_bits)
        self._model = build_draft_model(card, replace(sharding, formats=formats))
        is_first = sharding.rank == 0
        load_weights(
            self._model,
            Checkpoint(model_dir),
            ignore=self._model.ignore,
            progress=is_first,
            quantization=card.quantization,
        )
        self.specs = self._model.cache_specs()
        self.caches = allocate(self.specs, tokens)
        self.content = self._model.batch_content()
        self.vocab_size, self.context_length = card.vocab_size, card.context_length
        self.weight_bytes, self.cache_bytes = self._model.nbytes(), bytes_per_token(self.specs) * tokens
        self.step_bytes = bytes_per_step(self._model)
        if is_first:
            log.info("%s drafts: rank 0 holds %.1f MB of it", model_dir, self.weight_bytes / 1e6)

    def forward(self, chunks: Sequence[Chunk], batch: Batch, *, is_recorded: bool) -> Forward:
        return lambda: self._model.forward(batch, self.caches)
