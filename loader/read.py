"""What a loader does for a model: reads rectangles of checkpoint tensors, and hands them to whoever stores them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

from tilerank.parallel.layer import Piece

from .checkpoint import Checkpoint
from .errors import CheckpointError

FLOATS = ("BF16", "F16", "F32")
"""The dtypes of weights that are not quantised, and of scales."""

SIZES = {"BF16": 2, "F16": 2, "F32": 4, "F8_E4M3": 1, "I8": 1, "I32": 4}


@dataclass(frozen=True)
class Source:
    """A rectangle of a tensor, and what that tensor must be: its whole shape, one of `dtypes` (safetensors' names)."""

    name: str
    shape: tuple[int, ...]
    dtypes: tuple[str, ...]
    index: tuple[slice, ...]
    optional: bool = False

    @property
    def elements(self) -> int:
        return prod(part.stop - part.start for part in self.index)

    def check(self, checkpoint: Checkpoint) -> None:
        info = checkpoint.info(self.name)
        if info.shape != self.shape:
            raise CheckpointError(
                f"{info.file}: tensor {self.name}: expected shape {list(self.shape)}, found {list(info.shape)}"
            )
        if info.dtype not in self.dtypes:
            expected = self.dtypes[0] if len(self.dtypes) == 1 else f"one of {', '.join(self.dtypes)}"
            raise CheckpointError(f"{info.file}: tensor {self.name}: expected {expected}, found {info.dtype}")


@dataclass(frozen=True)
class Read:
    """`store` takes the tensors of all sources, in order."""

    sources: tuple[Source, ...]
    store: Callable[..., None]

    @staticmethod
    def of(piece: Piece) -> Read:
        """Floats, as the model asks for them."""
        return Read((Source(piece.name, piece.shape, FLOATS, piece.index, piece.optional),), piece.store)

    @property
    def elements(self) -> int:
        return sum(source.elements for source in self.sources)

    def nbytes(self, checkpoint: Checkpoint) -> int:
        return sum(source.elements * SIZES[checkpoint.info(source.name).dtype] for source in self.sources)
