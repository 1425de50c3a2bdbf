"""The encodings of media that the ranks hold, as rank 0 counts them.

An encoding has a number, which Encode messages and inserts name. Encodings are kept by the digest of their medium, so
that requests with the same picture share one. An encoding that no sequence needs stays until its memory is needed;
the least recently used one is evicted first.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count

from ..protocol.errors import RequestError
from ..protocol.prompt import Medium


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
