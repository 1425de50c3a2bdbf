"""The header of a message of harmony: to whom it goes and in which channel.

Models leave parts of it out, double or misplace them. It is read as a list of words, of which the known ones count
wherever they are.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum

from tilerank.loader.harmony.marks import ANALYSIS, CHANNELS, FUNCTIONS

LONGEST = 256
"""Characters of a header; a longer text is none."""
_TO = "to="
_RECIPIENT = re.compile(rf"\b{_TO}\s*(\S*)")
_WORDS = frozenset(("assistant", *CHANNELS, "json", "code"))
_OTHERS = frozenset(("user", "system", "developer", "tool"))
"""Roles whose messages are not the assistant's."""


class Kind(Enum):
    """What becomes of the content of a message."""

    REASONING = "it is the reasoning"
    ANSWER = "it is text of the answer"
    CALL = "it is the arguments of a call"
    HIDDEN = "it is not the assistant's, and is left out"


@dataclass(frozen=True)
class Header:
    """kind: of the message. tool: that is called."""

    kind: Kind
    tool: str = ""


def read_header(text: str, tools: Collection[str]) -> Header:
    """Return what a header says, whose marks are spaces in `text`. tools: the names of those that may be called.

    A message to another recipient than a tool goes where its channel says, and one without a channel is the answer.
    """
    recipient = found[1] if (found := _RECIPIENT.search(text)) is not None else ""
    words = _RECIPIENT.sub(" ", text).split()
    for name in (recipient, recipient.removeprefix(FUNCTIONS)):
        if name in tools:
            return Header(Kind.CALL, name)
    if recipient == "assistant" or (words and words[0] in _OTHERS):
        return Header(Kind.HIDDEN)
    channel = next((word for word in words if word in CHANNELS), None)
    return Header(Kind.REASONING if channel == ANALYSIS else Kind.ANSWER)


def may_be_header(text: str) -> bool:
    """May a text without marks become a header, if more text follows?"""
    *words, last = re.split(r"\s+", text)
    return all(not word or word in _WORDS or word.startswith(_TO) for word in words) and (
        last.startswith(_TO) or any(word.startswith(last) for word in (*_WORDS, _TO))
    )
