"""Rank 0's part of speech: which sequences speak, in which steps, and the first code of every frame.

A speech reads its prompt in chunks, and then a frame in every step. A frame reads the next token of the text and waits
while this has not been generated; after the text it reads its end, and then padding.

First come, first served, as in scheduler.py: a speech is admitted once there are pages of the talker's cache for its
whole prompt and one more for each that runs. If no page is free, the youngest is preempted. It is computed again later,
with the same codes, and sound that has been sent is dropped.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from typing import Any

import torch
from torch import Tensor

from tilerank.kernels.kv_pages import PAGE_TOKENS

from ..protocol.errors import RequestError
from ..protocol.events import Failed, SoundEvent
from ..protocol.params import SamplingParams, SpeechParams
from ..protocol.prompt import Prompt
from ..protocol.sizes import MAX_RUNNING
from ..protocol.speech_messages import Frame, Sound, SpeechStep, TalkerChunk
from ..protocol.speech_settings import SpeechSettings
from ..rank.speech_rank import Spoken
from ..rank.worker import Worker
from ..step.cache import num_pages
from .pages import PagePool
from .sampling import Row, choose, uniform
from .scheduler import Scheduled
from .sequence import Sequence
from .speech import Speech
from .talker_prompt import TalkerPrompt, talker_prompt

CHUNK_ROWS = 512
"""Rows of prompts in a step. It bounds how long the frames of others wait."""
MAX_FRAMES = 4095
"""Of a speech (transformers: `talker_max_new_tokens` 4096, and no frame for the last code)."""
FIRST_PART, LARGEST_PART = 4, 25
"""Frames of a part of sound: 0.32 s first, later as much as there is already, up to 2 s."""
SAMPLED = SamplingParams(temperature=0.9, top_k=50, repetition_penalty=1.05)
"""How first codes are sampled (transformers: the `generate` of Qwen3-Omni)."""
_DRAWS = 1 << 32
"""From this position on, the numbers of a seed choose the other codes of frames."""


class Speaking:
    """The speeches of all requests of an engine. Their numbers are those of text sequences, or negative.

    frames, samples: computed since the start. preemptions: how often a speech lost its pages.
    """

    def __init__(self, worker: Worker, settings: SpeechSettings) -> None:
        assert worker.speech is not None
        self.frames = self.samples = self.preemptions = 0
        self._worker = worker
        self._settings = settings
        self._pool = PagePool(worker.speech.pages)
        self._longest = worker.speech.longest
        self._others = worker.speech.codes - 1
        self._speeches: dict[int, Speech] = {}  # by request, in order of arrival
        self._finished: list[int] = []
        self._moved: list[tuple[int, int]] = []
        self._numbers = count(-1, -1)
        self._forbidden = torch.zeros(settings.vocab, dtype=torch.bool)
        self._forbidden[settings.codes :] = True
        self._forbidden[settings.end] = False

    def prompt(self, prompt: Prompt, params: SamplingParams, speech: SpeechParams) -> TalkerPrompt:
        """Return what the talker reads of a request. Raises RequestError if it can never speak."""
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

    def add(self, text: Sequence) -> None:
        """Let a request speak. `text.talker` is what `prompt` returned."""
        assert text.talker is not None
        params = replace(SAMPLED, seed=_seed(text.params.seed))
        if text.params.temperature == 0:
            params = replace(params, temperature=0.0)
        most = min(MAX_FRAMES, self._longest - text.talker.rows)
        self._speeches[text.request] = Speech(text, text.talker, self._settings, params, most)

    def __contains__(self, request: int) -> bool:
        return request in self._speeches

    @property
    def busy(self) -> bool:
        return bool(self._speeches)

    def state(self) -> dict[str, Any]:
        """Return the fields of server/link/messages.py: State that are about speech."""
        return {
            "speaking": len(self._speeches),
            "speech_frames": self.frames,
            "speech_samples": self.samples,
            "talker_pages": self._pool.total,
            "talker_pages_used": self._pool.total - self._pool.free,
        }

    def kept(self, scheduled: Scheduled) -> list[int]:
        """Return Step.kept. The numbers of texts whose prompts are computed name their speeches."""
        kept = []
        for text, chunk in scheduled:
            speech = self._speeches.get(text.request)
            if speech is None or len(text.tokens) > text.prompt_len:
                continue
            if speech.number is not None and speech.number != text.number:
                self._finished.append(speech.number)
            speech.number = text.number
            if chunk.inserts:
                kept.append(text.number)
        return kept

    def end_text(self, request: int) -> None:
        """No token follows in the text of a request."""
        self._speeches[request].text_ended = True

    def cancel(self, request: int) -> None:
        """End the speech of a request, if it has one, and release what it holds."""
        if (speech := self._speeches.pop(request, None)) is not None:
            self._release(speech)
            self._send_last()

    def step(self) -> list[SoundEvent | Failed]:
        """Compute the next frames of all that speak, chunks of prompts, and parts of sound. Returns new sound."""
        running = [speech for speech in self._speeches.values() if speech.is_running]
        speaking, frames = self._next_frames(running)
        reading, chunks = self._next_chunks()
        sounds = self._next_sounds()
        events: list[SoundEvent | Failed] = []
        if frames or chunks or sounds:
            spoken = self._run(chunks, frames, [sound for _, sound in sounds])
            heard = [speech for speech, chunk in zip(reading, chunks, strict=True) if chunk.last] + speaking
            events += self._take_codes(heard, spoken.logits)
            for (speech, sound), samples in zip(sounds, spoken.samples, strict=True):
                if speech.request in self._speeches:
                    events += self._take_sound(speech, sound, samples)
        for speech in [speech for speech in self._speeches.values() if speech.text_ended and speech.complete]:
            self._end(speech)
            events.append(SoundEvent(speech.request, b"", last=True))
        self._send_last()
        return events

    def _next_frames(self, running: list[Speech]) -> tuple[list[Speech], list[Frame]]:
        """Return the frames that can be computed, with their speeches."""
        speaking, frames = [], []
        for speech in running:
            token = speech.next_text
            if speech.read < speech.prompt.rows or token is None or not self._make_room(speech):
                continue
            start = speech.prompt.rows + speech.frames
            self._pool.extend(speech.table, start + 1)
            first, draws = speech.codes[speech.frames], list[float]()
            if speech.params.temperature:
                at = _DRAWS + speech.frames * self._others
                draws = [uniform(speech.params.seed, at + i) for i in range(self._others)]
            position = start + speech.prompt.shift
            frames.append(Frame(speech.named, first, draws, token, start, position, speech.next_pages()))
            speaking.append(speech)
            speech.frames += 1
        self.frames += len(frames)
        return speaking, frames

    def _make_room(self, speech: Speech) -> bool:
        """Have a free page if its next frame needs one. Returns False if this has preempted the speech itself."""
        full = len(speech.table) * PAGE_TOKENS == speech.prompt.rows + speech.frames
        while speech.is_running and full and not self._pool.free:
            self._preempt()
        return speech.is_running

    def _preempt(self) -> None:
        """Take the pages of the youngest speech that runs."""
        youngest = next(speech for speech in reversed(self._speeches.values()) if speech.is_running)
        self._pool.close(youngest.table)
        number = next(self._numbers)
        self._moved.append((youngest.named, number))
        youngest.restart(number)
        self.preemptions += 1

    def _next_chunks(self) -> tuple[list[Speech], list[TalkerChunk]]:
        """Return the next rows of prompts, and the speeches that they belong to. Admits those that wait."""
        rows, reading, chunks = CHUNK_ROWS, list[Speech](), list[TalkerChunk]()
        for speech in self._admitted():
            count = min(speech.prompt.rows - speech.read, rows)
            if count:
                chunks.append(_next_chunk(speech, count))
                reading.append(speech)
                rows -= count
            if not rows:
                break
        return reading, chunks

    def _admitted(self) -> Iterator[Speech]:
        """Yield the speeches that run, in order of arrival, and then those that can be admitted."""
        running = [speech for speech in self._speeches.values() if speech.is_running]
        yield from running
        waiting = [speech for speech in self._speeches.values() if speech.can_begin]
        for number, speech in enumerate(waiting, len(running)):
            if num_pages(speech.prompt.rows) + number > self._pool.free or number >= MAX_RUNNING:
                return
            self._pool.extend(speech.table, speech.prompt.rows)
            yield speech

    def _next_sounds(self) -> list[tuple[Speech, Sound]]:
        """Return the next parts of sound, of frames that are computed once this step's are."""
        sounds = []
        for speech in self._speeches.values():
            there = speech.frames - speech.voiced
            part = min(max(speech.voiced, FIRST_PART), LARGEST_PART)
            if there >= part or (there and speech.frames == speech.total):
                sounds.append((speech, Sound(speech.named, speech.voiced, speech.voiced + min(there, part))))
        return sounds

    def _run(self, chunks: list[TalkerChunk], frames: list[Frame], sounds: list[Sound]) -> Spoken:
        step = SpeechStep(chunks, frames, sounds, self._finished, self._moved)
        self._finished, self._moved = [], []
        self._worker.announce(step)
        spoken = self._worker.speak(step)
        # A frame with a code for which there were no probabilities has no first code after it.
        spoken.logits[len(spoken.logits) - len(frames) :][(spoken.codes < 0).any(1)] = torch.nan
        return spoken

    def _take_codes(self, heard: list[Speech], logits: Tensor) -> list[SoundEvent | Failed]:
        """Choose the first code of the next frame of each speech, unless it is known from before."""
        events: list[SoundEvent | Failed] = []
        new = [(row, speech) for row, speech in enumerate(heard) if len(speech.codes) == speech.frames]
        if len(new) < len(heard):
            logits = logits[[row for row, _ in new]]
        rows = [Row(speech.params, speech.codes, 0, self._forbidden) for _, speech in new]
        for (_, speech), choice in zip(new, choose(logits, rows) if rows else (), strict=True):
            if choice is None:
                self._end(speech)
                events.append(_failed(speech))
                continue
            speech.codes.append(choice.token_id)
            if choice.token_id == self._settings.end or len(speech.codes) > speech.most_frames:
                speech.total = len(speech.codes) - 1
                self._pool.close(speech.table)
        return events

    def _take_sound(self, speech: Speech, sound: Sound, samples: Tensor) -> list[SoundEvent | Failed]:
        """Return the samples that the client does not have yet."""
        if not samples.isfinite().all():
            self._end(speech)
            return [_failed(speech)]
        new = samples[max(speech.sent - speech.made, 0) :]
        speech.voiced, speech.made = sound.end, speech.made + len(samples)
        speech.sent += len(new)
        self.samples += len(new)
        return [SoundEvent(speech.request, _pcm(new), last=False)] if len(new) else []

    def _end(self, speech: Speech) -> None:
        del self._speeches[speech.request]
        self._release(speech)

    def _release(self, speech: Speech) -> None:
        self._pool.close(speech.table)
        if speech.number is not None:
            self._finished.append(speech.number)

    def _send_last(self) -> None:
        """Let the ranks drop what no speech needs, if no step will follow soon."""
        if self._finished and not self._speeches:
            self._run([], [], [])


def _next_chunk(speech: Speech, count: int) -> TalkerChunk:
    """Return the next `count` rows of the prompt of a speech, and count them as read."""
    prompt, start = speech.prompt, speech.read
    speech.read = end = start + count
    tokens, last = prompt.tokens[start:end], end == prompt.rows
    if last:
        token = speech.text(0)
        assert token is not None
        tokens.append(token)
    return TalkerChunk(
        speech.named,
        start,
        tokens,
        prompt.indices[start:end],
        prompt.codes[start:end],
        [axis[start:end] for axis in prompt.positions],
        speech.next_pages(),
        last,
    )


def _failed(speech: Speech) -> Failed:
    return Failed(
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
