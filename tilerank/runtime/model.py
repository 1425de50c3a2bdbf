"""What the worker asks of a model; the files of `models/` answer."""

from abc import abstractmethod
from collections.abc import Sequence

from torch import Tensor

from tilerank.kernels.kv_pages import KVPages
from tilerank.parallel.cost import Cost
from tilerank.parallel.parameters import Layer

from .batch import Batch
from .cache import CacheSpec


class Model(Layer):
    """A whole model, cut as its sharding says. Weights exist after `allocate()`."""

    @abstractmethod
    def cache_specs(self) -> list[CacheSpec]:
        """Return what each layer keeps between steps, in the order of `forward`'s caches."""

    @abstractmethod
    def forward(self, batch: Batch, caches: Sequence[KVPages]) -> Tensor:
        """Return fp32 logits [m, vocab] of the batch's m logit rows, the same bits on every rank.

        Calls kernels and makes views, and never reads values: steps are recorded (kernels/graph.py).
        """

    def cost_without_logits(self) -> Cost:
        """Return what a step reads and computes for tokens whose logits are not used: all of a prompt but the last."""
        return self.cost()

    @abstractmethod
    def ignore(self, name: str) -> bool:
        """Return whether this tensor of a checkpoint is left out on purpose."""
