"""How a model writes its answers: what every such format provides. formats.py chooses that of a model."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tilerank.loader.chat.template import ReasoningStart
from tilerank.loader.tokenizer import Tokenizer

from .references import Schema
from .request import Sampling
from .text import StopStrings
from .tool_fields import Tool
from .tools.calls import Piece
from .tools.format import ToolFormat


@dataclass(frozen=True)
class Part:
    """New reasoning of an answer, and new pieces of its text and its calls."""

    reasoning: str = ""
    pieces: tuple[Piece, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.pieces)

    def __add__(self, more: "Part") -> "Part":
        return Part(self.reasoning + more.reasoning, self.pieces + more.pieces)


class AnswerReader(ABC):
    """Reads the tokens of one choice. What it returns does not depend on how tokens arrive, and no text is an error.

    stops: finds stop strings in the text of the answer. reasoning_tokens: those that belong to the reasoning.
    """

    stops: StopStrings

    @property
    @abstractmethod
    def reasoning_tokens(self) -> int: ...

    @abstractmethod
    def push(self, token_id: int) -> Part:
        """Append a token and return what no later token can change."""

    @abstractmethod
    def flush(self, cut: bool) -> Part:
        """Return the rest. No token follows. cut: the answer reached its greatest length."""


class AnswerFormat(ABC):
    """The format of the answers of a model.

    takes_tools: the model can call tools. tool_format: in which chat templates that have no tools get them.
    """

    takes_tools: bool
    tool_format: ToolFormat | None = None

    @abstractmethod
    def new_reader(
        self, body: Sampling, tokenizer: Tokenizer, thinking: ReasoningStart, schemas: Mapping[str, Schema]
    ) -> AnswerReader:
        """Return the reader of a choice.

        thinking: how the answer begins. schemas: of the parameters of the tools that may be called, by name.
        """

    @abstractmethod
    def call_rules(self, body: Sampling, tokenizer: Tokenizer) -> list[str]:
        """Return the rules of a grammar for the calls of tools, the first of them named `calls`. Raises ApiError."""

    @abstractmethod
    def frame_rules(self, constrained: Sequence[str], tokenizer: Tokenizer, thinking: ReasoningStart) -> list[str]:
        """Return the rules of a whole answer, the first of them named `start`, in which the reasoning is free.

        constrained: the names of the rules of what follows: `answer`, `calls` or both.
        """


def schemas_of(tools: Sequence[Tool]) -> dict[str, Schema]:
    """Return the schema of the parameters of each tool, by its name."""
    return {tool.function.name: tool.function.parameters or {} for tool in tools}
