"""The scheduler of speeches: which speak in a step, which rows of prompts are read, and the first code of every frame.

A speech reads its prompt in chunks, and then a frame in every step. A frame reads the next token of the text and waits
while this has not been generated; after the text it reads its end, and then padding.

A speech that is preempted is computed again later, with the same codes, and sound that has been sent is dropped.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from itertools import count

import numpy as np
import torch
from torch import Tensor

from ..protocol.engine_state import EngineState
from ..protocol.errors import RequestError
from ..protocol.events import FailedEvent, SoundEvent
from ..protocol.params import SamplingParams, SpeechParams
from ..protocol.prompt import Prompt
from ..protocol.sizes import MAX_RUNNING
from ..protocol.speech_messages import Frame, SoundPart, SpeechStep, TalkerChunk
from ..protocol.speech_settings import SpeechSettings
from ..rank.speech_rank import SpeechOutputs
from ..rank.worker import Worker
from .base_scheduler import BaseScheduler
from .logits_rules import Bits, LogitsRules, TextRules, as_bits
from .pages import PagePool
from .sampling import Row, choose, uniform
from .sequence import Scheduled, Sequence
from .speech import Speech
from .talker_prompt import TalkerPrompt, talker_prompt

CHUNK_ROWS = 512
"""Rows of prompts in a step. It bounds how long the frames of others wait."""
MAX_FRAMES = 4095
"""Most frames of a speech (transformers: `talker_max_new_tokens` 4096, and no frame for the last code)."""
FIRST_PART, LARGEST_PART = 4, 25
"""Frames of a part of sound: 0.32 s first, later as much as there is already, up to 2 s."""
SAMPLED = SamplingParams(temperature=0.9, top_k=50, repetition_penalty=1.05)
"""The sampling of first codes (transformers: the `generate` of Qwen3-Omni)."""
_DRAWS = 1 << 32
"""From this position on, the numbers of a seed choose the other codes of frames."""


class SpeechScheduler(BaseScheduler[Speech]):
    """The speeches of all requests of an engine. Their numbers are those of text sequences, or negative.

    settings: None for a model that does not speak. frames, samples: computed since the start.
    """

    def __init__(self, worker: Worker, settings: SpeechSettings | None) -> None:
        self.pages = PagePool(worker.speech.pages if worker.speech else 0)
        super().__init__([self.pages], MAX_RUNNING)
        self.frames = self.samples = 0
        self._worker = worker
        self._settings = settings
        self._longest = worker.speech.longest if worker.speech else 0
        self._others = worker.speech.codes - 1 if worker.speech else 0
        self.speeches: dict[int, Speech] = {}  # by request, in order of arrival
        self._finished: list[int] = []
        self._moved: list[tuple[int, int]] = []
        self._numbers = count(-1, -1)
        self._allowed: Bits | None = None  # as in sampling.py: Row
        if settings is not None:
            allowed = np.arange(settings.vocab) < settings.codes
            allowed[settings.end] = True
            self._allowed = as_bits(allowed)

    def prompt(self, prompt: Prompt, params: SamplingParams, speech: SpeechParams) -> TalkerPrompt:
        """Return what the talker reads of a request. Raises RequestError if it can never speak."""
        if self._settings is None:
            raise RequestError("speech: expected a model that speaks, found one without a talker")
        if params.grammar is not None or not params.max_new_tokens:
            found = "a grammar" if params.grammar is not None else "max_new_tokens 0"
            raise RequestError(f"speech: expected a text without a grammar, of at least one new token, found {found}")
        voice = self._settings.voices.get(speech.voice)
        if voice is None:
            voices = ", ".join(self._settings.voices)
            raise RequestError(f"voice: expected one of {voices}, found {speech.voice!r}")
        talker = talker_prompt(prompt, self._settings, voice)
        if talker.rows >= self._longest:
            raise RequestError(
                f"speech: {talker.rows} tokens of the user's turns and one frame need to fit in the talker's "
                f"{self._longest} tokens"
            )
        return talker

    def add_text(self, text: Sequence) -> None:
        """Let a request speak. `text.talker` is what `prompt` returned."""
        assert text.talker is not None and self._settings is not None
        params = replace(SAMPLED, seed=_seed(text.params.seed))
        if text.params.temperature == 0:
            params = replace(params, temperature=0.0)
        most = min(MAX_FRAMES, self._longest - text.talker.rows)
        rules = TextRules(LogitsRules(params, frozenset(), self._settings.vocab), ())
        speech = Speech(text, text.talker, self._settings, params, rules, most)
        self.speeches[text.request] = speech
        self.add(speech)

    def __contains__(self, request: int) -> bool:
        return request in self.speeches

    @property
    def busy(self) -> bool:
        return bool(self.speeches)

    def report(self, state: EngineState) -> None:
        """Set the fields of `state` that are about speech."""
        state.speaking, state.speech_frames, state.speech_samples = len(self.speeches), self.frames, self.samples
        state.talker_pages, state.talker_pages_used = self.pages.total, self.pages.total - self.pages.free

    def kept(self, scheduled: Scheduled) -> list[int]:
        """Return Step.kept. The numbers of texts whose prompts are computed name their speeches."""
        kept = []
        for text, chunk in scheduled:
            speech = self.speeches.get(text.request)
            if speech is None or len(text.tokens) > text.prompt_len:
                continue
            if speech.number is not None and speech.number != text.number:
                self._finished.append(speech.number)
            speech.number = text.number
            if chunk.placeholder_ranges:
                kept.append(text.number)
        return kept

    def end_text(self, request: int) -> None:
        """No token follows in the text of a request."""
        self.speeches[request].text_ended = True

    def cancel(self, request: int) -> None:
        """End the speech of a request, if it has one, and release what it holds."""
        if request in self.speeches:
            self._end(self.speeches[request])
            self._send_last()

    def step(self) -> list[SoundEvent | FailedEvent]:
        """Compute the next frames of all that speak, chunks of prompts, and parts of sound. Returns new sound."""
        speaking, frames = self._next_frames()
        reading, chunks = self._next_chunks()
        sounds = self._next_sounds()
        events: list[SoundEvent | FailedEvent] = []
        if frames or chunks or sounds:
            spoken = self._run(chunks, frames, [sound for _, sound in sounds])
            chosen_for = [speech for speech, chunk in zip(reading, chunks, strict=True) if chunk.last] + speaking
            events += self._take_codes(chosen_for, spoken.logits)
            for (speech, sound), samples in zip(sounds, spoken.samples, strict=True):
                if speech.request in self.speeches:
                    events += self._take_sound(speech, sound, samples)
        for speech in [speech for speech in self.speeches.values() if speech.text_ended and speech.complete]:
            self._end(speech)
            events.append(SoundEvent(speech.request, b"", last=True))
        self._send_last()
        return events

    def preempt(self) -> Speech:
        """Take the pages of the youngest speech that runs. It is computed again under a new number."""
        youngest, number = super().preempt(), next(self._numbers)
        self._moved.append((youngest.number_on_ranks, number))
        youngest.restart(number)
        return youngest

    def _next_frames(self) -> tuple[list[Speech], list[Frame]]:
        """Return the frames that can be computed, with their speeches."""
        speaking, frames = [], []
        for speech in list(self.running):
            token = speech.next_text
            if speech.cached < speech.prompt.rows or token is None or not self.grow(speech):
                continue
            first, draws = speech.codes[speech.frames], list[float]()
            if speech.params.temperature:
                at = _DRAWS + speech.frames * self._others
                draws = [uniform(speech.params.seed, at + i) for i in range(self._others)]
            start, pages = speech.cached, self.pages.new_pages(speech)
            position = start + speech.prompt.shift
            frames.append(Frame(speech.number_on_ranks, first, draws, token, start, position, pages))
            speaking.append(speech)
            speech.cached, speech.frames = start + 1, speech.frames + 1
        self.frames += len(frames)
        return speaking, frames

    def _next_chunks(self) -> tuple[list[Speech], list[TalkerChunk]]:
        """Return the next rows of prompts, and the speeches that they belong to. Admits those that wait."""
        rows, reading, chunks = CHUNK_ROWS, list[Speech](), list[TalkerChunk]()
        for speech in self._admitted():
            count = min(speech.prompt.rows - speech.cached, rows)
            if count > 0:
                chunks.append(_next_chunk(speech, count, self.pages.new_pages(speech)))
                reading.append(speech)
                rows -= count
            if not rows:
                break
        return reading, chunks

    def _admitted(self) -> Iterator[Speech]:
        """Yield the speeches that run, in order of arrival, and then those that can be admitted."""
        yield from list(self.running)
        for speech in [speech for speech in self.waiting if speech.can_begin]:
            if self.is_full or not self.admit(speech):
                return
            self.waiting.remove(speech)
            yield speech

    def _next_sounds(self) -> list[tuple[Speech, SoundPart]]:
        """Return the next parts of sound, of frames that are computed once this step's are."""
        sounds = []
        for speech in self.speeches.values():
            first, ready = speech.decoded, speech.frames - speech.decoded
            part = min(max(first, FIRST_PART), LARGEST_PART)
            if ready >= part or (ready > 0 and speech.frames == speech.total):
                sounds.append((speech, SoundPart(speech.number_on_ranks, first, first + min(ready, part))))
        return sounds

    def _run(self, chunks: list[TalkerChunk], frames: list[Frame], sounds: list[SoundPart]) -> SpeechOutputs:
        step = SpeechStep(chunks, frames, sounds, self._finished, self._moved)
        self._finished, self._moved = [], []
        self._worker.announce(step)
        spoken = self._worker.speak(step)
        # A frame with a code for which there were no probabilities has no first code after it.
        spoken.logits[len(spoken.logits) - len(frames) :][(spoken.codes < 0).any(1)] = torch.nan
        return spoken

    def _take_codes(self, speeches: list[Speech], logits: Tensor) -> list[SoundEvent | FailedEvent]:
        """Choose the first code of the next frame of each speech, unless it is known from before."""
        events: list[SoundEvent | FailedEvent] = []
        new = [(row, speech) for row, speech in enumerate(speeches) if len(speech.codes) == speech.frames]
        if len(new) < len(speeches):
            logits = logits[[row for row, _ in new]]
        rows = [Row(speech.params, speech.codes, speech.rules, self._allowed) for _, speech in new]
        for (_, speech), choice in zip(new, choose(logits, rows) if rows else (), strict=True):
            if choice is None:
                self._end(speech)
                events.append(_failed(speech))
                continue
            speech.codes.append(choice.token_id)
            if choice.token_id == speech.settings.end or len(speech.codes) > speech.most_frames:
                speech.total = len(speech.codes) - 1
                self.release(speech)
        return events

    def _take_sound(self, speech: Speech, sound: SoundPart, samples: Tensor) -> list[SoundEvent | FailedEvent]:
        """Return the samples that the client does not have yet."""
        if not samples.isfinite().all():
            self._end(speech)
            return [_failed(speech)]
        new = samples[max(speech.sent - speech.samples, 0) :]
        speech.decoded, speech.samples = sound.end, speech.samples + len(samples)
        speech.sent += len(new)
        self.samples += len(new)
        return [SoundEvent(speech.request, _pcm(new), last=False)] if len(new) else []

    def _end(self, speech: Speech) -> None:
        del self.speeches[speech.request]
        if speech.total is None:
            self.remove(speech)
        if speech.number is not None:
            self._finished.append(speech.number)

    def _send_last(self) -> None:
        """Let the ranks drop what no speech needs, if no step will follow soon."""
        if self._finished and not self.speeches:
            self._run([], [], [])


