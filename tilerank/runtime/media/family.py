"""The record of a family without torch, in the table FAMILIES of its file: processor, options, tool calls."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tilerank.loader.card import ModelCard
from tilerank.loader.tokenizer import Tokenizer

from .processor import Processor

FamilyOptions = Mapping[str, str]
"""The values of the family options that are given, by the name of the option."""
NO_OPTIONS: FamilyOptions = {}


@dataclass(frozen=True)
class FamilyOption:
    """An option of the command line that one family has, such as --no-talker.

    apply: returns the card of the same model with a value of the option. Raises ConfigError for a model that does not
    have the option. choices: its values; a switch has none, and the value "on".
    """

    name: str
    help: str
    apply: Callable[[ModelCard, str], ModelCard]
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class PairTemplate:
    """The text in which a reranker reads a query and a document: before, body, after.

    body: has places for instruction, query and document, and is cut at its end if it is too long. Marks of the
    vocabulary become special tokens in `before` and `after` alone. instruction: used where a request has none.
    """

    before: str
    body: str
    after: str
    instruction: str


@dataclass(frozen=True)
class Family:
    """The properties of a family that launching and serving need. The defaults hold for a family without a record.

    processor: returns that of a model directory, or None if the model takes text only. tool_calls: the name of their
    format where the chat template does not show it (server/chat/tools/formats.py); None if it always does. pairs: what
    its rerankers read; None if it has none.
    """

    processor: Callable[[Path, Tokenizer], Processor | None] | None = None
    tool_calls: str | None = None
    options: tuple[FamilyOption, ...] = ()
    pairs: PairTemplate | None = None
