"""Rank 0's engine: it admits requests, schedules steps, samples tokens and follows grammars.

Each step goes to all ranks as one message (rank_messages.py); a Worker on every rank, this one included, computes it.
"""

import time
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from ..protocol.engine_state import EngineState
from ..protocol.errors import RequestError
from ..protocol.events import Event, FailedEvent, PooledEvent, PrefilledEvent, ScoredEvent, SoundEvent, TokenEvent
from ..protocol.grammar import Vocabulary
from ..protocol.prompt import MM_CACHE_BYTES, Prompt
from ..protocol.rank_messages import Count, Step
from ..protocol.sizes import MAX_RUNNING, PREFILL_CHUNK
from ..protocol.speech_settings import read_speech_settings
from ..rank.counters import RankCounters
from ..rank.worker import Worker
from ..step.cache import num_pages
from .cache_kinds import cache_kinds
from .drafting.draft_counts import DraftCounts
from .drafting.drafts import Drafting, DraftSource
from .drawing import Draw, choose_next
from .grammar_masks import GrammarMasks, collect_masks
from .hidden_states import asked_layers, hidden_states
from .logits_rules import LogitsRules, TextRules
from .media_encoding import MediaEncoding
from .pooler import Pooler
from .prompt_checks import check_layers, check_media, check_prompt, check_task
from .prompt_scores import prompt_scores
from .sampling import SampledToken, SamplingParams
from .scheduler import SCORE_ROWS, Scheduler
from .sequence import Scheduled, Sequence, next_chunk, rows_of
from .speech_scheduler import SpeechScheduler
from .transfers.given_pages import GivenPages


@dataclass(frozen=True)
class Request:
    """A prompt and what to do with it.

    rules: what Engine.rules returned for the same parameters, but for the seed; None if no other request shares them.
    slots: as in Sequence.
    """

    prompt: Prompt
    params: SamplingParams = field(default_factory=SamplingParams)
    rules: LogitsRules | None = None
    slots: list[list[int]] = field(default_factory=list)


