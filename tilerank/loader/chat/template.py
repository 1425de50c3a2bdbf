"""Chat templates: what turns the messages of a conversation into the text that a model continues."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, ClassVar, NamedTuple


class ReasoningMarks(NamedTuple):
    """The texts before and after the reasoning of an answer. label: a line that follows the one before it."""

    begin: str
    end: str
    label: str = ""


THINK, MISTRAL_THINK = ReasoningMarks("<think>", "</think>"), ReasoningMarks("[THINK]", "[/THINK]")
GEMMA_THINK = ReasoningMarks("<|channel>", "<channel|>", "thought")
REASONING_MARKS = (THINK, MISTRAL_THINK, GEMMA_THINK)
"""Those of all families; a model has those that its vocabulary has. Models with channels (harmony/) have none."""


class ReasoningStart(Enum):
    """Where the reasoning of an answer begins."""

    NEVER = "there is none: the answer begins at once"
    OPTIONAL = "with the mark of reasoning, if the answer begins with it"
    OPENED = "with the answer, because the prompt ends inside the reasoning"


class Segment(NamedTuple):
    """A part of a text that is tokenised by itself. marks: do special tokens in it become their ids?"""

    text: str
    marks: bool


class Rendered(NamedTuple):
    """The text of a conversation. thinking: how the answer to it begins."""

    segments: Sequence[Segment]
    thinking: ReasoningStart

    @property
    def text(self) -> str:
        return "".join(segment.text for segment in self.segments)


class ChatTemplate(ABC):
    """What turns messages into text.

    has_channels: the model answers in messages of harmony (harmony/marks.py). keeps_arguments: arguments of earlier
    calls are written as the client sent them; other templates take objects. efforts: the values that the variable
    reasoning_effort may have; empty for any.
    """

    has_channels: ClassVar[bool] = False
    keeps_arguments: ClassVar[bool] = False
    efforts: ClassVar[tuple[str, ...]] = ()

    @property
    @abstractmethod
    def source(self) -> str:
        """The text of the template; empty if it is a part of this program."""

    @abstractmethod
    def variables(self, tools: Sequence[Mapping[str, Any]] | None) -> frozenset[str]:
        """Return the names of the variables that the template for these tools reads."""

    @abstractmethod
    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> Rendered:
        """Return the text of a conversation.

        add_generation_prompt: end the text with the beginning of the assistant's answer. continue_final_message: end it
        with the text of the last message, so that the model continues this message. variables: further variables of
        the template. Raises TokenizerError, whose cause says why, if the messages are refused.
        """

    @property
    @abstractmethod
    def takes_calls(self) -> bool:
        """Whether the template prints the tool calls of earlier turns and their results."""

    @property
    @abstractmethod
    def after_answer(self) -> str:
        """The text that follows an answer that is the last message: the end of the turn, if it has one."""


def thinking_after(prompt: str, marks: ReasoningMarks | None) -> ReasoningStart:
    """Return how the answer to `prompt`, the text of a conversation, begins. marks: those that are tokens.

    A model whose vocabulary has no marks of reasoning never begins it by itself, but a prompt may end with THINK.
    """
    begin, end, label = marks or THINK
    text = prompt.rstrip()
    if text.endswith(begin + label):
        return ReasoningStart.OPENED
    if text.endswith(end) or marks is None:
        return ReasoningStart.NEVER
    return ReasoningStart.OPTIONAL


def thinking_inside(prompt: str, marks: ReasoningMarks | None) -> ReasoningStart:
    """Return how the answer to a prompt begins that ends inside a message, which may end within its reasoning."""
    begin, end, _ = marks or THINK
    return ReasoningStart.OPENED if prompt.rfind(begin) > prompt.rfind(end) else ReasoningStart.NEVER
