"""Turns what the engine reports of a choice into deltas: text, reasoning, tool calls and sound."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from ...protocol.events import HiddenEvent, PooledEvent, PrefilledEvent, SoundEvent, TokenEvent
from ...protocol.params import Logprobs, Start
from ..link.connection import Progress
from .answer_format import AnswerReader, Part
from .request import Sampling
from .tools.calls import Piece

BYTES_OF_FRAME = 1920 * 2
"""Bytes of a frame of speech: 80 ms of 16-bit samples, which usage counts as one token."""


@dataclass
class Usage:
    """The tokens of a request so far. cached_tokens: of its prompts; None if the engine does not report them.
    accepted_tokens: of the text, which were drafted. rejected_tokens: drafts that were wrong."""

    prompt_tokens: int
    cached_tokens: int | None = None
    text_tokens: int = 0
    reasoning_tokens: int = 0
    accepted_tokens: int = 0
    rejected_tokens: int = 0
    sound_bytes: dict[int, int] = field(default_factory=dict)  # of the speech of each choice

    @property
    def audio_tokens(self) -> int:
        return sum(-(-nbytes // BYTES_OF_FRAME) for nbytes in self.sound_bytes.values())

    @property
    def completion_tokens(self) -> int:
        return self.text_tokens + self.audio_tokens

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True)
class Opening:
    """The beginning of a choice.

    start: None from an engine that does not report it. prompt_ids: empty unless the request needs them.
    prompt_logprobs: None unless the request wants them; the first token of a prompt has none.
    """

    start: Start | None
    prompt_ids: Sequence[int] = ()
    prompt_logprobs: Sequence[Logprobs | None] | None = None


@dataclass(frozen=True)
class Delta:
    """New text, tool calls or sound of choice `index`.

    pieces: text of the answer and tool calls. tokens: those that make up the text. finish_reason: of the last delta.
    reasoning: new text of the reasoning, which comes before the answer. ids: of the new tokens, with one that ends the
    text and is not among `tokens`. opening: of the first delta. Text and tokens begin with the prompt if the request
    wants its echo. sound: new samples of the speech, as in SoundEvent, with which a choice that speaks ends.
    stop_string: the one that ends the text.
    """

    index: int
    pieces: tuple[Piece, ...]
    tokens: tuple[TokenEvent, ...]
    finish_reason: str | None
    reasoning: str = ""
    ids: tuple[int, ...] = ()
    opening: Opening | None = None
    sound: bytes = b""
    stop_string: str | None = None

    @property
    def text(self) -> str:
        return "".join(piece for piece in self.pieces if isinstance(piece, str))

    @property
    def shows(self) -> bool:
        """Has it anything for the client beside tokens?"""
        return bool(self.opening or self.pieces or self.reasoning or self.sound or self.finish_reason)


class ChoiceDeltas:
    """The deltas of choice `index` of a request.

    reader: of its tokens. prompt_ids: of its prompt, empty unless the request needs them. echo: text with which the
    answer begins. usage: of the request.
    """

    def __init__(
        self,
        index: int,
        body: Sampling,
        reader: AnswerReader,
        prompt_ids: Sequence[int],
        echo: str,
        usage: Usage,
    ) -> None:
        self._index = index
        self._body = body
        self._prompt_ids = prompt_ids
        self._echo = echo
        self._reader = reader
        self._usage = usage
        self._text_end: str | None = None  # the finish_reason of a text that is still being spoken
        self._pending: list[TokenEvent] = []  # tokens whose text is still held back
        self._ids: list[int] = []
        self._is_open = False
        self._start: Start | None = None
        self._scores: list[Logprobs] = []

    async def read(self, stream: AsyncGenerator[Progress]) -> AsyncGenerator[Delta]:
        """Yield the deltas of what the engine reports, up to one with a finish_reason."""
        async with aclosing(stream) as events:
            async for event in events:
                if (delta := self._take(event)) is not None:
                    yield self._opened(delta)
                    if delta.finish_reason is not None:
                        return
        # Tokens end without a finish_reason if the grammar allows no further token.
        yield self._opened(self._delta(self._reader.flush(cut=False), "stop"))

    def _take(self, event: Progress) -> Delta | None:
        """Return the delta of an event, if there is anything that no later event can change."""
        if isinstance(event, SoundEvent):
            self._usage.sound_bytes[self._index] = self._usage.sound_bytes.get(self._index, 0) + len(event.samples)
            return Delta(self._index, (), (), self._text_end if event.last else None, sound=event.samples)
        assert not isinstance(event, PooledEvent | HiddenEvent | PrefilledEvent), event
        self._start = self._start or event.start
        if isinstance(event, TokenEvent):
            return self._take_token(event)
        self._scores += event.logprobs
        return None if event.finish_reason is None else Delta(self._index, (), (), event.finish_reason)

    def _take_token(self, event: TokenEvent) -> Delta | None:
        body, reason, reader, part = self._body, event.finish_reason, self._reader, Part()
        self._usage.text_tokens += 1
        self._usage.accepted_tokens += event.accepted
        self._usage.rejected_tokens += event.rejected
        self._ids.append(event.token_id)
        if reason != "stop" or body.echoes:  # clients that want an echo count the tokens
            self._pending.append(event)
        if reason != "stop" or body.keeps_stop:
            before = reader.reasoning_tokens
            part = reader.push(event.token_id)
            self._usage.reasoning_tokens += reader.reasoning_tokens - before
        if reader.stops.stopped:
            reason = "stop"
        if reason is not None:
            part += reader.flush(cut=reason == "length")
        if reader.stops.stopped:  # the rest had a stop string
            reason = "stop"
        if not part and reason is None:
            return None
        if body.speech is not None:
            self._text_end, reason = reason, None
        return self._delta(part, reason)

    def _delta(self, part: Part, reason: str | None) -> Delta:
        tokens, self._pending = tuple(self._pending), []
        ids, self._ids = tuple(self._ids), []
        reasoning = part.reasoning if self._body.shows_reasoning else ""
        stop_string = self._reader.stops.stop_string
        return Delta(self._index, part.pieces, tokens, reason, reasoning, ids, stop_string=stop_string)

    def _opened(self, delta: Delta) -> Delta:
        """Return a delta, the first one with its opening and with the echo of the prompt if it is wanted."""
        if self._is_open:
            return delta
        self._is_open = True
        if self._start is not None and self._index % self._body.n == 0:
            self._usage.cached_tokens = (self._usage.cached_tokens or 0) + self._start.cached_tokens
        logprobs = [None, *self._scores] if self._scores else [None] * len(self._prompt_ids)
        if self._body.echoes:
            echoed = (
                TokenEvent(0, id, 0.0, logprobs=of_id) for id, of_id in zip(self._prompt_ids, logprobs, strict=True)
            )
            delta = replace(delta, pieces=(self._echo + delta.text,), tokens=(*echoed, *delta.tokens))
        shown = logprobs if self._body.shows_scores else None
        return replace(delta, opening=Opening(self._start, self._prompt_ids, shown))