class Engine:
    """Serves requests with the model of `worker`, which is rank 0's. The other ranks run `Worker.follow`.

    mm_cache_bytes: how many bytes of encoded media each rank keeps; requests whose media take more are refused.
    max_running: requests that run at once. tokenizer_dir: as of Vocabulary. source: of drafts; None for none.
    """

    def __init__(
        self,
        worker: Worker,
        mm_cache_bytes: int = MM_CACHE_BYTES,
        max_running: int = MAX_RUNNING,
        tokenizer_dir: Path | None = None,
        source: DraftSource | None = None,
    ) -> None:
        self.worker = worker
        self.card = worker.card
        self._eos = frozenset(worker.card.eos_token_ids)
        self._whole_tokens = worker.encoder.whole_tokens if worker.encoder else 0
        chunk_rows = max(PREFILL_CHUNK, self._whole_tokens)
        kinds = cache_kinds(worker, mm_cache_bytes)
        self.scheduler = Scheduler(kinds, max_running, chunk_rows)
        self._given_pages = next((kind for kind in kinds if isinstance(kind, GivenPages)), None)
        self.drafting = Drafting(source, self.scheduler, DraftCounts())
        self.speaking = SpeechScheduler(worker, read_speech_settings(self.card))
        self.encoding = MediaEncoding(worker)
        self._pooler = None if self.card.pooling is None else Pooler(worker, self.card.pooling)
        self._grammar_masks = GrammarMasks(Vocabulary(worker.model_dir, tokenizer_dir), self.card.vocab_size)
        self._requests: dict[int, Sequence] = {}  # whose texts are not complete
        self._next_request = 0
        self._prompt_tokens = self._generated_tokens = 0

    def submit(self, request: Request, name: str = "the request") -> int:
        """Queue a request and return its number. Raises RequestError, which begins with `name`, if it can never run."""
        return self._add(self._admissible(name, request))

    def rules(self, params: SamplingParams) -> LogitsRules:
        """Return the rules that requests with these parameters may share. Raises RequestError for unknown token ids."""
        vocab = self.card.vocab_size
        for name, ids in params.named_ids:
            if ids and not 0 <= min(ids) <= max(ids) < vocab:
                found = next(id for id in ids if not 0 <= id < vocab)
                raise RequestError(f"{name}: expected token ids from 0 to {vocab - 1}, found {found}")
        # With ignore_eos, only the stop tokens of the request itself end its text.
        eos = frozenset[int]() if params.ignore_eos else self._eos.union(params.end_token_ids)
        return LogitsRules(params, eos.union(params.stop_token_ids), vocab)

    @property
    def busy(self) -> bool:
        """Whether any request waits, runs or speaks."""
        return bool(self._requests) or self.speaking.busy

    def state(self) -> EngineState:
        scheduler = self.scheduler
        state = EngineState(
            self.card.context_length,
            self.worker.cache_tokens,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            preemptions=scheduler.preemptions,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            queried_tokens=scheduler.queried_tokens,
            hit_tokens=scheduler.hit_tokens,
        )
        for kind in scheduler.kinds:
            kind.report(state)
        self.drafting.report(state)
        self.speaking.report(state)
        return state

    def cancel(self, number: int, *, share: bool = True) -> None:
        """End request `number`: it gets no more tokens, and what it holds is free at once.

        share: whether later requests may use the pages that it has filled.
        """
        if number in self._requests:
            self.scheduler.remove(self._requests.pop(number), share=share)
            self.encoding.stop_if_unused()
        elif self._given_pages is not None:
            self._given_pages.give_back(number)
        self.speaking.cancel(number)

    def step(self) -> list[Event]:
        """Compute one step of the texts that run, and one of the speeches, and return the events of both.

        Before them, pieces of the encoding or the source that a prompt waits for are computed: few, if other sequences
        can go on.
        """
        return self._step_texts() + self._step_speeches()

    def _step_texts(self) -> list[Event]:
        ended = self._collect_grammar_masks()
        self.encoding.advance(self.scheduler.next_work(), alone=not self.scheduler.can_step)
        scheduled = self.scheduler.schedule()
        self.encoding.stop_if_unused()
        if not scheduled:  # all wait for the masks of their grammars, or for encodings
            return ended + self._give()
        scheduled = self.drafting.extend(scheduled)
        logits = self._lead(scheduled)
        self.scheduler.publish(scheduled)
        self._prompt_tokens += sum(
            len(chunk.token_ids) for sequence, chunk in scheduled if chunk.start < sequence.prompt_len
        )
        if self._pooler is not None:
            return ended + self._pool(self._pooler, scheduled, logits)
        for sequence, event in hidden_states(scheduled, self.worker.hidden_states, self.worker.layers):
            ended.append(event or self._fail(sequence))
        for sequence, scores in prompt_scores(scheduled, logits):
            ended.append(scores or self._fail(sequence))
        ended += self._sample(scheduled, logits)
        self.drafting.learn(scheduled)
        return ended + self._give()

    def _step_speeches(self) -> list[Event]:
        events: list[Event] = [*self.speaking.step()]
        for event in events:
            if isinstance(event, FailedEvent):
                self.cancel(event.request)
        return events

    def generate(
        self, requests: Iterable[Request], on_sound: Callable[[SoundEvent], None] | None = None
    ) -> Generator[TokenEvent]:
        """Run all requests together and yield their tokens as they come, numbered as in `requests`, with seconds since
        the call. on_sound: is called with the sound of those that speak, numbered in the same way.

        Raises RequestError for a request that cannot run, before any of them runs, or whose grammar fails.
        """
        began = time.monotonic()
        sequences = [self._admissible(f"request {index}", request) for index, request in enumerate(requests)]
        index_of = {self._add(sequence): index for index, sequence in enumerate(sequences)}
        try:
            while self.busy:
                for event in self.step():
                    if isinstance(event, FailedEvent):
                        raise RequestError(f"request {index_of[event.request]}: {event.sentence}")
                    if isinstance(event, TokenEvent):
                        yield msgspec.structs.replace(
                            event, request=index_of[event.request], time_s=event.time_s - began
                        )
                    if isinstance(event, SoundEvent) and on_sound is not None:
                        on_sound(msgspec.structs.replace(event, request=index_of[event.request]))
        finally:
            for number in index_of:
                self.cancel(number)

    def score(self, prompt: Prompt) -> Tensor:
        """Return fp32 logits [len(token_ids), vocab], those of every position. No request may run."""
        request = Request(prompt, SamplingParams(max_new_tokens=1))
        sequence = self._admissible("the text", request, new_tokens=0, all_logits=True)
        admitted = self.scheduler.admit(sequence)
        assert admitted, "another request runs"
        logits = torch.empty(len(sequence.tokens), self.card.vocab_size)
        try:
            while (work := self.scheduler.next_work()) is not None:
                self.encoding.advance(work, alone=True)
            while sequence.uncached:
                chunk = next_chunk(sequence, sequence.whole_rows(max(SCORE_ROWS, sequence.whole_tokens)))
                logits[chunk.start : sequence.cached] = self._lead([(sequence, chunk)])
            return logits
        finally:
            self.scheduler.remove(sequence)

    def counters(self) -> list[RankCounters]:
        """Return what the steps of every rank have taken so far. Costs a message and a small collective."""
        self.worker.announce(Count())
        return self.worker.gather_counters()

    def _add(self, sequence: Sequence) -> int:
        if sequence.params.grammar is not None:
            sequence.grammar_mask = self._grammar_masks.open(sequence.params.grammar)
        if self._given_pages is not None:
            sequence.cut(self.scheduler.continuable(sequence))
        self._requests[sequence.request] = sequence
        self.scheduler.add(sequence)
        if sequence.talker is not None:
            self.speaking.add_text(sequence)
        return sequence.request

    def _admissible(self, where: str, request: Request, new_tokens: int = 1, *, all_logits: bool = False) -> Sequence:
        """Return a sequence for the request. Raises RequestError if it can never run with at least `new_tokens`."""
        prompt, params, worker = request.prompt, request.params, self.worker
        limit = self.card.context_length
        try:
            check_task(params, self.card.pooling)
            check_layers(params, worker.layers)
            check_prompt(prompt, worker.input_ids, limit, worker.position_axes, worker.source_axes)
            nbytes = check_media(prompt, worker.encoder, worker.dtype.itemsize, crossing=worker.source_pages > 0)
            talker = None if params.speech is None else self.speaking.prompt(prompt, params, params.speech)
            rules = request.rules or self.rules(params)
        except RequestError as e:
            raise RequestError(f"{where}: {e}") from e
        length = len(prompt.token_ids)
        room = limit - length - max(prompt.shift, 0)
        if room < min(new_tokens, params.max_new_tokens):
            raise RequestError(
                f"{where}: the prompt has {length} tokens, but the context length is {limit}, "
                "which the prompt and at least one new token must fit in"
            )
        if params.max_new_tokens > max(room, 1):
            params = replace(params, max_new_tokens=max(room, 1))
        rules_of_text = TextRules(rules, prompt.token_ids)
        sequence = Sequence(
            self._next_request,
            params,
            prompt,
            rules_of_text,
            nbytes,
            talker,
            all_logits or bool(params.hidden_layers) or (self._pooler is not None and self._pooler.pooling.reads_all),
            self._whole_tokens,
            worker.whole_texts,
            request.slots,
        )
        if num_pages(sequence.max_cached) > worker.pages:
            raise RequestError(
                f"{where}: {length} prompt tokens and {params.max_new_tokens} new ones need a KV cache of "
                f"{sequence.max_cached} tokens, "
                f"found {worker.max_total_tokens}; raise the total tokens of the cache or ask for fewer new tokens"
            )
        try:
            for kind in self.scheduler.kinds:
                kind.check_fits(sequence)
        except RequestError as e:
            raise RequestError(f"{where}: {e}") from e
        self._next_request += 1
        return sequence

    def _pool(self, pooler: Pooler, scheduled: Scheduled, hidden: Tensor) -> list[Event]:
        """Return the vectors or scores of the texts that are complete.

        The pages of texts that become vectors are not kept: few texts repeat. The texts that are compared with one
        query begin alike.
        """
        events: list[Event] = []
        for (sequence, chunk), rows in zip(scheduled, rows_of(scheduled), strict=True):
            values = pooler.take(sequence, chunk, hidden[rows.start : rows.stop])
            if values is None:
                continue
            if not values.isfinite().all():
                events.append(self._fail(sequence))
                continue
            self.cancel(sequence.request, share=pooler.pooling.task == "rerank")
            events.append(PooledEvent(sequence.request, values.numpy().tobytes(), sequence.begin()))
        return events

    def _collect_grammar_masks(self) -> list[Event]:
        pending = [sequence for sequence in self._requests.values() if not sequence.ready]
        waiting = [s for s in pending if s.is_running and not self.scheduler.computable(s)]
        return self._collect(pending, [s for s in waiting if self.scheduler.work(s) is None])

    def _collect(self, pending: list[Sequence], urgent: list[Sequence]) -> list[Event]:
        """Collect the masks that are finished, those of `urgent` after a short wait, and end the sequences whose
        grammar is complete or has failed."""
        masks, urgent_masks = ([s.grammar_mask for s in some if s.grammar_mask] for some in (pending, urgent))
        collect_masks(masks, urgent_masks)
        events: list[Event] = []
        for sequence, mask in zip(pending, masks, strict=True):
            if (end := mask.end_of(sequence.request)) is not None:
                self.cancel(sequence.request)
                events.append(end)
        return events

    def _sample(self, scheduled: Scheduled, logits: Tensor) -> list[Event]:
        """Return the next tokens of every sequence whose tokens are all computed."""
        events: list[Event] = []
        draws: list[Draw] = []
        for (sequence, chunk), rows in zip(scheduled, rows_of(scheduled), strict=True):
            if not sequence.is_running or sequence.uncached:
                continue
            if sequence.params.max_new_tokens:
                draws.append(Draw(sequence, chunk, rows))
            elif self._given_pages is None:
                events.append(ScoredEvent(sequence.request, [], "length", sequence.begin()))
                self.cancel(sequence.request)
        while draws:
            chosen = choose_next(draws, logits, self.worker.argmax)
            now = time.monotonic()
            for draw, choices in zip(draws, chosen, strict=True):
                for choice in choices:
                    if draw.is_open:
                        events.append(self._take(draw, choice, now))
            draws = [draw for draw in draws if draw.is_open]
            late = [draw.sequence for draw in draws if not draw.sequence.ready]
            events += self._collect(late, late)
            draws = [draw for draw in draws if draw.sequence.is_running and draw.sequence.ready]
        return events

    def _take(self, draw: Draw, choice: SampledToken | None, now: float) -> TokenEvent | FailedEvent:
        """Append a token to a sequence, and end the sequence if it is the last one."""
        sequence = draw.sequence
        if choice is None:
            draw.is_open = False
            return self._fail(sequence)
        self._generated_tokens += 1
        was_drafted = draw.take(choice.token_id)
        if draw.chunk.drafts:
            self.scheduler.publish([(sequence, draw.chunk)])
        reason = sequence.finish_reason
        if reason is not None:
            draw.is_open = False
            self._finish(sequence)
        elif sequence.grammar_mask is not None:
            sequence.grammar_mask.advance(choice.token_id)
        rejected = 0 if draw.is_open else draw.chunk.drafts - draw.accepted
        return TokenEvent(
            sequence.request, choice.token_id, now, reason, choice.logprobs, sequence.begin(), was_drafted, rejected
        )

    def _give(self) -> list[Event]:
        """Prefill ranks: give the prompts of which nothing is left to compute, and end them."""
        if self._given_pages is None:
            return []
        events: list[Event] = []
        for sequence in self.scheduler.computed():
            events.append(PrefilledEvent(sequence.request, self._given_pages.give(sequence), sequence.begin()))
            self.cancel(sequence.request)
        return events

    def _finish(self, sequence: Sequence) -> None:
        """End a text that is complete. If it is spoken, its speech goes on."""
        if sequence.talker is None:
            self.cancel(sequence.request)
        else:
            self.scheduler.remove(self._requests.pop(sequence.request))
            self.speaking.end_text(sequence.request)

    def _fail(self, sequence: Sequence) -> FailedEvent:
        """End a sequence whose logits are NaN or infinite. Its pages, which may hold such values, are not shared."""
        self.cancel(sequence.request, share=False)
        return FailedEvent(sequence.request, sequence.overflow)

    def _lead(self, scheduled: Scheduled) -> Tensor:
        """Announce a step and compute it. Returns its logits."""
        step = Step([chunk for _, chunk in scheduled], list(self.scheduler.finished))
        self.scheduler.finished.clear()
        for kind in self.scheduler.kinds:
            kind.announce(step, scheduled)
        step.kept.extend(self.speaking.kept(scheduled))
        step.hidden_layers.extend(asked_layers(scheduled, self.worker.layers))
        self.worker.announce(step)
        return self.worker.run(step)
