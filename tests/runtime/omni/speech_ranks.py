"""What a rank of test_speech.py does: the cases of reference_speech.py with our text model, talker and predictor.

All ranks run the same steps, without an engine.
"""

import hashlib
from pathlib import Path
from typing import Any

import torch
from conformance import row_errors
from safetensors.torch import load_file
from torch import Tensor

from tests.runtime.omni.parts import media_of, text_of
from tilerank.kernels import core
from tilerank.kernels.kv_pages import PAGE_TOKENS
from tilerank.loader.tokenizer import Tokenizer
from tilerank.parallel.join import Team
from tilerank.runtime.media.registry import load_processor
from tilerank.runtime.protocol.prompt import PlaceholderRange, Prompt
from tilerank.runtime.protocol.rank_messages import Chunk, Encode, Step
from tilerank.runtime.protocol.speech_messages import Frame, SpeechStep, TalkerChunk
from tilerank.runtime.rank.rank_config import RankConfig
from tilerank.runtime.rank.speech_rank import SpeechOutputs
from tilerank.runtime.rank.worker import Worker
from tilerank.runtime.step.cache import num_pages

CUT = 11
"""Prompts are computed in two chunks, of which the first has so many rows."""


class Case:
    """A case of the reference: what its rows are, and how far its speech is."""

    def __init__(self, number: int, name: str, worker: Worker, wanted: dict[str, Tensor], new_tokens: int) -> None:
        self.number, self.name = number, name
        self.codes = wanted[f"{name}.codes"].tolist()
        self.logits = wanted[f"{name}.logits"]
        self.positions = wanted[f"{name}.positions"].tolist()
        ids = wanted[f"{name}.ids"].tolist()
        config = worker.card.fields
        talker = config.object("talker_config")
        start, user = (config.values[key] for key in ("im_start_token_id", "user_token_id"))
        pad, bos, eos = (config.values[f"tts_{key}_token_id"] for key in ("pad", "bos", "eos"))
        length = len(ids) - new_tokens
        media = {talker.values[f"{kind}_token_id"] for kind in ("audio", "image", "video")}
        starts = [i for i in range(length) if ids[i] == start]
        rows = [
            i
            for first, end in zip(starts, [*starts[1:], length], strict=True)
            if ids[first + 1] == user
            for i in range(first, end)
        ]
        self.tokens = [ids[i] for i in rows]
        self.indices = [i if ids[i] in media else -1 for i in rows]
        answer = ids[starts[-1] :]
        special = ("nothink_id", "think_bos_id", "think_eos_id", "pad_id", "bos_id")
        nothink, think_bos, think_eos, codec_pad, codec_bos = (talker.values[f"codec_{key}"] for key in special)
        voice = talker.values["speaker_id"]["ethan"]
        self.added = [-1] * (len(rows) + 3) + [nothink, think_bos, think_eos, voice, codec_pad, codec_bos]
        self.tokens += [*answer[:3], pad, pad, pad, pad, bos, answer[3]]
        self.indices += [-1] * 9
        # The last token of an answer is never spoken.
        self.queue = [*answer[4:-1], eos] + [pad] * len(self.codes)

    def chunks(self, pages: list[int]) -> list[TalkerChunk]:
        """The prompt, the first `CUT` rows and the rest."""
        count = len(self.tokens)
        return [
            TalkerChunk(
                self.number,
                first,
                self.tokens[first:end],
                self.indices[first:end],
                self.added[first:end],
                [axis[first:end] for axis in self.positions],
                pages if first == 0 else [],
                end == count,
            )
            for first, end in ((0, CUT), (CUT, count))
        ]

    def frame(self, number: int, draws: list[float]) -> Frame:
        row = len(self.tokens) + number
        position = self.positions[0][row]
        return Frame(self.number, self.codes[number][0], draws, self.queue[number], row, position, [])


class Pages:
    """Gives pages of both caches."""

    def __init__(self) -> None:
        self.next = 0

    def take(self, tokens: int) -> list[int]:
        first, self.next = self.next, self.next + num_pages(tokens)
        return list(range(first, self.next))


def read(worker: Worker, case: Case, prompt: Prompt, pages: Pages) -> None:
    """Compute the prompt of the text model, in two chunks that cut a medium if there is any."""
    ids = prompt.token_ids
    for number, medium in enumerate(prompt.media):
        worker.prepare_encode(Encode(10 * case.number + number, medium, 1e12))
        while not worker.encode_piece():
            pass
    cut = prompt.placeholder_ranges[0].start + 3 if prompt.placeholder_ranges else 5
    held = pages.take(len(ids))
    for first, end in ((0, cut), (cut, len(ids))):
        ranges = []
        for place in prompt.placeholder_ranges:
            begin, stop = max(place.start, first), min(place.start + place.count, end)
            if begin < stop:
                encoding = 10 * case.number + place.medium
                ranges.append(
                    PlaceholderRange(begin - first, stop - begin, encoding, place.first + begin - place.start)
                )
        axes = [axis[first:end] for axis in prompt.positions]
        chunk = Chunk(case.number, first, ids[first:end], held if first == 0 else [], 1, axes, 0, ranges)
        worker.run(Step([chunk], [], kept=[case.number]))


