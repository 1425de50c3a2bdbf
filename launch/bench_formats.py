"""The weight formats that `bench kernels` knows, by the names of its --formats. A new one is an entry of FORMATS."""

from dataclasses import dataclass
from typing import Literal

import torch

from tilerank.kernels.formats import Float
from tilerank.kernels.linear import PackedWeight
from tilerank.kernels.moe import PackedExperts


@dataclass(frozen=True)
class BenchFormat:
    """activations: dtype of x. operations: what the products are, as `Work` names them."""

    activations: torch.dtype
    operations: Literal["bf16", "int8", "fp32"]

    def nbytes(self, n: int, k: int) -> int:
        """Of a packed weight[n, k]."""
        return PackedWeight.nbytes(n, k, self.activations)

    def empty(self, n: int, k: int) -> PackedWeight:
        return PackedWeight.empty(n, k, self.activations)

    def experts(self, experts: int, n: int, k: int, *, parts: int = 1) -> PackedExperts:
        return PackedExperts.empty(experts, n, k, Float(self.activations), parts=parts)


FORMATS: dict[str, BenchFormat] = {
    "bfloat16": BenchFormat(torch.bfloat16, "bf16"),
    "float32": BenchFormat(torch.float32, "fp32"),
}
