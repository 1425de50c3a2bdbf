"""What an engine asks of a model; the files of `models/` answer."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from torch import Tensor

from tilerank.kernels.attention import KVLayer
from tilerank.loader.config import ModelConfig
from tilerank.parallel.layer import Layer, Sharding

from .batch import Batch
from .cache import CacheSpec


class Model(Layer):
    """A whole model, cut as its sharding says. Weights exist after `allocate()`."""

    @abstractmethod
    def __init__(self, config: ModelConfig, sharding: Sharding) -> None: ...

    @abstractmethod
    def cache_specs(self) -> list[CacheSpec]:
        """What each layer keeps between steps, in the order of `forward`'s caches."""

    @abstractmethod
    def forward(self, batch: Batch, caches: Sequence[KVLayer]) -> Tensor:
        """fp32 logits [m, vocab] of the m rows that the batch names, the same bits on every rank.

        Kernels and views only, and no look at values: decode steps are recorded (kernels/graph.py).
        """

    @abstractmethod
    def ignore(self, name: str) -> bool:
        """Is this tensor of a checkpoint left out on purpose?"""
