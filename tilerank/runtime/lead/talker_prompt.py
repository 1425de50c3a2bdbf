"""The prompt of a talker: the turns of the user, and the beginning of the answer.

As transformers' `generate` of Qwen3-Omni builds it: system turns and earlier answers are left out, and the positions of
the others close up.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from ..protocol.errors import RequestError
from ..protocol.prompt import Prompt
from ..protocol.speech_settings import SpeechSettings

_HEADER = 3
"""Tokens that open the turn of the assistant: its start, its role, and a line break."""


@dataclass(frozen=True)
class TalkerPrompt:
    """The rows of a talker's prompt, whose last one lacks its token: the first of the text that is spoken.

    tokens, indices, codes: of each row, as in TalkerChunk. positions: three axes. text_start: the index of the first
    spoken token in the sequence of the text model.
    """

    tokens: list[int]
    indices: list[int]
    codes: list[int]
    positions: list[list[int]]
    text_start: int

    @property
    def rows(self) -> int:
        return len(self.codes)

    @property
    def shift(self) -> int:
        """The difference between the position of a row after the prompt and its index."""
        return self.positions[0][-1] + 1 - self.rows


def talker_prompt(prompt: Prompt, settings: SpeechSettings, voice: int) -> TalkerPrompt:
    """Return the rows for the prompt of a text model. voice: its code. Raises RequestError for a prompt that is no
    chat whose last turn is that of the assistant."""
    ids = prompt.token_ids
    starts = [i for i, token in enumerate(ids[:-1]) if token == settings.start]
    if not starts or ids[starts[-1] + 1] != settings.assistant or len(ids) < starts[-1] + _HEADER:
        raise RequestError("speech: expected a chat whose last turn is that of the assistant, found another prompt")
    answer = starts[-1]
    turns = [range(first, end) for first, end in pairwise(starts) if ids[first + 1] == settings.user]
    rows = [i for turn in turns for i in turn]
    media = {run.start + i for run in prompt.placeholder_ranges for i in range(run.count)}
    pad = settings.text_pad
    added = [*settings.thinking, voice, settings.pad, settings.begin]
    return TalkerPrompt(
        tokens=[*(ids[i] for i in rows), *ids[answer : answer + _HEADER], pad, pad, pad, pad, settings.text_begin],
        indices=[i if i in media else -1 for i in rows] + [-1] * (_HEADER + len(added)),
        codes=[-1] * (len(rows) + _HEADER) + added,
        positions=[
            list(_closed_up(axis, turns, _HEADER + len(added)))
            for axis in prompt.positions or [list(range(len(ids)))] * 3
        ],
        text_start=answer + _HEADER,
    )


def _closed_up(axis: list[int], turns: list[range], following: int) -> Iterator[int]:
    """Yield the positions of the turns on an axis, each of which continues the one before it, and those of `following`
    rows after them. Every turn begins with a token of text, whose positions are the same on all axes."""
    begin = 0
    for turn in turns:
        yield from (axis[i] - axis[turn.start] + begin for i in turn)
        begin += axis[turn.stop] - axis[turn.start]
    yield from range(begin, begin + following)
