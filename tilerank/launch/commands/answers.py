"""The answers of `tilerank generate`: each as it grows, and how it is printed. No torch in here."""

import sys
import time
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from tilerank.loader.tokenizer import Tokenizer, TokenStream
from tilerank.runtime.protocol.errors import RequestError
from tilerank.runtime.protocol.events import Event, FailedEvent, SoundEvent, TokenEvent

from ..errors import LaunchError
from ..host.cpulist import format_cpulist
from ..host.placement import Placement
from ..logs import say
from ..offline.progress import Progress, command_interval_s
from ..text import count
from .prompts import EncodedPrompt


class PromptAnswer:
    """The answer so far to prompt number `index`, from 0, with the time of each token.

    began: when all prompts were handed to the engine, on the clock of events.
    """

    def __init__(self, index: int, prompt: EncodedPrompt, stream: TokenStream, began: float) -> None:
        self.index = index
        self.name = prompt.name
        self.prompt_ids = prompt.prompt.token_ids
        self.token_ids: list[int] = []
        self.logprobs: list[tuple[tuple[int, float], ...]] = []
        self.text = ""
        self.finish_reason: str | None = None
        self.times_s: list[float] = []  # of every token, since `began`
        self._stream = stream
        self._began = began

    def take(self, event: TokenEvent) -> None:
        self.times_s.append(event.time_s - self._began)
        self.token_ids.append(event.token_id)
        self.text += self._stream.push(event.token_id)
        if event.logprobs is not None:
            self.logprobs.append(event.logprobs.top)
        if event.finish_reason is not None:
            self.finish_reason = event.finish_reason
            self.text += self._stream.flush()

    @property
    def is_done(self) -> bool:
        return self.finish_reason is not None

    @property
    def ttft_s(self) -> float:
        return self.times_s[0]

    @property
    def decode_tokens_per_s(self) -> float | None:
        """After the first token, which the prompt's own computation yields; None if there was no other."""
        elapsed = self.times_s[-1] - self.times_s[0]
        return (len(self.token_ids) - 1) / elapsed if elapsed > 0 else None


class Printer(Protocol):
    """Writes answers to stdout. Raises LaunchError if that is not possible."""

    def show(self, answer: PromptAnswer) -> None:
        """Write what is new of an answer that has got a token."""

    def fail(self, index: int, sentence: str) -> None:
        """Write that prompt number `index` has no answer, and why."""


class TextPrinter:
    """Answers for a reader. streamed: there is one prompt, whose text is written as it comes. The texts of several are
    written with their numbers, from 1, each as it is done."""

    def __init__(self, streamed: bool) -> None:
        self._streamed = streamed
        self._shown = 0  # characters of the only answer

    def show(self, answer: PromptAnswer) -> None:
        if self._streamed:
            _write_text(answer.text[self._shown :] + "\n" * answer.is_done)
            self._shown = len(answer.text)
        elif answer.is_done:
            _write_text(f"[{answer.index + 1}] {answer.text}\n")

    def fail(self, index: int, sentence: str) -> None:
        say(f"tilerank: {sentence}")


class JsonPrinter:
    """Answers for a program: a JSON line for each prompt, as its answer is done."""

    def __init__(self, logprobs: bool) -> None:
        self._logprobs = logprobs

    def show(self, answer: PromptAnswer) -> None:
        if not answer.is_done:
            return
        line: dict[str, Any] = {
            "index": answer.index,
            "prompt_token_ids": answer.prompt_ids,
            "token_ids": answer.token_ids,
            "text": answer.text,
            "finish_reason": answer.finish_reason,
            "ttft_s": answer.ttft_s,
            "decode_tokens_per_s": answer.decode_tokens_per_s,
        }
        if self._logprobs:
            line["logprobs"] = answer.logprobs
        _write(msgspec.json.encode(line) + b"\n")

    def fail(self, index: int, sentence: str) -> None:
        say(f"tilerank: {sentence}")
        _write(msgspec.json.encode({"index": index, "error": sentence}) + b"\n")


