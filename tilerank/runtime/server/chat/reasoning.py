"""Separates the reasoning of a model, which it writes before its answer, from the answer.

Qwen3, Qwen3.5 and DeepSeek write <think>, the reasoning, </think> and the answer, with line breaks around the marks;
Mistral's models write [THINK] and [/THINK], those of Gemma 4 <|channel>thought and <channel|>.
Some chat templates end the prompt with <think> (Qwen3.5, DeepSeek in thinking mode), or with </think> to turn the
reasoning off.
"""

from dataclasses import dataclass

from tilerank.loader.chat.template import THINK, ReasoningMarks, ReasoningStart


@dataclass(frozen=True)
class Text:
    """New text of an answer. reasoning: without the marks and the line breaks around them."""

    reasoning: str = ""
    answer: str = ""

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.answer)

    def __add__(self, more: "Text") -> "Text":
        return Text(self.reasoning + more.reasoning, self.answer + more.answer)


class ReasoningSplitter:
    """Splits the streamed text of one choice. Holds back what may be a part of a mark."""

    def __init__(self, thinking: ReasoningStart, marks: ReasoningMarks = THINK) -> None:
        self._marks = marks
        self.reasoning = thinking is ReasoningStart.OPENED
        self._undecided = thinking is ReasoningStart.OPTIONAL
        self._at_start = thinking is ReasoningStart.OPENED  # line breaks are dropped
        self._buffer = ""
        self._label = "" if thinking is ReasoningStart.OPENED else marks.label

    def push(self, text: str) -> Text:
        """Append text and return what no later text can change."""
        self._buffer += text
        if self._undecided:
            self._decide()
        if self._undecided:
            return Text()
        reasoning = ""
        if self.reasoning:
            if not self._skip_label():
                return Text()
            self._skip_line_breaks()
            reasoning = self._take_reasoning()
        if not self.reasoning:
            self._skip_line_breaks()
        answer = "" if self.reasoning else self._take(len(self._buffer))
        return Text(reasoning, answer)

    def flush(self) -> Text:
        """Return the rest. No text follows."""
        rest = self._take(len(self._buffer))
        return Text(reasoning=rest.rstrip("\n")) if self.reasoning else Text(answer=rest)

    def _decide(self) -> None:
        begin = self._buffer.lstrip()
        if begin.startswith(self._marks.begin):
            self._buffer = begin.removeprefix(self._marks.begin)
            self.reasoning = self._at_start = True
        self._undecided = not self.reasoning and self._marks.begin.startswith(begin)

    def _skip_line_breaks(self) -> None:
        if self._at_start:
            self._buffer = self._buffer.lstrip("\n")
            self._at_start = not self._buffer

    def _skip_label(self) -> bool:
        """Drop the label of the reasoning. Returns whether later text can no longer change what follows."""
        if not self._label:
            return True
        text, whole = self._buffer.lstrip("\n"), (f"{self._label}\n", f"{self._label}{self._marks.end}")
        if any(one != text and one.startswith(text) for one in whole):
            return False
        if text.startswith(whole):
            self._buffer = text.removeprefix(self._label)
        self._label = ""
        return True

    def _take_reasoning(self) -> str:
        reasoning, ended, rest = self._buffer.partition(self._marks.end)
        if ended:
            self._buffer = rest
            self.reasoning, self._at_start = False, True
            return reasoning.rstrip("\n")
        sure = self._buffer[: len(self._buffer) - overlap(self._buffer, self._marks.end)].rstrip("\n")
        return self._take(len(sure))

    def _take(self, length: int) -> str:
        taken, self._buffer = self._buffer[:length], self._buffer[length:]
        return taken


def overlap(text: str, mark: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `mark`."""
    return next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:n])), 0)
