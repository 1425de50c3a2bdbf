"""What a rank of test_speaking.py does: an engine speaks the cases of reference_speech.py."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from batching import forget
from safetensors.torch import load_file
from torch import Tensor

from tests.runtime.omni.parts import media_of, text_of
from tilerank.kernels.kv_pages import PAGE_TOKENS
from tilerank.loader.tokenizer import Tokenizer
from tilerank.parallel.join import Team
from tilerank.runtime.lead import speech_scheduler
from tilerank.runtime.lead.engine import Engine, Request
from tilerank.runtime.lead.sampling import SamplingParams
from tilerank.runtime.media.registry import load_processor
from tilerank.runtime.protocol.events import SoundEvent, TokenEvent
from tilerank.runtime.protocol.params import SpeechParams
from tilerank.runtime.protocol.prompt import Prompt
from tilerank.runtime.protocol.speech_messages import SpeechStep
from tilerank.runtime.rank.rank_config import RankConfig
from tilerank.runtime.rank.speech_rank import SpeechOutputs
from tilerank.runtime.rank.worker import Worker

Codes = list[list[int]]


class Listener:
    """Notes the codes of every frame that an engine computes, by the number of its speech."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.codes: dict[int, Codes] = {}
        self.steps: list[SpeechStep] = []
        self._speak = engine.worker.speak
        engine.worker.speak = self.speak  # type: ignore[method-assign]

    def speak(self, step: SpeechStep) -> SpeechOutputs:
        spoken = self._speak(step)
        self.steps.append(step)
        for frame, codes in zip(step.frames, spoken.codes.tolist(), strict=True):
            self.codes.setdefault(frame.sequence, []).append(codes)
        return spoken


class Answer:
    """What a request got: tokens, codes of frames, and samples."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.codes: Codes = []
        self.samples = b""
        self.ended = 0


def speak(listener: Listener, requests: list[Request]) -> list[Answer]:
    """Run requests together."""
    engine, answers = listener.engine, [Answer() for _ in requests]
    numbers: dict[int, int] = {}
    known = {engine.submit(request): answer for request, answer in zip(requests, answers, strict=True)}
    while engine.busy:
        speeches = list(engine.speaking.speeches.values())
        for event in engine.step():
            answer = known[event.request]
            if isinstance(event, SoundEvent):
                answer.samples += event.samples
                answer.ended += event.last
            else:
                assert isinstance(event, TokenEvent)
                answer.tokens.append(event.token_id)
        numbers |= {speech.request: speech.number for speech in speeches if speech.number is not None}
    for request, number in numbers.items():
        known[request].codes = listener.codes.get(number, [])
    return answers


def request(prompt: Prompt, *, speaks: bool = True, **params: Any) -> Request:
    speech = SpeechParams("ethan") if speaks else None
    return Request(prompt, SamplingParams(**{"max_new_tokens": 6, "ignore_eos": True, "speech": speech} | params))


def prompts(out: str, cases: dict[str, list[Any]], wanted: dict[str, Tensor]) -> dict[str, Prompt]:
    model = Path(out) / "omni"
    processor = load_processor(model, Tokenizer(model))
    assert processor is not None
    return {name: processor.prompt(text_of(parts), media_of(name, parts, wanted)) for name, parts in cases.items()}


def start(team: Team, out: str, *, eager: bool = False, talker_pages: int = 64) -> Worker:
    tokens, model = talker_pages * PAGE_TOKENS, Path(out) / "omni"
    return Worker(
        model, team, RankConfig(dtype=torch.float32, max_total_tokens=4096, talker_tokens=tokens, eager=eager)
    )


def run(team: Team, *, out: str, cases: dict[str, list[Any]], frames: int, eager: bool = False) -> dict[str, Any]:
    """Return what differs from transformers: for each case alone and for all together beside texts alone, with prompts
    in one piece and in pieces."""
    worker = start(team, out, eager=eager)
    if team.group.rank:
        worker.follow()
        return {}
    wanted = load_file(f"{out}/omni.safetensors")
    found = prompts(out, cases, wanted)
    requests = [request(prompt) for prompt in found.values()]
    texts = [request(prompt, speaks=False, max_new_tokens=9) for prompt in found.values()]
    engine = Engine(worker)
    with limits(frames):
        listener = Listener(engine)
        results = {"alone": [speak(listener, [one])[0] for one in requests]}
        for rows in (speech_scheduler.CHUNK_ROWS, 7):
            forget(engine)
            with limits(frames, rows):
                results[f"together, {rows} rows"] = speak(listener, [*texts, *requests])[len(texts) :]
    worker.stop()
    return {
        way: {name: differs(answer, wanted, name) for name, answer in zip(cases, answers, strict=True)}
        for way, answers in results.items()
    }


def differs(answer: Answer, wanted: dict[str, Tensor], name: str) -> list[str]:
    """Return what is not as transformers has it."""
    ids, codes, wave = (wanted[f"{name}.{key}"] for key in ("ids", "codes", "wave"))
    samples = torch.frombuffer(bytearray(answer.samples), dtype=torch.int16).float() / 32767
    checks = {
        "tokens": answer.tokens == ids[-len(answer.tokens) :].tolist(),
        "codes": answer.codes == codes.tolist(),
        "end": answer.ended == 1,
        # A sample is rounded to 16 bits.
        "wave": samples.shape == wave.shape and float((samples - wave).abs().max()) <= 1e-3 + 2**-15,
    }
    return [check for check, holds in checks.items() if not holds]


@contextmanager
def limits(frames: int, rows: int = speech_scheduler.CHUNK_ROWS) -> Iterator[None]:
    """End speech after so many frames, and read so many rows of prompts in a step."""
    before = speech_scheduler.MAX_FRAMES, speech_scheduler.CHUNK_ROWS
    speech_scheduler.MAX_FRAMES, speech_scheduler.CHUNK_ROWS = frames, rows
    yield
    speech_scheduler.MAX_FRAMES, speech_scheduler.CHUNK_ROWS = before
