"""The weights of all experts of a mixture-of-experts layer."""

from dataclasses import dataclass

from torch import Tensor

from .errors import KernelError
from .weight import BLOCK_N, Format, Weight, round_up


@dataclass(frozen=True)
class PackedExperts:
    """One projection of all experts as a single tall weight of any format.

    `parts`: the number of projections with n outputs each that are used together: 2 for gate and up, else 1.
    The rows are ordered by expert. Within an expert the blocks of 32 outputs of its parts alternate, so that the
    kernels read its weights in order; for plain torch the parts follow each other. Each part is padded to whole blocks.
    """

    weight: Weight
    experts: int
    parts: int
    n: int

    @staticmethod
    def nbytes(experts: int, n: int, k: int, form: Format, *, parts: int = 1) -> int:
        """Return the bytes that the packed weights take, padding included."""
        return form.nbytes(_tall(experts, parts, n), k)

    @classmethod
    def empty(cls, experts: int, n: int, k: int, form: Format, *, parts: int = 1) -> "PackedExperts":
        """Return weights of zeros in memory of their own (`core.alloc`)."""
        return cls(form.empty(_tall(experts, parts, n), k), experts, parts, n)

    @property
    def k(self) -> int:
        return self.weight.k

    def part(self, expert: int, part: int = 0) -> Weight:
        """Return a view of the weight[n, k] of one part of an expert, which can be written and unpacked."""
        if not (0 <= expert < self.experts and 0 <= part < self.parts):
            raise KernelError(
                f"PackedExperts: expected one of {self.experts} experts and {self.parts} parts, "
                f"found expert {expert}, part {part}"
            )
        rows = round_up(self.n, BLOCK_N)
        if self.weight.is_plain:
            return self.weight.part((expert * self.parts + part) * rows, self.n)
        return self.weight.part(expert * self.parts * rows + part * BLOCK_N, self.n, self.parts)

    def write(self, rows: Tensor, expert: int, *, part: int = 0, row: int = 0, col: int = 0) -> None:
        """Write rows[r, c] to [row : row + r, col : col + c] of a part (`Weight.write`)."""
        self.part(expert, part).write(rows, row, col)

    def unpack(self, expert: int, part: int = 0) -> Tensor:
        """Return the values of a part as a plain matrix [n, k]."""
        return self.part(expert, part).unpack()


def _tall(experts: int, parts: int, n: int) -> int:
    """Return the number of rows of the tall weight."""
    if experts < 1 or parts < 1:
        raise KernelError(f"PackedExperts: experts, parts: expected positive numbers, found {experts}, {parts}")
    return experts * parts * round_up(n, BLOCK_N)
