"""The interface of a model that speaks, which speech_rank.py calls and models/talker.py implements."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from tilerank.parallel.cost import Cost
from tilerank.parallel.parameters import Layer

from .batch import Batch
from .cache import Cache, CacheSpec


@dataclass(frozen=True)
class Additions:
    """What is added to the embedded tokens of a talker's prompt.

    media: rows of tokens of media, [n] int64, and their projected hidden states [n, hidden], which replace the
    projected embeddings. codes: rows [k] int64, and codes [k] int64 whose embeddings are added to them.
    """

    media: tuple[Tensor, Tensor] | None
    codes: tuple[Tensor, Tensor] | None


@dataclass(frozen=True)
class CodeSampling:
    """The sampling of all codes but the first of m frames; the arguments of ops.sample.

    draws: [codes - 1, m] float32. temperature: [m] float32, 0 for the likeliest codes. top_k: [m] int32. top_p, min_p:
    [m] float32.
    """

    draws: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor


@dataclass(frozen=True)
class Passes:
    """The passes of the code predictor for m frames; frame i has page i of its caches.

    batches: one for each code after the first. past, first: [m] int64, the rows of the first batch that take the last
    hidden states of the talker and the embeddings of the first codes. frames: [m] int64, 0 to m - 1.
    """

    batches: tuple[Batch, ...]
    past: Tensor
    first: Tensor
    frames: Tensor


@dataclass(frozen=True)
class FrameInputs:
    """m frames: past, [m, hidden], the last hidden states of the talker; first, [m] int64, the first codes."""

    past: Tensor
    first: Tensor
    choice: CodeSampling
    passes: Passes


@dataclass(frozen=True)
class TalkerRows:
    """The talker's results for rows with logits.

    logits: fp32 [m, codes of the talker], of the first code of the next frames. hidden: [m, hidden], after the last
    norm.
    """

    logits: Tensor
    hidden: Tensor


class SoundState:
    """The state of a vocoder from one part of a sound to the next."""


class Vocoder(Layer):
    """Turns frames of codes into samples; whole on every rank. Its cost counts frames as tokens.

    codes: of a frame. frame_samples: samples of a frame. late_samples: how many fewer the first frame of a sound has.
    """

    codes: int
    frame_samples: int
    late_samples: int

    @property
    @abstractmethod
    def state_bytes(self) -> int:
        """Bytes of the largest state of a sound."""

    @abstractmethod
    def begin(self) -> SoundState:
        """Return the state of a sound that begins."""

    @abstractmethod
    def decode(self, codes: Tensor, state: SoundState) -> Tensor:
        """Return the samples, float32 [n], of the next frames of a sound, and update its state. codes: [frames, codes
        of a frame] int64."""


class Speaker(Layer):
    """Turns an answer into frames of codes; cut over the ranks. vocoder: turns them into samples.

    predictor: chooses the codes of frames after the first; its cost counts frames as tokens. kept_layer: the layer of
    the text model, counted from 1, whose output the talker reads at tokens of media. codes: of a frame. hidden: of the
    talker. context_length: rows of the talker's longest sequence.
    """

    vocoder: Vocoder
    predictor: Layer
    kept_layer: int
    codes: int
    hidden: int
    context_length: int

    @abstractmethod
    def cache_specs(self) -> list[CacheSpec]:
        """Return what each layer of the talker keeps of a sequence."""

    @abstractmethod
    def frame_cache_specs(self) -> list[CacheSpec]:
        """Return what each layer of the code predictor keeps of a frame while it is computed, within a page."""

    @abstractmethod
    def project(self, hidden: Tensor) -> Tensor:
        """Return rows [m, hidden] of the talker for hidden states [m, hidden of the text model] of tokens of media."""

    @abstractmethod
    def read(self, batch: Batch, additions: Additions, caches: Sequence[Cache]) -> TalkerRows:
        """Compute prompts. The tokens of `batch` are those of the text model."""

    @abstractmethod
    def choose(self, inputs: FrameInputs, frame_caches: Sequence[Cache]) -> tuple[list[Tensor], Tensor]:
        """Return the codes of m frames after the first, [m] int64 each, and the sum of the embeddings of all codes,
        [m, hidden]."""

    @abstractmethod
    def speak(self, batch: Batch, codes: Tensor, caches: Sequence[Cache]) -> TalkerRows:
        """Compute the rows of frames. The tokens of `batch` are those that frames read. codes: the sums that `choose`
        returns."""

    def cost(self) -> Cost:
        """Nothing: a step of the text model does not run it."""
        return Cost()

    def cost_of_caching(self) -> Cost:
        return Cost()
