"""The interfaces of a model and of an encoder of media, which the files of `models/` implement."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from tilerank.parallel.cost import Cost
from tilerank.parallel.embedding import DraftVocabulary
from tilerank.parallel.parameters import Layer

from .batch import Batch, BatchContent, LogitRows
from .cache import Cache, CacheSpec, has_states
from .latent_forms import ContextPart, Expands
from .speaker import Speaker


class Encoder(Layer):
    """Turns a picture, video or sound into rows that replace the embeddings of its placeholders; cut over the ranks.

    whole_tokens: of the longest medium if all of its tokens attend to each other, so that one step computes them; 0 if
    they attend to those before them alone.
    """

    whole_tokens: int = 0

    @abstractmethod
    def shape(self, grid: tuple[int, int, int]) -> tuple[int, int, int]:
        """Return (levels, tokens, hidden) of the encoding of a medium with this grid (prompt.py: Medium)."""

    @abstractmethod
    def encode(self, frames: Tensor, grid: tuple[int, int, int], operations: float) -> Iterator[Tensor | None]:
        """Encode frames uint8 [n, height, width, 3], or samples float32 [n] of sound, in pieces of up to `operations`
        operations on all ranks together, or a little more where they cannot be cut. The bits do not depend on how an
        encode is cut.

        A collective: all ranks call this with the same arguments and take the same number of pieces. Each `next`
        computes a piece. The last yields the encoding [levels, tokens, hidden] in the activation dtype, with the same
        bits on every rank, and the others yield None. Level 0 replaces the embeddings; level j + 1 is added to the
        residual after layer j of the decoder (DeepStack, arXiv 2406.04334).
        """

    @abstractmethod
    def parts(self, grid: tuple[int, int, int]) -> Iterator[tuple[Layer, int, int]]:
        """Yield the layers that encode a medium with this grid, each with the number of its rows and of the pairs of
        rows that attend to each other."""

    def cost(self) -> Cost:
        """Nothing: a step of the decoder does not run it."""
        return Cost()

    def cost_of_caching(self) -> Cost:
        return Cost()


@dataclass(frozen=True)
class KeptStates:
    """The kept hidden states that a pass of a draft head takes.

    read: [t] int64, those of the rows of the batch. replaced: [m] int64, those of the rows with logits, none twice,
    which the pass replaces with its own, so that the next pass goes on from them.
    """

    read: Tensor
    replaced: Tensor


class DraftHead(Layer):
    """Drafts the token after the next one, from the hidden state of a token and the embedding of the next; cut over the
    ranks.

    cache_spec: what it keeps of a sequence, at the index of the first of the two tokens. module: with this begin the
    names of its tensors in a checkpoint, of which it does not use those that begin with one of `left_out`.
    vocabulary: of the tokens that it drafts; None if it drafts all, with the output head of the model.
    """

    cache_spec: CacheSpec
    module: str
    left_out: tuple[str, ...] = ()
    vocabulary: DraftVocabulary | None = None

    def cost(self) -> Cost:
        """Nothing: a step of the decoder does not run it."""
        return Cost()

    def cost_of_caching(self) -> Cost:
        return Cost()

    def cost_of_pass(self) -> Cost:
        """Return what a pass of it reads and computes, without the output head of the model."""
        return super().cost()

    @abstractmethod
    def keep(self, hidden: Tensor, only: LogitRows | None) -> Tensor:
        """Keep the rows after the model's last norm, [t, hidden], until the next step, in place of those kept before.
        Returns those with logits."""

    @abstractmethod
    def __call__(self, embedded: Tensor, rows: KeptStates, batch: Batch, cache: Cache) -> Tensor:
        """Return the rows whose logits are computed, [m, hidden], and keep them in place of those that they came from.

        embedded: [t, hidden], the tokens after those of the rows, which is overwritten. batch: has these tokens, and
        the positions and slots of the tokens before them.
        """


class Model(Layer):
    """A whole model, cut as its sharding says. Weights exist after `allocate()`.

    position_axes: the number of positions of a token.
    spare_ids: the number of ids after those of the vocabulary that prompts may have, such as placeholders of pictures.
        They are never generated.
    encoder: of media; None for a model that takes text only.
    speaker: None for a model that does not speak.
    draft_head: None for a model that does not draft.
    expands: decides for which sequences latent attention computes keys and values (latent_forms.py); None for a model
        without latent attention.
    context_part: the part of every context that this rank reads; None if each rank reads whole contexts.
    whole_texts, reach: as in BatchContent.
    """

    position_axes: int = 1
    spare_ids: int = 0
    encoder: Encoder | None = None
    speaker: Speaker | None = None
    draft_head: DraftHead | None = None
    expands: Expands | None = None
    context_part: ContextPart | None = None
    whole_texts: bool = False
    reach: int = 0

    @abstractmethod
    def cache_specs(self) -> list[CacheSpec]:
        """Return what each layer keeps between steps, in the order of `forward`'s caches; that of a draft head last."""

    def batch_content(self) -> BatchContent:
        """Return what its batches hold."""
        return BatchContent(
            self.position_axes,
            has_states(self.cache_specs()),
            bool(self.cost().experts),
            self.expands,
            self.context_part,
            self.speaker.kept_layer if self.speaker else 0,
            self.encoder is not None and self.encoder.whole_tokens > 0,
            self.whole_texts,
            self.reach,
        )

    @abstractmethod
    def forward(self, batch: Batch, caches: Sequence[Cache]) -> Tensor:
        """Return fp32 logits [m, vocab] of the batch's m logit rows, the same bits on every rank. A model that embeds
        or scores texts returns these rows after the last norm, [m, hidden].

        Calls kernels and makes views, and never reads values: steps are recorded (kernels/graph.py).
        """

    @abstractmethod
    def draft(self, batch: Batch, rows: KeptStates, caches: Sequence[Cache]) -> Tensor:
        """Return fp32 logits [m, vocab] of the draft head, as `forward` does, for the token after each of
        `batch.token_ids`; those of the tokens of its vocabulary, if it has one.

        rows, batch: as in DraftHead. caches: as in `forward`.
        """

    @property
    @abstractmethod
    def head_module(self) -> str:
        """The module of the checkpoint that has the weight of the output head, which may be the embedding."""

    @property
    @abstractmethod
    def rotates_source(self) -> bool:
        """Whether layers of cross-attention rotate queries and keys by positions."""

    @abstractmethod
    def store_source(self, rows: Tensor, positions: Tensor | None, slots: Tensor, caches: Sequence[Cache]) -> None:
        """Store the keys and values of encodings, rows [n, hidden], in slots [n] int64 of the caches of layers of
        cross-attention. positions: [axes, n] int64, None unless `rotates_source`."""

    def cost_without_logits(self) -> Cost:
        """Return what a step reads and computes for tokens whose logits are not used: all of a prompt but the last."""
        return self.cost()

    @abstractmethod
    def ignore(self, name: str) -> bool:
        """Return whether this tensor of a checkpoint is left out on purpose."""
