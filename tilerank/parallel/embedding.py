"""The vocabulary, cut by rows: embedding table, output head, both as one tied weight, and a head for some tokens."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

import torch
from torch import Tensor

from tilerank.kernels import ops
from tilerank.kernels.errors import KernelError

from .cost import Cost
from .linear import Linear
from .parameters import Layer, PackedParameter, PlainParameter
from .shard import Cut
from .sharding import Sharding

VOCABULARY = "vocabulary"
"""The name of the dimension that these layers are cut along."""


class VocabParallelEmbedding(Layer):
    """The embedding table, cut by rows: ids[t] int64 -> [t, hidden] on every rank.

    It has the format of a GGUF file, whose rows are unpacked when they are looked up, or is a plain table.
    """

    def __init__(self, name: str, vocab: int, hidden: int, sharding: Sharding) -> None:
        self.cut = sharding.cut(vocab)
        self.span = self.cut.spans[sharding.rank]
        held = sharding.table_format(name)
        self.table: PlainParameter | PackedParameter
        if held is None:
            self.table = PlainParameter((self.span.size, hidden), sharding.dtype)
        else:  # of the height of the highest part, so that no rank has an empty weight
            self.table = PackedParameter(max(span.size for span in self.cut.spans), hidden, held)
        rows = slice(self.span.start, self.span.stop)
        self.table.fill(f"{name}.weight", (vocab, hidden), rows, slice(0, hidden))
        self._sharding = sharding

    def __call__(self, ids: Tensor) -> Tensor:
        # Exactly one rank holds the row and the others add zeros, so the sum is exact.
        return self._sharding.sum(self._rows(ids))

    def _rows(self, ids: Tensor) -> Tensor:
        if isinstance(self.table, PlainParameter):
            return ops.embedding(ids, self.table.data, self.span.start)
        return self.table.packed.embedding(ids, self.span.start)

    def cost(self) -> Cost:
        """Nothing: a step reads one row for each token, not the table."""
        return Cost()

    def cuts(self) -> Iterator[tuple[str, Cut]]:
        yield VOCABULARY, self.cut


class ParallelLMHead(Linear):
    """The output head, cut by rows of the vocabulary: x[m, hidden] -> logits [m, vocab] in fp32 on every rank.

    Columns that pad the vocabulary are dropped from the result. spare_ids: the weight has so many more rows, whose
    logits are dropped as well. dimension: the name of the vocabulary in plans.
    """

    def __init__(
        self,
        name: str,
        hidden: int,
        vocab: int,
        sharding: Sharding,
        *,
        bias: bool = False,
        spare_ids: int = 0,
        dimension: str = VOCABULARY,
    ) -> None:
        rows = vocab + spare_ids
        self.cut = sharding.cut(rows)
        self.span = self.cut.spans[sharding.rank]
        # All parts have the height of the highest, with at most one unit of zero rows, so that they can be gathered.
        height = max(span.size for span in self.cut.spans)
        held = sharding.head_format(name, self.span)
        super().__init__(height, hidden, held, sharding.dtype if bias else None)
        self.fill_rows(name, (rows, hidden), self.span)
        self._vocab = vocab
        self._starts = torch.tensor([0, *accumulate(span.real for span in self.cut.spans)]).clamp(max=vocab)
        self._sharding = sharding
        self._dimension = dimension

    def __call__(self, x: Tensor) -> Tensor:
        return self._sharding.gather_columns(self.project(x, out_dtype=torch.float32), self._starts, self._vocab)

    def cuts(self) -> Iterator[tuple[str, Cut]]:
        yield self._dimension, self.cut


class TiedEmbedding(Layer):
    """Embedding and output head that share one weight, held once: ids[t] int64 -> [t, hidden] on every rank.

    The weight is packed for the head (`logits`), which reads all of it in every step; a look-up unpacks single rows.
    spare_ids: rows after those of the vocabulary, which are embedded and have no logits.
    """

    def __init__(self, name: str, vocab: int, hidden: int, sharding: Sharding, *, spare_ids: int = 0) -> None:
        self._head = ParallelLMHead(name, hidden, vocab, sharding, spare_ids=spare_ids)
        self._sharding = sharding

    def __call__(self, ids: Tensor) -> Tensor:
        # Exactly one rank holds the row; ids outside of a rank's part, and rows that pad it, give zeros.
        return self._sharding.sum(self._head.weight.packed.embedding(ids, self._head.span.start))

    def logits(self, x: Tensor) -> Tensor:
        """Return logits [m, vocab] in fp32 on every rank for x[m, hidden]."""
        return self._head(x)


class TokenIds(PlainParameter):
    """The tokens that the rows of an output head stand for, [n] int64, whole on every rank.

    The checkpoint has the difference of each token and its row, as in EAGLE-3 (arXiv 2503.01840).
    """

    holds_integers = True

    def __init__(self, name: str, n: int, vocab: int) -> None:
        super().__init__((n,), torch.int64)
        self._vocab = vocab
        self.fill(name, (n,), slice(0, n))

    def write(self, rows: Tensor, row: int) -> None:
        tokens = rows + torch.arange(row, row + len(rows))
        outside = (tokens < 0) | (tokens >= self._vocab)
        if outside.any():
            wrong = int(outside.nonzero()[0])
            raise KernelError(
                f"row {row + wrong}: expected a token from 0 to {self._vocab - 1}, found {int(tokens[wrong])}"
            )
        super().write(tokens, row)

    def cost(self) -> Cost:
        """Nothing: a step does not read them."""
        return Cost()


class DraftVocabulary(Layer):
    """An output head for some tokens of the vocabulary, its rows cut over the ranks: x[m, hidden] -> logits [m, n] in
    fp32 on every rank.

    Most drafts are of the most frequent tokens (arXiv 2502.14856), and an output head takes most of the time of a
    draft. head: the name of the module with the rows. ids: that of the tensor with their tokens.
    """

    def __init__(self, head: str, ids: str, hidden: int, n: int, vocab: int, sharding: Sharding) -> None:
        self._head = ParallelLMHead(head, hidden, n, sharding, dimension="draft vocabulary")
        self._ids = TokenIds(ids, n, vocab)

    def __call__(self, x: Tensor) -> Tensor:
        return self._head(x)

    def token_ids(self) -> list[int]:
        """Return the tokens of the columns of the logits. The weights must be loaded."""
        found: list[int] = self._ids.data.tolist()
        return found
