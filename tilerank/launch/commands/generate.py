"""`tilerank generate`: prompts in, text out, on ranks that this command starts or that another launcher started."""

import argparse
import logging
import os
import secrets
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from tilerank.loader.card import ModelCard, read_card
from tilerank.loader.pooling import DOES
from tilerank.loader.tokenizer import Tokenizer, TokenStream

from ..errors import LaunchError
from ..host.cpulist import format_cpulist
from ..host.placement import Placement, RankPlacement
from ..host.topology import read_topology
from ..logs import log_debug_on_rank0, log_info_on_rank0, say
from ..options import model, other_servers
from ..options.arguments import number, whole_number
from ..planning import cache_size
from ..planning.plan_text import cache_text, render, states_text, windows_text
from ..ranks import start
from ..ranks.rank import run_rank
from ..ranks.rendezvous import identify
from ..text import count
from . import prompts, speech_output

if TYPE_CHECKING:
    from tilerank.parallel.join import Team
    from tilerank.runtime.lead.sampling import SamplingParams
    from tilerank.runtime.protocol.events import TokenEvent
    from tilerank.runtime.rank.worker import Worker

    from ..planning.plan_types import Plan

log = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    prompts.add_arguments(parser)
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--max-new-tokens", type=whole_number(1), default=128, metavar="N")
    sampling.add_argument("--temperature", type=number(0.0, 1e6), default=0.0, metavar="T", help="0: most likely token")
    sampling.add_argument("--top-k", type=whole_number(0), default=0, metavar="K", help="0: all tokens")
    sampling.add_argument("--top-p", type=number(0.0, 1.0), default=1.0, metavar="P")
    sampling.add_argument(
        "--seed", type=whole_number(0, 2**64 - 1), metavar="N", help="for the same text again (default: random)"
    )
    sampling.add_argument("--ignore-eos", action="store_true", help="go on after the end of the text")
    sampling.add_argument(
        "--logprobs", type=whole_number(1, 100), metavar="N", help="with --json: the N most likely tokens at every step"
    )
    parser.add_argument("--json", action="store_true", help="one JSON line for each prompt")
    speech_output.add_arguments(parser)
    model.add_arguments(parser)
    start.add_arguments(parser)
    other_servers.add_arguments(parser, other_servers.MODEL)


def run(args: argparse.Namespace) -> int:
    start.check_arguments(args)
    if args.logprobs and not args.json:
        raise LaunchError("--logprobs needs --json")
    job = GenerateJob(args)
    identity = identify(os.environ)
    if start.ours_to_start(args, identity):
        for note in other_servers.notes(args):
            say(note)
        job.prepare()
        return start.start_ranks(args, identity)
    return run_rank(identity, args, job)


class GenerateJob:
    """The job of the ranks of `generate`. The command itself also calls `prepare`, before it starts any rank.

    BESIDE_BYTES: that other processes in the control group may take.
    """

    BESIDE_BYTES = 0

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._model_dir = model.model_directory(args)
        self._options = model.model_options(args)
        self._plan: Plan | None = None  # on the first rank of each host

    def prepare(self) -> None:
        card = model.checked_card(self._args, self._model_dir)
        if card.pooling is not None:
            does = DOES[card.pooling.task]
            raise LaunchError(f"{self._model_dir} {does}, and generates none; `tilerank serve` runs it")
        self._tokenizer = Tokenizer(self._model_dir)
        given = prompts.read_prompts(self._args)
        self._speech = speech_output.read_speech(self._args, card, len(given))
        if self._speech is not None:
            self._args.chat = True
        self._prompts = prompts.encode(given, self._args, self._tokenizer, card)
        chats = self._args.chat or any(prompt.messages is not None for prompt in given)
        self._ends = self._tokenizer.end_token_ids(self._tokenizer.chat_template.after_answer if chats else "")

    def memory_refusal(self, size: int, here: range, placement: Placement) -> str | None:
        from tilerank.runtime.rank import registry

        from ..planning.plan import plan_model
        from ..planning.remedies import plan_with_remedy

        topology, name = read_topology(), str(self._model_dir)
        topology = replace(topology, limits=topology.limits.beside(self.BESIDE_BYTES))

        def planner(card: ModelCard, options: model.ModelOptions) -> "Plan":
            return plan_model(card, size, options, model=name, topology=topology, placement=placement, here=here)

        card = registry.read_supported_card(self._model_dir, self._options.family)
        card = replace(card, context_length=model.context_length(self._args, card))
        self._plan = plan_with_remedy(card, self._options, planner)
        return self._plan.refusal()

    def build(self, team: "Team", own: RankPlacement) -> "Worker":
        from tilerank.runtime.rank.worker import Worker

        tokens = cache_size.agreed(team.group, self._plan.cached_tokens if self._plan else None)
        if self._plan:
            log_debug_on_rank0(log, "the ranks and their parts:\n%s", render(self._plan))
            log_info_on_rank0(log, cache_text(self._plan))
            if self._plan.window_tokens:
                log_info_on_rank0(log, windows_text(self._plan))
            if self._plan.states:
                log_info_on_rank0(log, states_text(self._plan))
            if tokens < self._plan.cached_tokens:
                log_info_on_rank0(log, "another host has room for %s tokens only: that holds for all", f"{tokens:,}")
        return Worker(self._model_dir, team, self._options.rank_config(read_card(self._model_dir), tokens))

    def lead(self, worker: "Worker", size: int, placement: Placement) -> None:
        from tilerank.kernels import core
        from tilerank.runtime.lead.engine import Engine, Request

        special = self._tokenizer.has_channels  # without their marks, channels would run into each other
        answers = [PromptAnswer(prompt.token_ids, self._tokenizer.stream(special=special)) for prompt in self._prompts]
        output = JsonPrinter(answers, bool(self._args.logprobs)) if self._args.json else TextPrinter(answers)
        engine = Engine(worker, self._options.mm_cache_bytes)
        requests = [Request(prompt, self._sampling()) for prompt in self._prompts]
        sound = bytearray()
        for event in engine.generate(requests, on_sound=lambda part: sound.extend(part.samples)):
            answers[event.request].take(event)
            output.show()
        if self._speech is not None:
            speech_output.write_wav(self._args.audio_out, bytes(sound))
        say(summary(answers, size, placement, core.isa_text()))

    def _sampling(self) -> "SamplingParams":
        from tilerank.runtime.lead.sampling import SamplingParams

        args = self._args
        return SamplingParams(
            max_new_tokens=args.max_new_tokens,
            temperature=args.temperature,
            top_k=args.top_k,
            top_p=args.top_p,
            seed=secrets.randbits(63) if args.seed is None else args.seed,
            ignore_eos=args.ignore_eos,
            end_token_ids=self._ends,
            logprobs=args.logprobs or 0,
            speech=self._speech,
        )


