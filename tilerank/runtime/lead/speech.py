"""The speech of one request: how far it is, and what its next frame reads."""

from dataclasses import dataclass, field

from ..protocol.params import SamplingParams
from ..protocol.speech_settings import SpeechSettings
from .logits_rules import TextRules
from .sequence import Sequence
from .talker_prompt import TalkerPrompt


@dataclass(eq=False)
class Speech:
    """The speech of a request, which begins once the first token of its text is there.

    text: its sequence, whose tokens grow.
    params: how first codes are chosen.
    rules: how their logits are changed.
    most_frames: its limit.
    number: names it in messages; that of its text sequence at first, and another whenever it was preempted. None before
        the text runs.
    text_ended: whether no token follows.
    codes: the first codes chosen so far; a frame follows each but the last one.
    total: how many frames it has, once that is known; it has no pages any more.
    sent: how many samples the client has.

    What was computed under its number:
    cached: rows of the prompt and frames whose keys and values the talker's cache has.
    frames: frames.
    decoded: frames whose samples are computed.
    samples: samples.
    """

    text: Sequence
    prompt: TalkerPrompt
    settings: SpeechSettings
    params: SamplingParams
    rules: TextRules
    most_frames: int
    number: int | None = None
    text_ended: bool = False
    codes: list[int] = field(default_factory=list)
    total: int | None = None
    sent: int = 0
    cached: int = 0
    frames: int = 0
    decoded: int = 0
    samples: int = 0

    @property
    def request(self) -> int:
        return self.text.request

    @property
    def length(self) -> int:
        """Rows of its prompt, for which it has pages from the beginning."""
        return self.prompt.rows

    @property
    def keys(self) -> list[int]:
        """None: speeches share no pages."""
        return []

    reusable_keys = keys

    @property
    def number_on_ranks(self) -> int:
        """Its number, once its text runs."""
        assert self.number is not None
        return self.number

    @property
    def can_begin(self) -> bool:
        """Whether the last row of its prompt is known, so that the talker can read it."""
        return len(self.text.tokens) > self.text.prompt_len and self._spoken > 0

    @property
    def next_text(self) -> int | None:
        """The token of the text model that its next frame reads; None if it has not been generated yet."""
        return self.text_token(self.frames + 1)

    @property
    def complete(self) -> bool:
        """Whether all of its sound has been computed, or there is none."""
        return self.decoded == self.total or (self.text_ended and self._spoken <= 0)

    def text_token(self, index: int) -> int | None:
        """Return the token at `index` of what is spoken, its end and what follows that included."""
        if index < self._spoken:
            return self.text.tokens[self.prompt.text_start + index]
        if not self.text_ended:
            return None
        return self.settings.text_end if index == self._spoken else self.settings.text_pad

    def restart(self, number: int) -> None:
        """Compute it again under a new number."""
        self.number = number
        self.frames = self.decoded = self.samples = 0

    @property
    def _spoken(self) -> int:
        """The number of tokens so far that are spoken: all but the last one of a text."""
        return len(self.text.tokens) - self.text_ended - self.prompt.text_start
