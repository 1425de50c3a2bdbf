"""The speech of one request: how far it is, and what its next frame reads."""

from dataclasses import dataclass, field

from ..protocol.params import SamplingParams
from ..protocol.speech_settings import SpeechSettings
from .pages import PageTable
from .sequence import Sequence
from .talker_prompt import TalkerPrompt


@dataclass(eq=False)
class Speech:
    """The speech of a request, which begins once the first token of its text is there.

    sequence: the text, whose tokens grow. params: how first codes are chosen. most_frames: its limit. number: names it
    in messages; that of its text sequence at first, and another whenever it was preempted. None before the text runs.
    text_ended: whether no token follows. codes: the first codes chosen so far; a frame follows each but the last one.
    total: how many frames it has, once that is known. table: pages of the talker's cache; none while it waits, and
    after its last frame. sent: how many samples the client has.

    Of what was computed under its number: pages_sent, pages that the other ranks have received; read, rows of the
    prompt; frames; voiced, frames whose sound is computed; made, samples.
    """

    sequence: Sequence
    prompt: TalkerPrompt
    settings: SpeechSettings
    params: SamplingParams
    most_frames: int
    number: int | None = None
    text_ended: bool = False
    codes: list[int] = field(default_factory=list)
    total: int | None = None
    table: PageTable = field(default_factory=PageTable)
    sent: int = 0
    pages_sent: int = 0
    read: int = 0
    frames: int = 0
    voiced: int = 0
    made: int = 0

    @property
    def request(self) -> int:
        return self.sequence.request

    @property
    def named(self) -> int:
        """Its number, once its text runs."""
        assert self.number is not None
        return self.number

    @property
    def is_running(self) -> bool:
        return bool(self.table.numbers)

    @property
    def can_begin(self) -> bool:
        """Whether the last row of its prompt is known, and it is to be read."""
        is_there = len(self.sequence.tokens) > self.sequence.prompt_len
        return is_there and self._spoken > 0 and self.total is None and not self.is_running

    @property
    def next_text(self) -> int | None:
        """The token of the text model that its next frame reads; None if it has not been generated yet."""
        return self.text(self.frames + 1)

    @property
    def complete(self) -> bool:
        """Whether all of its sound has been computed, or it has nothing to say."""
        return self.voiced == self.total or (self.text_ended and self._spoken <= 0)

    def text(self, index: int) -> int | None:
        """Return the token at `index` of what is spoken, its end and what follows that included."""
        if index < self._spoken:
            return self.sequence.tokens[self.prompt.text_start + index]
        if not self.text_ended:
            return None
        return self.settings.text_end if index == self._spoken else self.settings.text_pad

    def next_pages(self) -> list[int]:
        """Return the pages of its table that the other ranks have not received."""
        new, self.pages_sent = self.table.numbers[self.pages_sent :], len(self.table)
        return new

    def restart(self, number: int) -> None:
        """Compute it again under a new number, without pages."""
        self.number = number
        self.pages_sent = self.read = self.frames = self.voiced = self.made = 0

    @property
    def _spoken(self) -> int:
        """How many tokens are spoken, of those that are there. The last one of a text is not."""
        return len(self.sequence.tokens) - self.text_ended - self.prompt.text_start