class Speech:
    """Speaks the cases of the reference, and notes where it differs from them."""

    def __init__(self, worker: Worker, frames: int) -> None:
        self.worker, self.frames = worker, frames
        self.pages = Pages()
        self.errors: dict[str, float] = {}
        self.wrong: list[str] = []

    def speak(self, cases: list[Case]) -> list[list[Tensor]]:
        """Speak these cases together. Returns the logits and codes of every step of each."""
        found: list[list[Tensor]] = [[] for _ in cases]

        def check(spoken: SpeechOutputs, number: int) -> None:
            for case, logits, kept in zip(cases, spoken.logits, found, strict=True):
                error = float(row_errors(logits[None], case.logits[number : number + 1]).max())
                self.errors[case.name] = max(self.errors.get(case.name, 0.0), error)
                kept.append(logits.clone())

        chunks = [case.chunks(self.pages.take(len(case.tokens) + self.frames)) for case in cases]
        begun = self.worker.speak(SpeechStep([begin for begin, _ in chunks], [], [], []))
        assert begun.logits.shape[0] == begun.codes.shape[0] == 0
        check(self.worker.speak(SpeechStep([end for _, end in chunks], [], [], [])), 0)
        for number in range(self.frames):
            spoken = self.worker.speak(SpeechStep([], [case.frame(number, []) for case in cases], [], []))
            check(spoken, number + 1)
            for case, codes, kept in zip(cases, spoken.codes, found, strict=True):
                self.wrong += [] if codes.tolist() == case.codes[number] else [f"{case.name}, frame {number}"]
                kept.append(codes)
        self.worker.speak(SpeechStep([], [], [], [case.number for case in cases]))
        return found

    def sample(self, cases: list[Case], draws: list[list[float]]) -> list[list[int]]:
        """Return the codes of the first frame of each of these cases, all of the same prompt, one for each draw."""
        chunks = [case.chunks(self.pages.take(len(case.tokens) + 1)) for case in cases]
        for part in zip(*chunks, strict=True):
            self.worker.speak(SpeechStep(list(part), [], [], []))
        frames = [case.frame(0, row) for case, row in zip(cases, draws, strict=True)]
        found: list[list[int]] = self.worker.speak(SpeechStep([], frames, [], [])).codes.tolist()
        return found


def run(
    team: Team,
    *,
    out: str,
    cases: dict[str, list[Any]],
    new_tokens: int,
    frames: int,
    rungs: list[str],
    eager: bool = False,
) -> dict[str, Any]:
    return {rung: check_rung(team, out, cases, new_tokens, frames, rung, eager) for rung in rungs}


def check_rung(
    team: Team, out: str, cases: dict[str, list[Any]], new_tokens: int, frames: int, rung: str, eager: bool
) -> dict[str, Any]:
    core.force_isa(rung)
    wanted, model = load_file(f"{out}/omni.safetensors"), Path(out) / "omni"
    tokens = 64 * PAGE_TOKENS
    worker = Worker(
        model, team, RankConfig(dtype=torch.float32, max_total_tokens=4096, talker_tokens=tokens, eager=eager)
    )
    processor = load_processor(model, Tokenizer(model))
    assert processor is not None
    pages, speech = Pages(), Speech(worker, frames)

    def make(name: str) -> Case:
        case = Case(pages.next, name, worker, wanted, new_tokens)
        prompt = processor.prompt(text_of(cases[name]), media_of(name, cases[name], wanted))
        read(worker, case, prompt, pages)
        return case

    together = speech.speak([make(name) for name in cases])
    alone = [speech.speak([make(name)])[0] for name in cases]
    bits = [[part.numpy().tobytes() for part in case] for case in together]
    draws = wanted["draws"].tolist()
    first = next(iter(cases))
    sampled = speech.sample([make(first) for _ in draws], draws)
    return {
        "logits": speech.errors,
        "wrong": speech.wrong,
        "same_bits": bits == [[part.numpy().tobytes() for part in case] for case in alone],
        "sampled": sampled == wanted["sampled"].tolist(),
        "digest": hashlib.sha256(b"".join(map(b"".join, bits))).hexdigest(),
    }
