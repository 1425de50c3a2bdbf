"""The encodings of media that the ranks hold, as rank 0 counts them.

An encoding has a number, which Encode messages and placeholder ranges name. Encodings are kept by the digest of their
medium, so that requests with the same picture share one. A sequence pins those of its media until steps have read them.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count

from tilerank.kernels.kv_pages import PAGE_TOKENS

from ..protocol.errors import RequestError
from ..protocol.prompt import Medium, PlaceholderRange, Prompt
from ..protocol.rank_messages import Chunk, Encode, EncodePiece, Frames, Step, StopEncode
from ..rank.worker import Worker
from .cache_kind import CacheKind, WorkInPieces
from .lru_pool import LruPool, PoolEntry, total_size
from .sequence import Scheduled, Sequence

PART_BYTES = 1 << 20
"""Bytes of frames in a message. Copying them to all ranks takes a few milliseconds."""


@dataclass(eq=False)
class Encoding(PoolEntry):
    """An encoding. size: its bytes on each rank. medium: None once it is computed."""

    medium: Medium | None = None
    number: int = -1

    def complete(self) -> None:
        """Note that the ranks hold it."""
        self.ready, self.medium = True, None


class EncoderCache(CacheKind[Sequence]):
    """The encodings, of at most `budget` bytes on each rank."""

    def __init__(self, budget: int) -> None:
        self.evicted: list[int] = []
        """The numbers of encodings that the ranks have to drop."""
        self.pool = LruPool[Encoding](budget, on_evict=lambda encoding: self.evicted.append(encoding.number))
        self._pinned: dict[Sequence, dict[int, Encoding]] = {}  # by sequence and medium
        self._numbers = count()

    def of(self, sequence: Sequence) -> dict[int, Encoding]:
        """Return the encodings that a running sequence still needs, by medium."""
        return self._pinned.get(sequence, {})

    def check_fits(self, sequence: Sequence) -> None:
        wanted = _wanted(sequence, range(len(sequence.encoding_bytes)))
        nbytes = total_size({encoding.key: encoding for encoding in wanted}.values())
        if nbytes > self.pool.capacity:
            raise RequestError(
                f"the encodings of its pictures and videos take {nbytes} bytes, but the encoder cache has "
                f"{self.pool.capacity}"
            )

    def reserve(self, sequence: Sequence) -> bool:
        media = _media_left(sequence)
        if sequence.stores_source:
            media = list(range(len(sequence.encoding_bytes)))
        pinned = self.pool.pin(_wanted(sequence, media))
        if pinned is None:
            return False
        for encoding in pinned:
            if encoding.number < 0:
                encoding.number = next(self._numbers)
        if pinned:
            self._pinned[sequence] = dict(zip(media, pinned, strict=True))
        return True

    def release(self, sequence: Sequence, *, share: bool = True) -> None:
        for encoding in self._pinned.pop(sequence, {}).values():
            self.pool.unpin(encoding)

    def limit(self, sequence: Sequence, tokens: int) -> int:
        """A medium that is not encoded yet ends the chunk at the last whole page before it: the tokens after that share
        no page with another sequence, and the step that computes them later reads the weights anyway. A medium whose
        tokens attend to all of it is not cut."""
        encodings = self.of(sequence)
        for run in sequence.prompt.placeholder_ranges if encodings else ():
            if run.medium in encodings and run.start + run.count > sequence.cached and not encodings[run.medium].ready:
                tokens = max(min(tokens, run.start // PAGE_TOKENS * PAGE_TOKENS - sequence.cached), 0)
                break
        return sequence.whole_rows(tokens)

    def continuable(self, sequence: Sequence, tokens: int) -> int:
        return sequence.whole_rows(tokens)

    def work(self, sequence: Sequence) -> WorkInPieces | None:
        encoding = next((encoding for encoding in self.of(sequence).values() if not encoding.ready), None)
        return None if encoding is None else EncodeWork(encoding, self.evicted)

    def announce(self, step: Step, scheduled: Scheduled) -> None:
        step.forgotten.extend(self.evicted)
        self.evicted.clear()
        for sequence, chunk in scheduled:
            if encodings := self.of(sequence):
                chunk.placeholder_ranges.extend(_placeholder_ranges(sequence.prompt, encodings, chunk))

    def publish(self, sequence: Sequence) -> None:
        if encodings := self.of(sequence):
            left = _media_left(sequence)
            for medium in encodings.keys() - left:
                self.pool.unpin(encodings.pop(medium))


class EncodeWork(WorkInPieces):
    """The encode of a medium on all ranks. evicted: the encodings to drop before it."""

    def __init__(self, encoding: Encoding, evicted: list[int]) -> None:
        self.entry: Encoding = encoding
        self._evicted = evicted

    def pieces(self, worker: Worker, operations: float) -> Iterator[bool]:
        medium = self.entry.medium
        assert medium is not None
        frames = memoryview(medium.frames)
        first = Medium(medium.kind, bytes(frames[:PART_BYTES]), medium.size, medium.grid)
        _prepare(worker, Encode(self.entry.number, first, operations, list(self._evicted)))
        self._evicted.clear()
        yield False
        for start in range(PART_BYTES, len(frames), PART_BYTES):
            _prepare(worker, Frames(bytes(frames[start : start + PART_BYTES])))
            yield False
        while not self.entry.ready:
            worker.announce(EncodePiece())
            if worker.encode_piece():
                self.entry.complete()
            yield True

    def stop(self, worker: Worker) -> None:
        _prepare(worker, StopEncode())


def _wanted(sequence: Sequence, media: Iterable[int]) -> list[Encoding]:
    """Return the encodings of some media of a sequence, as if none of them were there."""
    prompt = sequence.prompt
    return [Encoding(prompt.digests[i], sequence.encoding_bytes[i], medium=prompt.media[i]) for i in media]


def _media_left(sequence: Sequence) -> list[int]:
    """Return the media that stand for tokens which are not computed yet, in the order of the prompt."""
    first, stop = sequence.cached, sequence.length
    runs = sequence.prompt.placeholder_ranges
    return list(dict.fromkeys(run.medium for run in runs if max(run.start, first) < min(run.start + run.count, stop)))


def _placeholder_ranges(prompt: Prompt, encodings: dict[int, Encoding], chunk: Chunk) -> Iterator[PlaceholderRange]:
    """Yield the placeholder ranges of a chunk of a prompt."""
    for run in prompt.placeholder_ranges:
        begin = max(run.start, chunk.start)
        end = min(run.start + run.count, chunk.start + len(chunk.token_ids))
        if begin < end:
            number = encodings[run.medium].number
            yield PlaceholderRange(begin - chunk.start, end - begin, number, run.first + begin - run.start)


def _prepare(worker: Worker, message: Encode | Frames | StopEncode) -> None:
    worker.announce(message)
    worker.prepare_encode(message)
