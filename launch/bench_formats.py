"""The weight formats that `bench kernels` knows, by the names of its --formats. A new one is an entry of FORMATS."""

from dataclasses import dataclass
from typing import Literal

import torch

from tilerank.kernels.formats import Float, Format, Int8
from tilerank.kernels.linear import Weight
from tilerank.kernels.moe import PackedExperts


@dataclass(frozen=True)
class BenchFormat:
    """operations: what the products are, as `Work` names them."""

    form: Format
    operations: Literal["bf16", "int8", "fp32"]

    @property
    def activations(self) -> torch.dtype:
        """Of x."""
        return self.form.activations

    def nbytes(self, n: int, k: int) -> int:
        """Of a packed weight[n, k]."""
        return self.form.nbytes(n, k)

    def empty(self, n: int, k: int) -> Weight:
        return self.form.empty(n, k)

    def experts(self, experts: int, n: int, k: int, *, parts: int = 1) -> PackedExperts:
        return PackedExperts.empty(experts, n, k, self.form, parts=parts)


FORMATS: dict[str, BenchFormat] = {
    "bfloat16": BenchFormat(Float(torch.bfloat16), "bf16"),
    "float32": BenchFormat(Float(torch.float32), "fp32"),
    "int8": BenchFormat(Int8(), "int8"),
}
