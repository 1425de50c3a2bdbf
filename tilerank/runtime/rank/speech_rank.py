"""Speech on one rank: prompts of the talker, and frames of codes.

A speaking sequence has pages in the talker's cache, and what the next frame and its sound read: the last hidden state
of the talker, and the codes so far. A frame is one recorded step, with the choice of its codes inside.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tilerank.kernels.kv_pages import PAGE_TOKENS
from tilerank.parallel.group import Group

from ..protocol.rank_messages import Chunk, Step
from ..protocol.speech_messages import Frame, SpeechStep, TalkerChunk
from ..step.batch import Batch, BatchContent, BatchFiller, BatchLimits, LogitRows, RankSequence, padded_size
from ..step.cache import allocate, bytes_per_token, num_pages
from ..step.speaker import Additions, CodeSampling, FrameInputs, Passes, Speaker, TalkerRows
from ..step.step_graphs import StepGraphs
from .sound_rank import SoundRank

TALKER_TOKENS = 32768
"""Tokens of the talker's cache by default."""

TOP_K, TOP_P = 50, 0.8
"""The sampling of the code predictor, at temperature 1 (transformers: the `generate` of Qwen3-Omni)."""


@dataclass(frozen=True)
class SpeechOutputs:
    """The results of a speech step.

    logits: fp32 [m, codes of the talker], of the last chunks and then of the frames. codes: [frames, codes of a frame]
    int64. samples: float32 [n] each, of the sounds; on rank 0.
    """

    logits: Tensor
    codes: Tensor
    samples: list[Tensor]


@dataclass
class RankSpeech(RankSequence):
    """The speech of a sequence, as a rank keeps it between steps.

    last: [hidden], the last hidden state of the talker. codes: those of each frame. kept: indices in the text sequence,
    ascending, and their rows [n, hidden], the projected hidden states of tokens of media.
    """

    last: Tensor | None = None
    codes: list[list[int]] = field(default_factory=list)
    kept: tuple[Tensor, Tensor] | None = None