def _next_chunk(speech: Speech, count: int, new_pages: list[int]) -> TalkerChunk:
    """Return the next `count` rows of the prompt of a speech, and count them as read."""
    prompt, start = speech.prompt, speech.cached
    speech.cached = end = start + count
    tokens, last = prompt.tokens[start:end], end == prompt.rows
    if last:
        token = speech.text_token(0)
        assert token is not None
        tokens.append(token)
    return TalkerChunk(
        speech.number_on_ranks,
        start,
        tokens,
        prompt.indices[start:end],
        prompt.codes[start:end],
        [axis[start:end] for axis in prompt.positions],
        new_pages,
        last,
    )


def _failed(speech: Speech) -> FailedEvent:
    return FailedEvent(
        speech.request,
        f"the talker computes NaN or infinity after {speech.frames} frames of this speech: it overflows in this "
        "precision, or its weights are damaged",
    )


def _pcm(samples: Tensor) -> bytes:
    """Return samples from -1 to 1 as 16 bits each, little-endian."""
    return (samples.clamp(-1, 1) * 32767).round().to(torch.int16).numpy().astype("<i2").tobytes()


def _seed(seed: int) -> int:
    """Return a seed whose numbers have nothing to do with those that sample the text."""
    digest = hashlib.blake2b(seed.to_bytes(8, "little"), digest_size=8, person=b"speech").digest()
    return int.from_bytes(digest, "little")