class Answers:
    """The answers to the prompts of a command, which are printed and counted as they grow.

    several: whether there are more prompts than one; the error of the only one is that of the command. done: the
    answers that are complete. sound: of the prompt whose answer is spoken. failed: how many prompts have no answer.
    """

    def __init__(self, tokenizer: Tokenizer, printer: Printer, progress: Progress, several: bool) -> None:
        self.done: list[PromptAnswer] = []
        self.sound = bytearray()
        self.failed = 0
        self._tokenizer = tokenizer
        self._printer = printer
        self._progress = progress
        self._several = several
        self._running: dict[int, PromptAnswer] = {}  # by the number of the request
        self._began = time.monotonic()

    def begin(self, request: int, index: int, prompt: EncodedPrompt) -> None:
        """Prompt number `index` is this request of the engine."""
        # Without their marks, channels would run into each other.
        stream = self._tokenizer.stream(special=self._tokenizer.has_channels)
        self._running[request] = PromptAnswer(index, prompt, stream, self._began)

    def take(self, event: Event) -> None:
        """Take an event of the engine. Raises RequestError for the end of the only prompt without an answer."""
        match event:
            case TokenEvent():
                answer = self._running[event.request]
                answer.take(event)
                if answer.is_done:
                    self.done.append(answer)
                self._printer.show(answer)
                self._progress.add(1, int(answer.is_done))
            case SoundEvent():
                self.sound += event.samples
            case FailedEvent():
                answer = self._running[event.request]
                self.fail(answer.index, RequestError(f"{answer.name}: {event.sentence}"))

    def fail(self, index: int, error: Exception) -> None:
        """Print why prompt number `index` has no answer. Raises the error if there is no other prompt."""
        if not self._several:
            raise error
        self.failed += 1
        with self._progress.aside():
            self._printer.fail(index, str(error))
        self._progress.add(0)


def prompts_bar(total: int) -> Progress:
    """Return a bar of several prompts, unless their answers show on a terminal how far they are."""
    shown = total > 1 and not (sys.stdout is not None and sys.stdout.isatty())
    return Progress(total, "prompts", shown=shown, interval_s=command_interval_s())


def summary(answers: Sequence[PromptAnswer], failed: int, size: int, placement: Placement, isa: str) -> str:
    """Return a few lines for stderr: tokens, speed, prompts without an answer, and the placement of the ranks."""
    tokens = sum(len(answer.token_ids) for answer in answers)
    first = min(answer.ttft_s for answer in answers)
    elapsed = max(answer.times_s[-1] for answer in answers) - first
    later = tokens - len(answers)
    speed = f", then {later / elapsed:.1f} tokens/s" if later > 0 and elapsed > 0 else ""
    here = len(placement.ranks)
    lines = [f"{count(failed, 'prompt')} without an answer"] if failed else []
    lines.append(f"{count(tokens, 'token')} from {count(size, 'rank')} on {isa}: the first after {first:.3f} s{speed}")
    for rank in placement.ranks:
        where = f": CPUs {format_cpulist(rank.affinity)}" if rank.affinity else ""
        lines.append(f"  rank {rank.rank}: {rank.reason}{where}")
    if here < size:
        lines.append(f"  {count(size - here, 'rank')} on other hosts")
    return "\n".join(lines)


def _write_text(text: str) -> None:
    """In the terminal's encoding; what that cannot show is escaped."""
    _write(text.encode(sys.stdout.encoding if sys.stdout else "utf-8", "backslashreplace"))


def _write(data: bytes) -> None:
    if sys.stdout is None:  # closed from the start
        return
    try:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
    except BrokenPipeError as e:
        raise LaunchError("the output was closed by its reader") from e
    except OSError as e:
        raise LaunchError(f"the output cannot be written: {e.strerror}") from e