class PromptAnswer:
    """The answer to one prompt so far, with the time of each token."""

    def __init__(self, prompt_ids: list[int], stream: TokenStream) -> None:
        self.prompt_ids = prompt_ids
        self.token_ids: list[int] = []
        self.logprobs: list[tuple[tuple[int, float], ...]] = []
        self.text = ""
        self.finish_reason: str | None = None
        self.times_s: list[float] = []  # of every token, since all prompts were handed to the engine
        self._stream = stream

    def take(self, event: "TokenEvent") -> None:
        self.times_s.append(event.time_s)
        self.token_ids.append(event.token_id)
        self.text += self._stream.push(event.token_id)
        if event.logprobs is not None:
            self.logprobs.append(event.logprobs.top)
        if event.finish_reason is not None:
            self.finish_reason = event.finish_reason
            self.text += self._stream.flush()

    @property
    def ttft_s(self) -> float:
        return self.times_s[0]

    @property
    def decode_tokens_per_s(self) -> float | None:
        """After the first token, which the prompt's own computation yields; None if there was no other."""
        elapsed = self.times_s[-1] - self.times_s[0]
        return (len(self.token_ids) - 1) / elapsed if elapsed > 0 else None


class TextPrinter:
    """Answers for a reader: one prompt's text as it comes, several prompts' as each is done, in order."""

    def __init__(self, answers: list[PromptAnswer]) -> None:
        self._answers = answers
        self._shown = 0  # characters of the only answer, or answers

    def show(self) -> None:
        if len(self._answers) == 1:
            answer = self._answers[0]
            end = "" if answer.finish_reason is None else "\n"
            _write_text(answer.text[self._shown :] + end)
            self._shown = len(answer.text)
            return
        while self._shown < len(self._answers) and self._answers[self._shown].finish_reason is not None:
            _write_text(f"[{self._shown + 1}] {self._answers[self._shown].text}\n")
            self._shown += 1


class JsonPrinter:
    """Answers for a program: one line for each prompt, in order."""

    def __init__(self, answers: list[PromptAnswer], logprobs: bool) -> None:
        self._answers = answers
        self._logprobs = logprobs
        self._shown = 0

    def show(self) -> None:
        while self._shown < len(self._answers) and self._answers[self._shown].finish_reason is not None:
            answer = self._answers[self._shown]
            line: dict[str, Any] = {
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
            self._shown += 1


def summary(answers: list[PromptAnswer], size: int, placement: Placement, isa: str) -> str:
    """Return a few lines for stderr: tokens, speed, and the placement of the ranks."""
    tokens = sum(len(answer.token_ids) for answer in answers)
    first = min(answer.ttft_s for answer in answers)
    elapsed = max(answer.times_s[-1] for answer in answers) - first
    later = tokens - len(answers)
    speed = f", then {later / elapsed:.1f} tokens/s" if later > 0 and elapsed > 0 else ""
    here = len(placement.ranks)
    lines = [f"{count(tokens, 'token')} from {count(size, 'rank')} on {isa}: the first after {first:.3f} s{speed}"]
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
