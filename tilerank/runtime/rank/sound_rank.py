"""The sound of sequences: each is computed by one rank, and rank 0 gets the samples.

A sound is decoded as transformers does it (`chunked_decode`): every 300 frames the decoder begins anew, 25 frames
earlier, and the samples of these frames are dropped.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from tilerank.parallel.group import Group

from ..protocol.errors import EngineError
from ..protocol.sizes import CHUNK_FRAMES, CONTEXT_FRAMES
from ..protocol.speech_messages import SoundPart
from ..step.speaker import SoundState, Vocoder

PIECE = 32
"""Frames that are decoded at a time, which bounds the memory of activations."""


@dataclass
class RankSound:
    """A sound of which `frames` frames have been decoded. state: of the chunk that the last one belongs to; on other
    ranks than the one that computes it, nothing."""

    frames: int = 0
    state: SoundState | None = None


class SoundRank:
    """Decodes the sounds of its sequences, those whose number has the remainder of this rank's."""

    def __init__(self, vocoder: Vocoder, group: Group) -> None:
        self._vocoder = vocoder
        self._group = group
        self._held: dict[int, RankSound] = {}

    def forget(self, sequence: int) -> None:
        self._held.pop(sequence, None)

    def run(self, sounds: Sequence[SoundPart], codes: Mapping[int, Sequence[Sequence[int]]]) -> list[Tensor]:
        """Return the samples of sounds, float32 [n] each, on rank 0; on other ranks nothing.

        codes: those of all frames of each sequence so far. Sounds of a sequence come in order and without gaps. A
        collective. Raises EngineError for a sound that does not begin where the one before it ended.
        """
        group, lengths = self._group, []
        mine: list[Tensor] = []
        for sound in sounds:
            held = self._held.setdefault(sound.sequence, RankSound())
            known = len(codes[sound.sequence])
            if sound.first != held.frames or not sound.first < sound.end <= known:
                raise EngineError(
                    f"sound of sequence {sound.sequence}: expected frames from {held.frames} up to at most {known}, "
                    f"found {sound.first} to {sound.end}"
                )
            lengths.append(self._length(sound))
            if sound.sequence % group.size == group.rank:
                mine += self._decode(held, sound.end, codes[sound.sequence])
            held.frames = sound.end
        if group.size == 1:
            return list(torch.split(torch.cat(mine), lengths)) if mine else []
        return self._gather(sounds, lengths, mine)

    def _gather(self, sounds: Sequence[SoundPart], lengths: Sequence[int], mine: Sequence[Tensor]) -> list[Tensor]:
        size = self._group.size
        totals = [0] * size
        for sound, length in zip(sounds, lengths, strict=True):
            totals[sound.sequence % size] += length
        samples = torch.zeros(max(totals, default=0))
        if not samples.numel():
            return [samples] * len(sounds) if self._group.rank == 0 else []
        if mine:
            torch.cat(list(mine), out=samples[: totals[self._group.rank]])
        rows = self._group.all_gather(samples)
        if self._group.rank:
            return []
        found, places = [], [0] * size
        for sound, length in zip(sounds, lengths, strict=True):
            rank = sound.sequence % size
            found.append(rows[rank, places[rank] : places[rank] + length].clone())
            places[rank] += length
        return found

    def _decode(self, held: RankSound, end: int, codes: Sequence[Sequence[int]]) -> list[Tensor]:
        """Return the samples of the frames up to `end`, in several tensors."""
        parts = []
        for first, last in _pieces(held.frames, end, CHUNK_FRAMES):
            dropped = 0
            if first % CHUNK_FRAMES == 0:
                held.state = self._vocoder.begin()
                context = min(first, CONTEXT_FRAMES)
                # The decoder begins late, and so many samples too many are dropped.
                dropped = context * self._vocoder.frame_samples
                dropped -= self._advance(held.state, codes[first - context : first])
            assert held.state is not None
            for begin, stop in _pieces(first, last, PIECE):
                samples = self._vocoder.decode(torch.tensor(codes[begin:stop]), held.state)
                skipped = min(dropped, len(samples))
                parts.append(samples[skipped:])
                dropped -= skipped
        return parts

    def _advance(self, state: SoundState, codes: Sequence[Sequence[int]]) -> int:
        """Decode the frames before a chunk. Returns the number of their samples."""
        return sum(
            len(self._vocoder.decode(torch.tensor(codes[first:last]), state))
            for first, last in _pieces(0, len(codes), PIECE)
        )

    def _length(self, sound: SoundPart) -> int:
        """Return the number of samples of a sound. The first frame of a chunk has fewer than the others."""
        chunks = -(-sound.end // CHUNK_FRAMES) - -(-sound.first // CHUNK_FRAMES)
        return (sound.end - sound.first) * self._vocoder.frame_samples - chunks * self._vocoder.late_samples


def _pieces(first: int, end: int, unit: int) -> list[tuple[int, int]]:
    """Cut a range at multiples of `unit`."""
    edges = [first, *range((first // unit + 1) * unit, end, unit), end]
    return list(pairwise(edges)) if first < end else []
