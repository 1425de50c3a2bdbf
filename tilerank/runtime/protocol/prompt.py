"""A prompt: token ids, the media that some of them stand for, and the keys by which prompts are compared.

Imports no torch, because the HTTP process builds prompts.
"""

import hashlib
from functools import cached_property
from itertools import pairwise

import msgspec

MM_CACHE_BYTES = 2 << 30
"""Bytes of encoded media that a rank keeps by default."""


class Medium(msgspec.Struct, frozen=True, array_like=True):
    """A decoded picture, the sampled frames of a video, or sound.

    kind: "image", "video" or "audio". frames: uint8 [n, height, width, 3], RGB, row by row; a picture has n = 1. size:
    (n, height, width). grid: (t, h, w), the patches into which the encoder cuts the frames after it has resized them.
    Sound has samples float32 [n] as frames, the size (n, 1, 1), and the grid (f, 1, 1) for a spectrogram of f frames.
    """

    kind: str
    frames: bytes
    size: tuple[int, int, int]
    grid: tuple[int, int, int]

    @property
    def bytes_of_pixel(self) -> int:
        """Bytes of a pixel, or of a sample."""
        return 4 if self.kind == "audio" else 3

    def digest(self) -> bytes:
        """Return 16 bytes that identify what the encoder computes of this medium."""
        head = repr((self.kind, self.size, self.grid)).encode()
        return hashlib.blake2b(head + b"\0" + self.frames, digest_size=16).digest()


class PlaceholderRange(msgspec.Struct, frozen=True, array_like=True):
    """Tokens `start` to `start + count` of a prompt, or rows of a chunk, which stand for tokens `first` to `first +
    count` of an encoding. medium: its number in the prompt, or in messages to the ranks that of the encoding."""

    start: int
    count: int
    medium: int
    first: int


class Segment(msgspec.Struct, frozen=True, array_like=True):
    """Tokens `first` to `first + count` of an encoding. medium: as in PlaceholderRange."""

    medium: int
    first: int
    count: int


def cut_segments(segments: list[Segment], start: int, stop: int) -> list[Segment]:
    """Return tokens `start` to `stop` of those that segments have one after the other."""
    parts, end = [], 0
    for segment in segments:
        begin, end = end, end + segment.count
        if (taken := min(end, stop) - max(begin, start)) > 0:
            parts.append(Segment(segment.medium, segment.first + max(start - begin, 0), taken))
    return parts


class VisibleRange(msgspec.Struct, frozen=True, array_like=True):
    """Tokens from `start` of a prompt on attend to tokens `first` to `first + count` of its source.

    shown: False if they skip the MLPs of the layers of cross-attention.
    """

    start: int
    first: int
    count: int
    shown: bool


class Prompt(msgspec.Struct, dict=True, array_like=True):
    """The prompt of a request.

    media: in the order of the text. placeholder_ranges: ascending; a video has one for each pair of frames.
    positions: three axes (time, height, width) of as many numbers as there are tokens; empty where token i has position
    i on every axis. source: what tokens see by cross-attention, in this order, instead of media that stand for tokens.
    visible_ranges: ascending; tokens before the first see nothing, and generated tokens see what the last token of the
    prompt sees. source_positions: three axes of as many numbers as the source has tokens; empty for models that do not
    rotate them. salt: prompts share cached pages with those of the same salt alone.
    """

    token_ids: list[int]
    media: list[Medium] = []
    placeholder_ranges: list[PlaceholderRange] = []
    positions: list[list[int]] = []
    source: list[Segment] = []
    visible_ranges: list[VisibleRange] = []
    source_positions: list[list[int]] = []
    salt: str = ""

    @cached_property
    def digests(self) -> list[bytes]:
        """The digest of each medium."""
        return [medium.digest() for medium in self.media]

    @cached_property
    def keys(self) -> list[int]:
        """The token ids, where a placeholder is replaced by a negative number that identifies a part of a medium. The
        first one holds the salt as well.

        Prompts that begin with the same keys have the same keys and values in the cache. In a prompt with a source, a
        number identifies as well what this token and those before it see.
        """
        keys = list(self.token_ids)
        for (start, seen), (stop, _) in pairwise([*self._seen, (len(keys), 0)]):
            keys[start:stop] = [-1 - (seen ^ id) for id in keys[start:stop]]
        for run in self.placeholder_ranges:
            content = int.from_bytes(self.digests[run.medium], "big")
            for i in range(run.count):
                keys[run.start + i] = -1 - (content ^ (run.first + i))
        if self.salt:
            salt = hashlib.blake2b(self.salt.encode(), digest_size=16).digest()
            keys[0] ^= int.from_bytes(salt, "big") << 128  # above the bits of ids and digests
        return keys

    def key_of_generated(self, token_id: int) -> int:
        """Return the key of a generated token."""
        return -1 - (self._seen[-1][1] ^ token_id) if self._seen else token_id

    @cached_property
    def _seen(self) -> list[tuple[int, int]]:
        """The first token of each visible range, and 128 bits that identify all ranges up to it, with their content."""
        seen, digest, known = [], hashlib.blake2b(digest_size=16), 0
        for visible in self.visible_ranges:
            if (end := visible.first + visible.count) > known:
                positions = [axis[known:end] for axis in self.source_positions]
                parts = cut_segments(self.source, known, end)
                content = [(self.digests[part.medium], part.first, part.count) for part in parts]
                digest.update(repr((content, positions)).encode())
                known = end
            digest.update(repr((visible.first, visible.count, visible.shown)).encode())
            seen.append((visible.start, int.from_bytes(digest.digest(), "big")))
        return seen

    @cached_property
    def source_digest(self) -> bytes:
        """Return 16 bytes that identify the source and what the tokens see of it."""
        parts = repr((self.digests, self.source, self.visible_ranges, self.source_positions)).encode()
        return hashlib.blake2b(parts, digest_size=16).digest()

    @cached_property
    def shift(self) -> int:
        """The difference between the position of a generated token and its index."""
        return max(map(max, self.positions)) + 1 - len(self.token_ids) if self.positions else 0