class SpeechRank:
    """The speech of all sequences on a rank.

    tokens: of the talker's cache. max_frames: frames in a step. graphs: records steps; None to compute them while the
    model's Python runs.
    """

    def __init__(
        self,
        speaker: Speaker,
        dtype: torch.dtype,
        group: Group,
        *,
        tokens: int,
        max_frames: int,
        graphs: StepGraphs | None,
    ) -> None:
        self.speaker = speaker
        self._sounds = SoundRank(speaker.vocoder, group)
        self._graphs = graphs
        self._held: dict[int, RankSpeech] = {}
        self.pages = num_pages(tokens)
        """Pages of the talker's cache that sequences may have."""
        self.longest = min(self.pages * PAGE_TOKENS, speaker.context_length)
        """Rows of the longest sequence of the talker."""
        self.codes = speaker.codes
        """Codes of a frame."""
        self._bytes = speech_bytes(speaker, tokens=tokens, sequences=max_frames, ranks=group.size)
        rows = padded_size(max_frames)
        self._caches = allocate(speaker.cache_specs(), (self.pages + 1) * PAGE_TOKENS)
        self._frame_caches = allocate(speaker.frame_cache_specs(), rows * PAGE_TOKENS)
        self._filler = BatchFiller(
            BatchContent(position_axes=3, copy_padding=True),
            BatchLimits(max_frames, num_pages(min(tokens, speaker.context_length)), self.pages),
        )
        self._first = torch.zeros(rows, dtype=torch.int64)
        self._past = torch.zeros(rows, speaker.hidden, dtype=dtype)
        self._draws = torch.zeros(speaker.codes - 1, rows)
        self._temperature = torch.zeros(rows)
        self._top_k = torch.full((rows,), TOP_K, dtype=torch.int32)
        self._top_p = torch.full((rows,), TOP_P)
        self._min_p = torch.zeros(rows)
        self._inputs: dict[int, FrameInputs] = {}  # by padded size
        # What the recorded step of a padded size writes: the codes after the first, and the talker's rows.
        self._spoken: dict[int, tuple[Sequence[Tensor], TalkerRows]] = {}

    @property
    def cache_bytes(self) -> int:
        """Bytes of this rank's caches with every page in use, and of all sounds."""
        return self._bytes

    def keep(self, step: Step, hidden: Tensor) -> None:
        """Keep hidden states [m, hidden of the text model] of tokens of media, those of `step.kept` in order. A
        collective."""
        rows = self._run_once(lambda: self.speaker.project(hidden)).clone()
        for chunk in step.chunks:
            if chunk.sequence not in step.kept or not chunk.placeholder_ranges:
                continue
            found = [range(chunk.start + i.start, chunk.start + i.start + i.count) for i in chunk.placeholder_ranges]
            indices = torch.cat([torch.tensor(part) for part in found])
            mine, rows = rows[: len(indices)], rows[len(indices) :]
            held = self._held.setdefault(chunk.sequence, RankSpeech())
            if held.kept is not None:
                # A sequence that was preempted computes its tokens again.
                before = int(torch.searchsorted(held.kept[0], chunk.start))
                indices = torch.cat([held.kept[0][:before], indices])
                mine = torch.cat([held.kept[1][:before], mine])
            held.kept = indices, mine

    def run(self, step: SpeechStep) -> SpeechOutputs:
        """Compute a step. All ranks call this with the same step. Raises EngineError if sounds have gaps."""
        for number, new in step.moved:
            self._held[new] = RankSpeech(kept=self._held.pop(number).kept)
            self._sounds.forget(number)
        for number in step.finished:
            self._held.pop(number, None)
            self._sounds.forget(number)
        for chunk in step.chunks:
            self._held.setdefault(chunk.sequence, RankSpeech()).pages.extend(chunk.new_pages)
        for frame in step.frames:
            self._held[frame.sequence].pages.extend(frame.new_pages)
        logits, codes = [], torch.zeros(0, self.speaker.codes, dtype=torch.int64)
        if step.chunks:
            logits.append(self._read(step.chunks))
        if step.frames:
            rows, codes = self._speak(step.frames)
            logits.append(rows)
        samples = self._sounds.run(step.sounds, {s.sequence: self._held[s.sequence].codes for s in step.sounds})
        return SpeechOutputs(torch.cat(logits) if logits else torch.zeros(0, 1), codes, samples)

    def _read(self, chunks: Sequence[TalkerChunk]) -> Tensor:
        """Compute chunks of prompts. Returns logits [m, codes of the talker] of those that are the last of a prompt."""
        batch = self._filler.fresh(Step([_chunk(chunk) for chunk in chunks], []), self._held, {})
        additions = self._additions(chunks)
        made: list[TalkerRows] = []

        def forward() -> Tensor:
            made.append(self.speaker.read(batch, additions, self._caches))
            return made[0].logits

        logits = self._run_once(forward).clone()
        last = [chunk for chunk in chunks if chunk.last]
        for row, chunk in zip(made[0].hidden.clone(), last, strict=True):
            self._held[chunk.sequence].last = row
        return logits

    def _additions(self, chunks: Sequence[TalkerChunk]) -> Additions:
        media_rows: list[int] = []
        media: list[Tensor] = []
        code_rows: list[int] = []
        codes: list[int] = []
        start = 0
        for chunk in chunks:
            rows = [row for row, index in enumerate(chunk.indices) if index >= 0]
            if rows:
                kept = self._held[chunk.sequence].kept
                assert kept is not None
                places = torch.searchsorted(kept[0], torch.tensor([chunk.indices[row] for row in rows]))
                media.append(kept[1][places])
                media_rows += [start + row for row in rows]
            added = [row for row, code in enumerate(chunk.codes) if code >= 0]
            code_rows += [start + row for row in added]
            codes += [chunk.codes[row] for row in added]
            start += len(chunk.tokens)
        return Additions(
            (torch.tensor(media_rows), torch.cat(media)) if media else None,
            (torch.tensor(code_rows), torch.tensor(codes)) if codes else None,
        )

    def _speak(self, frames: Sequence[Frame]) -> tuple[Tensor, Tensor]:
        """Compute frames. Returns logits [frames, codes of the talker] and codes [frames, codes of a frame]."""
        held = [self._held[frame.sequence] for frame in frames]
        chunks = [
            Chunk(frame.sequence, frame.start, [frame.token], [], 1, shift=frame.position - frame.start)
            for frame in frames
        ]
        batch = self._filler.padded(Step(chunks, []), self._held)
        size, count = len(batch.token_ids), len(frames)
        # Padding rows repeat the row that `padded` repeats, so that they choose no other experts.
        shortest = min(range(count), key=lambda row: frames[row].start)
        for row in range(size):
            frame, mine = (frames[row], held[row]) if row < count else (frames[shortest], held[shortest])
            assert mine.last is not None
            self._first[row] = frame.code
            self._past[row] = mine.last
            self._temperature[row] = 1.0 if frame.draws else 0.0
            if frame.draws:
                self._draws[:, row] = torch.tensor(frame.draws)
        inputs = self._frame_inputs(size)

        def forward() -> Tensor:
            others, total = self.speaker.choose(inputs, self._frame_caches)
            rows = self.speaker.speak(batch, total, self._caches)
            self._spoken[size] = others, rows
            return rows.logits

        logits = (self._graphs.replay(forward, size, count) if self._graphs else forward())[:count].clone()
        others, rows = self._spoken[size]
        codes = torch.stack([self._first[:count], *(code[:count] for code in others)], 1)
        for mine, row, numbers in zip(held, rows.hidden[:count].clone(), codes.tolist(), strict=True):
            mine.last = row
            mine.codes.append(numbers)
        return logits, codes

    def _frame_inputs(self, size: int) -> FrameInputs:
        if size not in self._inputs:
            choice = CodeSampling(
                self._draws[:, :size],
                self._temperature[:size],
                self._top_k[:size],
                self._top_p[:size],
                self._min_p[:size],
            )
            passes = _passes(size, self.speaker.codes)
            self._inputs[size] = FrameInputs(self._past[:size], self._first[:size], choice, passes)
        return self._inputs[size]

    def _run_once(self, forward: Callable[[], Tensor]) -> Tensor:
        return self._graphs.run_once(forward) if self._graphs else forward()


