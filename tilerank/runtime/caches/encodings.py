"""The encodings of pictures and videos: what every rank computes and holds, and what rank 0 decides about it.

An encoding has a number, which Encode messages and inserts name. Rank 0 keeps encodings by the digest of their medium,
so that requests with the same picture share one. An encoding that no sequence needs stays until its memory is needed;
the least recently used one is evicted first.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor

from ..errors import RequestError
from ..model import Encoder
from ..prompt import Medium
from ..rank_messages import Encode


class HeldEncodings:
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


@dataclass(frozen=True)
class Wanted:
    """A medium of a request. nbytes: of its encoding, on each rank."""

    digest: bytes
    medium: Medium
    nbytes: int


@dataclass(eq=False)
class Encoding:
    """An encoding that is computed or will be.

    medium: None once it is computed. users: how many sequences still have to insert tokens of it.
    """

    number: int
    digest: bytes
    nbytes: int
    medium: Medium | None
    users: int = 0

    @property
    def ready(self) -> bool:
        return self.medium is None


class EncoderCache:
    """Rank 0's list of encodings, of at most `budget` bytes on each rank.

    forgotten: numbers of evicted encodings; the engine sends and clears it.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.forgotten: list[int] = []
        self._encodings: dict[bytes, Encoding] = {}
        self._idle: OrderedDict[bytes, Encoding] = OrderedDict()  # without users, in order of eviction
        self._numbers = count()

    @property
    def used(self) -> int:
        """Bytes of all encodings, those included that are not computed yet."""
        return _nbytes(self._encodings.values())

    def check_fits(self, media: Sequence[Wanted]) -> None:
        """Raise RequestError if the encodings of these media do not fit in the budget together."""
        nbytes = _nbytes({wanted.digest: wanted for wanted in media}.values())
        if nbytes > self.budget:
            raise RequestError(
                f"the encodings of its pictures and videos take {nbytes} bytes, but the encoder cache has {self.budget}"
            )

    def pin(self, media: Sequence[Wanted]) -> list[Encoding] | None:
        """Return encodings for a sequence that needs all of `media`, or None if they do not fit beside the encodings
        that other sequences need."""
        by_digest = {wanted.digest: wanted for wanted in media}
        new = [wanted for digest, wanted in by_digest.items() if digest not in self._encodings]
        free = self.budget - self.used
        evictable = [encoding for digest, encoding in self._idle.items() if digest not in by_digest]
        if _nbytes(new) > free + _nbytes(evictable):
            return None
        for encoding in evictable:
            if _nbytes(new) <= free:
                break
            free += encoding.nbytes
            self._drop(encoding)
            self.forgotten.append(encoding.number)
        for wanted in new:
            self._encodings[wanted.digest] = Encoding(next(self._numbers), wanted.digest, wanted.nbytes, wanted.medium)
        pinned = [self._encodings[wanted.digest] for wanted in media]
        for encoding in pinned:
            encoding.users += 1
            self._idle.pop(encoding.digest, None)
        return pinned

    def release(self, encoding: Encoding) -> None:
        """End one use of an encoding. It stays, unless it has never been computed."""
        encoding.users -= 1
        if encoding.users:
            return
        if encoding.ready:
            self._idle[encoding.digest] = encoding
        else:
            self._drop(encoding)

    def _drop(self, encoding: Encoding) -> None:
        del self._encodings[encoding.digest]
        self._idle.pop(encoding.digest, None)


def _nbytes(parts: Iterable[Wanted | Encoding]) -> int:
    return sum(part.nbytes for part in parts)
