"""The encodings of pictures, videos and sound that a rank holds, by number."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..protocol.prompt import Medium
from ..protocol.rank_messages import Encode
from .model import Encoder


class RankEncodings:
    """The encodings of a rank, and the encode that runs, if any.

    tensors: [levels, tokens, hidden] each, by number.
    """

    def __init__(self, encoder: Encoder | None) -> None:
        self.tensors: dict[int, Tensor] = {}
        self._encoder = encoder
        self._number = -1
        self._medium: Medium | None = None
        self._operations = 0.0
        self._frames = bytearray()
        self._pieces: Iterator[Tensor | None] | None = None

    def forget(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            del self.tensors[number]

    def start(self, message: Encode) -> None:
        """Start an encode, in place of one that is not complete."""
        self.stop()
        self.forget(message.forgotten)
        self._number, self._medium, self._operations = message.number, message.medium, message.operations
        self._frames += message.medium.frames

    def add_frames(self, frames: bytes) -> None:
        self._frames += frames

    def advance(self) -> bool:
        """Compute a piece. Returns whether the encoding is complete."""
        if self._pieces is None:
            assert self._encoder is not None and self._medium is not None
            if self._medium.kind == "audio":
                frames = torch.frombuffer(self._frames, dtype=torch.float32)
            else:
                frames = torch.frombuffer(self._frames, dtype=torch.uint8).view(*self._medium.size, 3)
            self._pieces = self._encoder.encode(frames, self._medium.grid, self._operations)
        encoding = next(self._pieces)
        if encoding is None:
            return False
        self.tensors[self._number] = encoding
        self.stop()
        return True

    def stop(self) -> None:
        """Drop the encode that runs."""
        self._number, self._medium, self._frames, self._pieces = -1, None, bytearray(), None