def speech_bytes(speaker: Speaker, *, tokens: int, sequences: int, ranks: int) -> int:
    """Return the bytes that a rank needs for the speech of so many sequences beside the weights: a cache of `tokens`
    tokens of the talker in whole pages, a page of the code predictor's for each, and what its sounds keep between their
    parts."""
    talker = bytes_per_token(speaker.cache_specs()) * num_pages(tokens)
    frames = bytes_per_token(speaker.frame_cache_specs()) * padded_size(sequences)
    sounds = -(-sequences // ranks) * speaker.vocoder.state_bytes
    return (talker + frames) * PAGE_TOKENS + sounds


def _chunk(chunk: TalkerChunk) -> Chunk:
    return Chunk(chunk.sequence, chunk.start, chunk.tokens, [], int(chunk.last), chunk.positions)


def _passes(m: int, groups: int) -> Passes:
    """Return the passes for m frames of `groups` codes: frame i has page i of the caches."""
    frames = torch.arange(m)
    starts = torch.arange(m + 1, dtype=torch.int32)

    def batch(tokens: range) -> Batch:
        count, positions = len(tokens), torch.tensor(tokens).repeat(m)
        return Batch(
            token_ids=torch.zeros(m * count, dtype=torch.int64),
            positions=positions[None],
            slots=PAGE_TOKENS * frames.repeat_interleave(count) + positions,
            page_tables=frames.int()[:, None],
            seq_lens=torch.full((m,), tokens.stop, dtype=torch.int32),
            query_starts=count * starts,
            logit_rows=LogitRows(2 * frames + 1, starts) if count == 2 else None,
        )

    spans = [range(2), *(range(i, i + 1) for i in range(2, groups))]
    return Passes(tuple(map(batch, spans)), 2 * frames, 2 * frames + 1, frames)
