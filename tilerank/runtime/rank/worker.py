"""The worker of a rank: it loads its shard of the model and computes the steps that rank 0 announces.

A step is one forward pass over chunks of several sequences. All ranks run the same model code on their own shards.
"""

import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from tilerank.kernels import ops
from tilerank.kernels.graph import Profile
from tilerank.kernels.kv_pages import PAGE_TOKENS
from tilerank.loader.calibration import Calibration
from tilerank.loader.checkpoint import Checkpoint
from tilerank.loader.packed_weights import NO_FILES, WeightFiles
from tilerank.loader.weight_formats import weight_formats
from tilerank.loader.weights import LoadReport, load_weights
from tilerank.parallel.input_squares import InputSquares
from tilerank.parallel.join import Team
from tilerank.parallel.sharding import Sharding

from ..protocol import rank_messages
from ..protocol.sizes import MAX_RUNNING, PREFILL_CHUNK, num_states, num_window_tokens
from ..protocol.speculative import loads_head, state_drafts
from ..protocol.speech_messages import SpeechStep
from ..step.batch import BatchFiller, BatchLimits, RankSequence
from ..step.bytes_per_step import bytes_per_step
from ..step.cache import (
    EncoderKV,
    allocate,
    bytes_per_source_page,
    bytes_per_state,
    bytes_per_token,
    bytes_per_window_token,
    copy_states,
    expected_tokens,
    has_states,
    num_pages,
    window_of,
)
from ..step.draft_rows import separate_drafts
from ..step.model import Encoder
from ..step.rank_encodings import RankEncodings
from ..step.step_graphs import recorded_steps
from .counters import RankCounters, StepCounter
from .draft_model import DraftModel
from .draft_rank import DraftRank
from .drafter import Drafter, HeadDrafter
from .page_store import PageStore, open_page_files
from .rank_config import RankConfig, notes_of, with_context_length
from .registry import build_model, read_supported_card
from .source_pages import source_pages
from .speech_rank import SpeechOutputs, SpeechRank
from .transfer_memory import transfer_memory
from .whole_pages import check_generates

log = logging.getLogger(__name__)


