"""`tilerank generate`: prompts in, text out, on ranks that this command starts or that another launcher started."""

import argparse
import logging
import os
import secrets
from dataclasses import replace
from typing import TYPE_CHECKING

from tilerank.loader.card import ModelCard, read_card
from tilerank.loader.pooling import DOES
from tilerank.loader.tokenizer import Tokenizer
from tilerank.runtime.protocol.errors import RequestError

from ..errors import LaunchError
from ..host.placement import Placement, RankPlacement
from ..host.topology import read_topology
from ..logs import log_debug_on_rank0, log_info_on_rank0, say
from ..options import kv_dir, model, other_servers
from ..options.arguments import number, whole_number
from ..options.draft_model import check_draft_model
from ..planning import cache_size
from ..planning.plan_text import cache_text, render, states_text, windows_text
from ..ranks import start
from ..ranks.prefill_ranks import gives_pages, transfer_of
from ..ranks.rank import run_rank
from ..ranks.rendezvous import identify
from . import prompts, speech_output
from .answers import Answers, JsonPrinter, Printer, TextPrinter, prompts_bar, summary

if TYPE_CHECKING:
    from tilerank.parallel.join import Team
    from tilerank.runtime.lead.sampling import SamplingParams
    from tilerank.runtime.rank.transfer_memory import Transfer
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
    kv_dir.add_arguments(parser)
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
        self._options = replace(model.model_options(args), gives_pages=gives_pages(os.environ))
        self._plan: Plan | None = None  # on the first rank of each host

    def prepare(self) -> None:
        card = model.checked_card(self._args, self._model_dir)
        if card.pooling is not None:
            does = DOES[card.pooling.task]
            raise LaunchError(f"{self._model_dir} {does}, and generates none; `tilerank serve` runs it")
        self._tokenizer = Tokenizer(model.tokenizer_directory(self._args))
        check_draft_model(self._options.draft_model, self._tokenizer)
        given = prompts.read_prompts(self._args)
        self._speech = speech_output.read_speech(self._args, card, len(given))
        if self._speech is not None:
            self._args.chat = True
        self._prompts = prompts.encode(given, self._args, self._tokenizer, card)
        errors = [prompt for prompt in self._prompts if isinstance(prompt, LaunchError)]
        if len(errors) == len(self._prompts):
            raise errors[0]
        asked = [prompt for prompt in given if isinstance(prompt, prompts.GivenPrompt)]
        chats = self._args.chat or any(prompt.messages is not None for prompt in asked)
        self._ends = self._tokenizer.end_token_ids(self._tokenizer.chat_template.after_answer if chats else "")

    def memory_refusal(self, size: int, here: range, placement: Placement) -> str | None:
        from tilerank.runtime.rank import registry

        from ..planning.plan import plan_model, without_held_weights
        from ..planning.remedies import plan_with_remedy

        name = str(self._model_dir)
        topology = without_held_weights(read_topology(), placement, start.held_weights(os.environ))
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
            if self._options.gives_pages:
                log_info_on_rank0(log, "half of the cache is the memory through which decode ranks take the prompts")
            if tokens < self._plan.cached_tokens:
                log_info_on_rank0(log, "another host has room for %s tokens only: that holds for all", f"{tokens:,}")
        config = self._options.rank_config(read_card(self._model_dir), tokens)
        config = replace(config, transfer=self.transfer(own.rank))
        if config.transfer is None or config.transfer.gives:  # decode ranks take pages from prefill ranks
            config = kv_dir.with_kv_dir(config, self._args)
        return Worker(self._model_dir, team, config, start.weight_files(self._args))

    def transfer(self, rank: int) -> "Transfer | None":
        """Return the part of a rank in a server with prefill ranks; None if all ranks do both."""
        return transfer_of(os.environ)

    def lead(self, worker: "Worker", size: int, placement: Placement) -> None:
        from tilerank.kernels import core
        from tilerank.runtime.lead.drafting.draft_sources import draft_source
        from tilerank.runtime.lead.engine import Engine, Request

        several = len(self._prompts) > 1
        printer: Printer = TextPrinter(streamed=not several)
        if self._args.json:
            printer = JsonPrinter(bool(self._args.logprobs))
        source = draft_source(self._options.drafts(worker.card), worker)
        engine = Engine(worker, self._options.mm_cache_bytes, source=source)
        with prompts_bar(len(self._prompts)) as progress:
            answers = Answers(self._tokenizer, printer, progress, several)
            for index, prompt in enumerate(self._prompts):
                if isinstance(prompt, LaunchError):
                    answers.fail(index, prompt)
                    continue
                try:
                    request = engine.submit(Request(prompt.prompt, self._sampling()), prompt.name)
                except RequestError as e:
                    answers.fail(index, e)
                else:
                    answers.begin(request, index, prompt)
            while engine.busy:
                for event in engine.step():
                    answers.take(event)
                progress.show()
        if not answers.done:
            raise LaunchError(f"none of {len(self._prompts)} prompts has an answer")
        if self._speech is not None:
            speech_output.write_wav(self._args.audio_out, bytes(answers.sound))
        say(summary(answers.done, answers.failed, size, placement, core.isa_text()))

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
