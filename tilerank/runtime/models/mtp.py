"""Multi-token-prediction heads (DeepSeek-V3, arXiv 2412.19437), which draft the token after the next one.

    y_p = norm(layer(projection([embedding_norm(e_(p + 1)), hidden_norm(h_p)])))

h_p is the hidden state of token p after the model's last norm, e_(p + 1) the embedding of the token after it. The
output head of the model gives the logits of token p + 2 from y_p. To draft one more token, y_p takes the place of
h_(p + 1). A checkpoint may have an output head for drafts, with rows of frequent tokens alone, as that of EAGLE-3
(arXiv 2503.01840): `draft_vocab_size` of config.json rows, and `d2t`, the difference of the token of each row and its
number.

The cache of the layer has its entry of y_p at index p, in the pages of the other layers. The last entry of a page
depends on the first token after it, which differs between sequences that share the page. It is used all the same, as
are entries that a sequence has not computed: a draft that is wrong takes time and changes no bit of a text.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tilerank.kernels import ops
from tilerank.loader.card import ModelCard
from tilerank.loader.errors import ConfigError
from tilerank.loader.headers import stored_tensors
from tilerank.parallel.embedding import DraftVocabulary
from tilerank.parallel.linear import GatheredLinear
from tilerank.parallel.norm import RMSNorm
from tilerank.parallel.sharding import Sharding

from ..protocol.sizes import KEPT_ROWS
from ..step.batch import Batch, LogitRows
from ..step.cache import Cache
from ..step.model import DraftHead, KeptStates
from .decoder import MLP, DecoderLayers, DecoderNames, Mixer
from .text_config import TextConfig

_VOCABULARY_SIZE = "draft_vocab_size"


@dataclass(frozen=True)
class MTPNames:
    """Names of the modules of a head in a checkpoint. module, left_out: as in DraftHead."""

    module: str
    layer: str
    embedding_norm: str
    hidden_norm: str
    projection: str
    norm: str
    left_out: tuple[str, ...] = ()


def names_after_last(num_layers: int) -> MTPNames:
    """Return the names of a head that is stored as the layer after the last (DeepSeek, GLM)."""
    layer = DecoderNames.layer.format(num_layers)
    return MTPNames(
        f"{layer}.",
        layer,
        f"{layer}.enorm",
        f"{layer}.hnorm",
        f"{layer}.eh_proj",
        f"{layer}.shared_head.norm",
        # Copies of those of the model.
        left_out=(f"{layer}.embed_tokens.", f"{layer}.shared_head.head."),
    )


class MTPHead(DecoderLayers, DraftHead):
    """A head with one layer of its model, which shares the model's embedding, and its output head unless it has one of
    its own for some tokens."""

    def __init__(
        self,
        card: ModelCard,
        config: TextConfig,
        sharding: Sharding,
        names: MTPNames,
        mixer: Callable[[str, int], Mixer[Any]],
        mlp: Callable[[str, int], MLP],
    ) -> None:
        """mixer, mlp: as in DecoderLayers; the number of the layer is that after the last. Raises ConfigError for a
        checkpoint without the head, which many quantised ones have lost."""
        hidden, number, directory = config.hidden_size, config.num_layers, card.fields.path.parent
        tensors = stored_tensors(directory)
        if tensors is not None and not any(name.startswith(f"{names.projection}.") for name in tensors):
            raise ConfigError(
                f"{directory}: --speculative mtp: expected a checkpoint with a multi-token-prediction head "
                f"({names.projection}), found none"
            )
        super().__init__(
            replace(config, num_layers=1),
            card.context_length,
            sharding,
            DecoderNames(layer=names.layer, norm=names.norm),
            lambda name, _: mixer(name, number),
            lambda name, _: mlp(name, number),
        )
        self.embedding_norm, self.hidden_norm = (
            RMSNorm(name, hidden, config.rms_norm_eps, sharding, zero_centered=config.zero_centered_norms)
            for name in (names.embedding_norm, names.hidden_norm)
        )
        self.of_embedding, self.of_hidden = (
            GatheredLinear(names.projection, hidden, hidden, sharding, first=first, inputs=2 * hidden)
            for first in (0, hidden)
        )
        self.module, self.left_out = names.module, names.left_out
        if card.text.has(_VOCABULARY_SIZE):
            size = card.text.integer(_VOCABULARY_SIZE, 1, card.vocab_size)
            head, ids = f"{names.module}shared_head.head", f"{names.module}d2t"
            self.vocabulary = DraftVocabulary(head, ids, hidden, size, card.vocab_size, sharding)
            self.left_out = tuple(name for name in names.left_out if name != f"{head}.")
        self.cache_spec = self.layers[0].mixer.cache_spec
        self._shape, self._dtype = (KEPT_ROWS, hidden), sharding.dtype
        self._rows = torch.arange(KEPT_ROWS)
        self._kept: Tensor

    def allocate(self) -> None:
        super().allocate()
        self._kept = torch.zeros(self._shape, dtype=self._dtype)

    def nbytes(self) -> int:
        return super().nbytes() + self._shape[0] * self._shape[1] * self._dtype.itemsize

    def keep(self, hidden: Tensor, only: LogitRows | None) -> Tensor:
        ops.put_rows_(self._kept, self._rows[: hidden.shape[0]], hidden)
        return hidden if only is None else only.take(hidden)

    def __call__(self, embedded: Tensor, rows: KeptStates, batch: Batch, cache: Cache) -> Tensor:
        hidden = ops.take_rows(self._kept, rows.read)
        x = ops.add(self.of_embedding(self.embedding_norm(embedded)), self.of_hidden(self.hidden_norm(hidden)))
        x = self.hidden(x, batch, [cache])
        ops.put_rows_(self._kept, rows.replaced, x)
        return x
