"""Reads the answer of a model that writes harmony, token by token, whatever the tokens are.

Openai-harmony's parser refuses much of what models write. Here every text goes somewhere: a message begins with MESSAGE
and ends with the next mark of a header or of an end, and text that cannot be a header is text of the answer.
"""

from collections.abc import Collection, Mapping

from tilerank.loader.chat.template import ReasoningStart
from tilerank.loader.harmony.marks import CALL, CHANNEL, CONSTRAIN, END, MARKS, MESSAGE, RETURN
from tilerank.loader.tokenizer import Tokenizer

from ..answer_format import AnswerReader, Part
from ..request import Sampling
from ..text import StopStrings
from ..tools.calls import MoreArguments, ToolCall
from .header import LONGEST, Header, Kind, may_be_header, read_header

BETWEEN_MESSAGES = "\n\n"
"""Stands between messages that become one text."""
_BEGINS: Mapping[ReasoningStart, Header | None] = {
    ReasoningStart.OPTIONAL: None,
    ReasoningStart.OPENED: Header(Kind.REASONING),
    ReasoningStart.NEVER: Header(Kind.ANSWER),
}


class HarmonyReader(AnswerReader):
    """Reads one choice. thinking: how it begins. tools: the names of those that may be called."""

    def __init__(self, body: Sampling, tokenizer: Tokenizer, thinking: ReasoningStart, tools: Collection[str]) -> None:
        self.stops = StopStrings(body.stop_strings, body.min_tokens, body.keeps_stop)
        self._reasoning_tokens = 0
        self._marks = {tokenizer.token_id(mark): mark for mark in MARKS}
        self._stream = tokenizer.stream(special=not body.skip_special_tokens)
        self._tools = tools
        self._message = _BEGINS[thinking]  # None in a header
        self._is_empty = self._is_blank = True  # the message has no text yet; none but white space
        self._said: set[Kind] = set()
        self._header = ""  # its text, in which marks are spaces
        self._has_marks = False  # the header does

    @property
    def reasoning_tokens(self) -> int:
        return self._reasoning_tokens

    def push(self, token_id: int) -> Part:
        before, mark = self._reasons, self._marks.get(token_id)
        part = self._take(self._stream.push(token_id)) if mark is None else self._take_mark(mark)
        self._reasoning_tokens += before or self._reasons
        self.stops.end_token()
        return part

    def flush(self, cut: bool) -> Part:
        if self.stops.stopped:
            return Part()
        part = self._take(self._stream.flush())
        if self._message is None and not self._has_marks:
            part += self._begin(Header(Kind.ANSWER), self._header)
        return part + self._end(cut)

    @property
    def _reasons(self) -> bool:
        return self._message is not None and self._message.kind is Kind.REASONING

    def _take(self, text: str) -> Part:
        """Take text of a message or of a header."""
        if self._message is not None:
            return self._write(text)
        self._header += text
        if len(self._header) <= LONGEST and (self._has_marks or may_be_header(self._header)):
            return Part()
        return self._begin(Header(Kind.ANSWER), self._header)

    def _take_mark(self, mark: str) -> Part:
        part = self._take(self._stream.flush())
        is_inside = self._message is not None
        if mark in (MESSAGE, CONSTRAIN) and is_inside:
            return part
        if mark == MESSAGE:
            return part + self._begin(read_header(self._header, self._tools))
        if mark == CONSTRAIN or (mark == CHANNEL and not is_inside):
            self._header += " "
        else:
            part += self._end(cut=False)
            self._header = ""
        self._has_marks = mark not in (END, RETURN, CALL)
        return part

    def _begin(self, message: Header, text: str = "") -> Part:
        self._message = message
        self._is_empty = self._is_blank = True
        calls = (ToolCall(message.tool, ""),) if message.kind is Kind.CALL else ()
        return Part(pieces=calls) + self._write(text)

    def _write(self, text: str) -> Part:
        """Take text of a message."""
        assert self._message is not None
        kind, begins = self._message.kind, self._is_empty
        if not text:
            return Part()
        self._is_empty, self._is_blank = False, self._is_blank and not text.strip()
        if kind is Kind.CALL:
            return Part(pieces=(MoreArguments(text),))
        if begins and kind in self._said:
            text = BETWEEN_MESSAGES + text
        self._said.add(kind)
        if kind is Kind.REASONING:
            return Part(text)
        released = self.stops.push(text) if kind is Kind.ANSWER else ""
        return Part(pieces=(released,) if released else ())

    def _end(self, cut: bool) -> Part:
        """End the message, if there is one. A call without arguments has an empty object of them."""
        message, self._message = self._message, None
        if message is None:
            return Part()
        if message.kind is Kind.CALL:
            return Part(pieces=(MoreArguments("{}"),) if self._is_blank and not cut else ())
        rest = self.stops.flush() if message.kind is Kind.ANSWER else ""
        return Part(pieces=(rest,) if rest else ())