class Worker:
    """One rank of `team`, with its shard of the model in `model_dir`. The constructor loads the weights, or takes them
    from `weight_files` if another process has packed them.

    Raises ConfigError, CheckpointError, ShardError, and EngineError for a context length that the model cannot have.
    """

    def __init__(self, model_dir: Path, team: Team, config: RankConfig, weight_files: WeightFiles = NO_FILES) -> None:
        self.model_dir = model_dir
        self.team = team
        self.dtype = config.dtype
        card = replace(read_supported_card(model_dir, config.family_options), draft_head=loads_head(config.speculative))
        self.card = with_context_length(card, config.context_length)
        self.max_total_tokens = config.max_total_tokens or expected_tokens(self.card.context_length)
        self.pages = num_pages(self.max_total_tokens)
        """Pages of the cache that sequences may have."""
        group = team.group
        formats = weight_formats(self.card.quantization, config.dtype, config.quantization, config.activation_bits)
        # The rule of "auto" counts collectives in shared memory.
        kv_split = "off" if config.kv_split == "auto" and len(team.hosts) > 1 else config.kv_split
        sharding = Sharding(
            group.rank,
            group.size,
            config.dtype,
            group,
            config.strategy,
            config.cached_tokens or self.max_total_tokens,
            formats,
            config.kv_dtype,
            kv_split,
            state_drafts(config.speculative),
        )
        self._model = build_model(self.card, sharding)
        if self._model.whole_texts and self.card.context_length > PREFILL_CHUNK:
            self.card = replace(self.card, context_length=PREFILL_CHUNK)
        for note in notes_of(self.card, config, quantised=formats is not None) if group.rank == 0 else ():
            log.info(note)
        specs = self._model.cache_specs()
        if config.transfer is not None:
            check_generates("--prefill-nodes", model_dir, self.card)
        files = open_page_files(model_dir, self.card, config, sharding, specs)
        path = None if config.quantization is None else config.quantization.calibration
        self.load_report: LoadReport = load_weights(
            self._model,
            Checkpoint(model_dir),
            ignore=self._model.ignore,
            progress=group.rank == 0,
            quantization=self.card.quantization,
            calibration=None if path is None else Calibration(path),
            files=weight_files,
        )
        self.states = (config.states or num_states(self.max_total_tokens)) if has_states(specs) else 0
        """Slots for states of sequences; 0 for models without states."""
        self.source_pages = source_pages(self._model, group, config.source_bytes)
        """Pages for keys and values of encodings; 0 for models without cross-attention."""
        self.window = min(window_of(specs), self.card.context_length)
        """The window of the layers that have one; 0 if none has."""
        self.window_pages = num_pages(num_window_tokens(self.max_total_tokens, self.window))
        """Pages of layers with a window that sequences may have."""
        # The page after the last is the spare one of padding rows.
        self._caches = caches = allocate(
            specs,
            (self.pages + 1) * PAGE_TOKENS,
            self.states,
            self.source_pages * PAGE_TOKENS,
            (self.window_pages + 1) * PAGE_TOKENS,
        )
        self.store = None if files is None else PageStore(files, self._caches, group)
        """Keeps pages of the cache in files; None if the configuration has no directory for them."""
        self.step_bytes = bytes_per_step(self._model)
        """What a step reads on this rank."""
        longest = num_pages(min(self.max_total_tokens, self.card.context_length))
        spare_window_page = self.window_pages if self.window else None
        limits = BatchLimits(MAX_RUNNING, longest, self.pages, self.source_pages, spare_window_page)
        self._filler = BatchFiller(self._model.batch_content(), limits)
        self._graphs = None if config.eager else recorded_steps(group)
        self._counter = StepCounter(self.step_bytes)
        self._held: dict[int, RankSequence] = {}
        self.hidden_states: Mapping[int, Tensor] = {}
        """The hidden states of the last step (HiddenRows.states), valid as long as its logits."""
        self._encodings = RankEncodings(self._model.encoder)
        drafter: Drafter | None = None
        if self._model.draft_head is not None:
            drafter = HeadDrafter(self._model, self._caches, MAX_RUNNING)
        self.draft_model: DraftModel | None = None
        """Drafts for this model; None if no other model does."""
        if config.draft_model is not None:
            tokens = (self.pages + 1) * PAGE_TOKENS
            self.draft_model = DraftModel(config.draft_model, self.card.context_length, sharding, config, tokens)
            drafter = self.draft_model
            specs, caches = [*specs, *self.draft_model.specs], [*caches, *self.draft_model.caches]
        slots = [self.pages, self.window_pages, self.states, self.source_pages]
        self.transfers = transfer_memory(config.transfer, specs, caches, group, slots)
        """Through which pages go from prefill ranks to decode ranks; None if the same ranks do both."""
        self.drafts: DraftRank | None = None
        if drafter is not None:
            self.drafts = DraftRank(drafter, limits, recorded_steps(group) if self._graphs else None)
        self.speech: SpeechRank | None = None
        """Computes speech; None if the model does not speak."""
        if self._model.speaker is not None:
            graphs = recorded_steps(group) if self._graphs else None
            self.speech = SpeechRank(
                self._model.speaker,
                config.dtype,
                group,
                tokens=config.talker_tokens,
                max_frames=MAX_RUNNING,
                graphs=graphs,
            )

    @property
    def weight_bytes(self) -> int:
        """Bytes of this rank's weights."""
        return self._model.nbytes() + (self.draft_model.weight_bytes if self.draft_model else 0)

    @property
    def parameters(self) -> int:
        """Weights of the whole model."""
        return self._model.parameters()

    @property
    def position_axes(self) -> int:
        """The number of axes of a token's position."""
        return self._model.position_axes

    @property
    def source_axes(self) -> int:
        """The number of axes of the position of a source token; 0 if cross-attention does not rotate keys."""
        return self._model.position_axes if self._model.rotates_source else 0

    def source_operations(self, encoding: int) -> float:
        """Return the operations that compute the keys and values of a token of this encoding, on all ranks together if
        none has more heads than this one."""
        specs = self._model.cache_specs()
        columns = 2 * sum(spec.kv_heads * spec.head_dim for spec in specs if isinstance(spec, EncoderKV))
        return 2.0 * self._encodings.tensors[encoding].shape[-1] * columns * self.team.group.size

    @property
    def whole_texts(self) -> bool:
        """Whether all tokens of a text attend to each other, so that one step computes them, at most PREFILL_CHUNK."""
        return self._model.whole_texts

    @property
    def layers(self) -> int:
        """The number of layers of the decoder."""
        return len(self._model.cache_specs()) - (self._model.draft_head is not None)

    @property
    def head_module(self) -> str:
        """As in Model."""
        return self._model.head_module

    @property
    def input_ids(self) -> int:
        """The number of ids that prompts may have."""
        return self.card.vocab_size + self._model.spare_ids

    @property
    def encoder(self) -> Encoder | None:
        """The encoder of media; None if the model takes text alone."""
        return self._model.encoder

    @property
    def cache_tokens(self) -> int:
        return self.pages * PAGE_TOKENS

    @property
    def cache_bytes(self) -> int:
        """Bytes of this rank's cache with every page and every slot in use."""
        specs = self._model.cache_specs()
        sources = bytes_per_source_page(specs) * self.source_pages
        speech = self.speech.cache_bytes if self.speech else 0
        drafts = self.draft_model.cache_bytes if self.draft_model else 0
        windows = bytes_per_window_token(specs) * self.window_pages * PAGE_TOKENS
        states = bytes_per_state(specs) * self.states
        return bytes_per_token(specs) * self.cache_tokens + windows + states + sources + speech + drafts

    def follow(self) -> None:
        """Ranks above 0: compute the announced steps until rank 0 stops. Raises GroupError if a rank is lost."""
        while not isinstance(message := rank_messages.decode(self.team.channel.receive()), rank_messages.Stop):
            match message:
                case rank_messages.Step():
                    self.run(message)
                case rank_messages.Draft():
                    self.draft(message)
                case SpeechStep():
                    self.speak(message)
                case rank_messages.EncodePiece():
                    self.encode_piece()
                case rank_messages.Encode() | rank_messages.Frames() | rank_messages.StopEncode():
                    self.prepare_encode(message)
                case rank_messages.StoreSource():
                    self.store_source(message)
                case rank_messages.KeepPages() | rank_messages.LoadPages():
                    assert self.store is not None
                    self.store.follow(message)
                case rank_messages.GivePages() | rank_messages.TakePages():
                    assert self.transfers is not None
                    self.transfers.follow(message)
                case rank_messages.Count():
                    self.gather_counters()
        self._end()

    def announce(self, message: rank_messages.Message) -> None:
        """Rank 0: send a message to the ranks that follow."""
        self.team.channel.send(rank_messages.encode(message))

    def stop(self) -> None:
        """Rank 0: end `follow` on the other ranks. Returns when all have received the message: a rank that left before
        would look lost to those that still wait for it."""
        self.announce(rank_messages.Stop())
        self._end()

    def run(self, step: rank_messages.Step) -> Tensor:
        """Compute a step. Returns what Model.forward returns of the m tokens whose logits it asks for, valid until the
        next call. All ranks call this with the same step."""
        for number in step.finished:
            self._held.pop(number, None)
        self._encodings.forget(step.forgotten)
        for chunk in step.chunks:
            held = self._held.setdefault(chunk.sequence, RankSequence(state_tokens=chunk.start))
            held.pages.extend(chunk.new_pages)
            if self.store is not None:
                end = chunk.start + len(chunk.token_ids)
                self.store.forget(held.pages[chunk.start // PAGE_TOKENS : num_pages(end)])
        for number, index, pages in step.window_pages:
            self._held[number].add_window_pages(index, pages)
        for seen in step.sources:
            if seen.pages:
                self._held[seen.sequence].source.pages = seen.pages
        group = self.team.group
        began, waited = time.perf_counter(), group.waited_s
        copy_states(self._caches, step.state_copies)
        if self.drafts is not None:
            self.drafts.begin(step)
        logits = self._forward(separate_drafts(step))
        for chunk in step.chunks:
            self._held[chunk.sequence].state_tokens = chunk.start + len(chunk.token_ids) - chunk.drafts
        for seen in step.sources:
            self._held[seen.sequence].source.visible = seen.rows[-1][1:]
        self._counter.count(step, time.perf_counter() - began, group.waited_s - waited)
        return logits

    def draft(self, message: rank_messages.Draft) -> list[list[int]]:
        """Return the tokens that each chunk drafts: as many as the message says, or less where the pages of its
        sequence end. All ranks call this with the same message."""
        assert self.drafts is not None
        return self.drafts.run(message, self._held)

    def speak(self, step: SpeechStep) -> SpeechOutputs:
        """Compute a step of speech. All ranks call this with the same step."""
        assert self.speech is not None
        return self.speech.run(step)

    def store_source(self, source: rank_messages.StoreSource) -> None:
        """Store keys and values of encodings. All ranks call this with the same message."""
        began = time.perf_counter()
        tensors = self._encodings.tensors
        rows = torch.cat([tensors[part.medium][0, part.first : part.first + part.count] for part in source.parts])
        pages = torch.tensor(source.pages)
        slots = (pages[:, None] * PAGE_TOKENS + torch.arange(PAGE_TOKENS)).flatten()[: len(rows)]
        positions = torch.tensor(source.positions) if source.positions else None
        self._model.store_source(rows, positions, slots, self._caches)
        self._counter.count_encode(time.perf_counter() - began)

    def prepare_encode(self, message: rank_messages.Encode | rank_messages.Frames | rank_messages.StopEncode) -> None:
        """Start an encode, add frames to it, or drop it. All ranks call this with the same message."""
        match message:
            case rank_messages.Encode():
                self._encodings.start(message)
            case rank_messages.Frames(frames):
                self._encodings.add_frames(frames)
            case rank_messages.StopEncode():
                self._encodings.stop()

    def encode_piece(self) -> bool:
        """Compute a piece of the encode that was started. Returns whether the encoding is complete. All ranks call
        this."""
        began = time.perf_counter()
        complete = self._encodings.advance()
        self._counter.count_encode(time.perf_counter() - began)
        return complete

    def observe_inputs(self) -> InputSquares:
        """Sum the squares of what projections are multiplied with from now on. The worker must be eager."""
        return InputSquares(self._model)

    def argmax(self, logits: Tensor) -> Tensor:
        """ops.argmax of the logits of the last step."""
        return ops.argmax(logits) if self._graphs is None else self._graphs.argmax(logits)

    def gather_counters(self) -> list[RankCounters]:
        """Return what the steps of every rank have taken so far. A collective: all ranks call this."""
        mine = msgspec.structs.astuple(self._counter.counters)
        rows = self.team.group.all_gather(torch.tensor(mine, dtype=torch.float64))
        return [RankCounters(*row) for row in rows.tolist()]

    def start_profiling(self) -> None:
        """Measure the kernels of recorded decode steps from now on, for `profile`."""
        if self._graphs is not None:
            self._graphs.start_profiling()

    def profile(self) -> Profile | None:
        """Return the time of every kernel of the last step; None if that was not a measured decode step."""
        return self._graphs.profile() if self._graphs is not None else None

    def _end(self) -> None:
        self.team.group.barrier()
        if self.store is not None:
            self.store.close()

    def _forward(self, step: rank_messages.Step) -> Tensor:
        model, caches = self._model, self._caches
        if self._graphs is not None and self._filler.is_decode(step):
            batch = self._filler.padded(step, self._held)
            return self._graphs.replay(lambda: model.forward(batch, caches), len(batch.token_ids), len(step.chunks))
        batch = self._filler.fresh(step, self._held, self._encodings.tensors)
        if self._graphs is None:
            logits = model.forward(batch, caches)
        else:
            logits = self._graphs.run_once(lambda: model.forward(batch, caches))
        self.hidden_states = batch.hidden.states if batch.hidden else {}
        if batch.kept is not None:
            assert self.speech is not None and batch.kept.hidden is not None
            self.speech.keep(step, batch.kept.hidden)
        return logits
