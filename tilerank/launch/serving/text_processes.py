"""Renders chat templates and tokenises texts in separate processes: a template is a program, and a tokenizer may have
rules that grow a text or try all ways to split it, so that neither may ever end."""

import ctypes
import os
import sys
from array import array
from collections.abc import Sequence
from pathlib import Path

import msgspec

from tilerank.loader.chat.jinja import MAX_TEXT
from tilerank.loader.chat.template import ReasoningStart, Rendered, Segment
from tilerank.loader.errors import show
from tilerank.loader.tokenizer import Tokenizer
from tilerank.runtime.server.chat.text_encoder import (
    Cause,
    Conversation,
    TemplateFacts,
    TextError,
    encode,
    encode_rendered,
    render,
    template_facts,
)

from ..processes.limited_process import LimitedPool, OverLimitError, answer_all, to_parent

MEMORY = 768 << 20
"""Limit of a process, in bytes of address space, which a large vocabulary and MAX_TOKENS short tokens need."""
CPU_S = 2
"""Limit for one question, beside the time for its length."""
CHARACTERS_PER_S = 1 << 18
"""Characters of a question that give it another second."""
DEADLINE_S = 30.0
"""Within which a question is answered on a busy machine, beside the time for its length."""
BUSY = 4
"""Seconds in which a process of a busy machine gets one second."""
SHORT_TEXT = 4096
"""Characters. Shorter texts are tokenised here, where the tokenizer takes linear time: that is faster than to ask."""
LONG_TEXT = 1 << 16
"""Characters. Questions of this length or more have a process of their own, so that others do not wait."""
SHORT_PROCESSES = 2
LONG_PROCESSES = 1
"""How many questions are answered at the same time. Long ones may take all memory that they are allowed."""


class FindFacts(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """What is known of the chat templates?"""


class RenderChat(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """What is the text of a conversation? It is the JSON of a Conversation, because schemas of tools may have whole
    numbers that MessagePack cannot hold."""

    conversation: bytes


class EncodeChat(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """What are the tokens of a conversation, as in RenderChat? The answer is the text if it is to be tokenised here."""

    conversation: bytes


class EncodeTexts(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """What are the tokens of each text? marks: special tokens in a text become their ids."""

    texts: list[str]
    add_special_tokens: bool
    marks: bool


class FoundFacts(msgspec.Struct, frozen=True, array_like=True, tag=True):
    facts: TemplateFacts


class FoundText(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The text of a conversation. thinking: the name of a ReasoningStart."""

    segments: list[Segment]
    thinking: str

    @property
    def rendered(self) -> Rendered:
        return Rendered(self.segments, ReasoningStart[self.thinking])


class FoundTokens(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The tokens of each text, as packed whole numbers. thinking: as in FoundText, for a conversation."""

    ids: list[bytes]
    thinking: str = ReasoningStart.NEVER.name


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A TextError."""

    cause: Cause
    message: str


Question = FindFacts | RenderChat | EncodeChat | EncodeTexts
Answer = FoundFacts | FoundText | FoundTokens | Refused
_questions: msgspec.msgpack.Decoder[Question] = msgspec.msgpack.Decoder(Question)
_answers: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)
_conversations = msgspec.json.Decoder(Conversation)


class TextProcesses:
    """A TextEncoder: the HTTP process's end."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        files = [tokenizer.model_dir] + [tokenizer.template_file] * (tokenizer.template_file is not None)
        self.short, self.long = (
            LimitedPool(count, _answers, __name__, *map(str, files)) for count in (SHORT_PROCESSES, LONG_PROCESSES)
        )
        self.short.start()
        self._facts: TemplateFacts | None = None
        self._tokenizer = tokenizer

    async def facts(self) -> TemplateFacts:
        if self._facts is None:
            answer = await self._ask(FindFacts())
            assert isinstance(answer, FoundFacts), answer
            self._facts = answer.facts
        return self._facts

    async def render(self, conversation: Conversation) -> Rendered:
        answer = await self._ask(RenderChat(msgspec.json.encode(conversation)))
        assert isinstance(answer, FoundText), answer
        return answer.rendered

    async def encode_chat(self, conversation: Conversation) -> tuple[list[int], ReasoningStart]:
        add_special_tokens = conversation.add_special_tokens
        answer = await self._ask(EncodeChat(msgspec.json.encode(conversation)))
        if isinstance(answer, FoundText):
            return encode_rendered(self._tokenizer, answer.rendered, add_special_tokens), answer.rendered.thinking
        assert isinstance(answer, FoundTokens), answer
        return _unpacked(answer.ids[0]), ReasoningStart[answer.thinking]

    async def encode(self, texts: Sequence[str], add_special_tokens: bool, marks: bool = True) -> list[list[int]]:
        if _is_fast(self._tokenizer, texts):
            return encode(self._tokenizer, texts, add_special_tokens, marks)
        answer = await self._ask(EncodeTexts(list(texts), add_special_tokens, marks))
        assert isinstance(answer, FoundTokens), answer
        return [_unpacked(ids) for ids in answer.ids]

    async def _ask(self, question: Question) -> Answer:
        length = _length(question)
        if length > 2 * MAX_TEXT:
            raise TextError("characters", str(length))
        pool = self.short if length < LONG_TEXT else self.long
        try:
            answer = await pool.ask(question, DEADLINE_S + BUSY * (length // CHARACTERS_PER_S))
        except OverLimitError as e:
            raise TextError("limits", f"{_cpu_s(question)} s or {MEMORY >> 20} MiB") from e
        except UnicodeEncodeError as e:
            raise TextError("tokenizer", f"expected valid Unicode, found a text with {show(e.object[e.start])}") from e
        if isinstance(answer, Refused):
            raise TextError(answer.cause, answer.message)
        return answer


def main(model_dir: Path, template_file: Path | None = None) -> None:
    """Answer each question."""
    # For one text, another thread takes longer, and has limits of its own.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    connection = to_parent(_questions)
    tokenizer = Tokenizer(model_dir, template_file)
    trim = ctypes.CDLL(None).malloc_trim
    trim(0)  # reading it takes twice as much memory as it has

    def answer(question: Question) -> Answer:
        try:
            return _answer(tokenizer, question)
        except TextError as e:
            return Refused(e.cause, str(e))
        finally:
            if _length(question) >= LONG_TEXT:
                trim(0)  # the C library would keep hundreds of MiB

    answer_all(connection, answer, MEMORY, _cpu_s)


def _answer(tokenizer: Tokenizer, question: Question) -> Answer:
    if isinstance(question, FindFacts):
        return FoundFacts(template_facts(tokenizer))
    if isinstance(question, EncodeTexts):
        return FoundTokens(_packed(encode(tokenizer, question.texts, question.add_special_tokens, question.marks)))
    conversation = _conversations.decode(question.conversation)
    rendered = render(tokenizer, conversation)
    if isinstance(question, RenderChat) or _is_fast(tokenizer, [rendered.text]):
        return FoundText(list(rendered.segments), rendered.thinking.name)
    ids = encode_rendered(tokenizer, rendered, conversation.add_special_tokens)
    return FoundTokens(_packed([ids]), rendered.thinking.name)


def _is_fast(tokenizer: Tokenizer, texts: Sequence[str]) -> bool:
    """Return whether the HTTP process itself tokenises texts."""
    return tokenizer.is_linear and sum(map(len, texts)) < SHORT_TEXT


def _cpu_s(question: Question) -> int:
    return CPU_S + _length(question) // CHARACTERS_PER_S


def _length(question: Question) -> int:
    """Return the characters of a question; bytes, if it has a conversation."""
    if isinstance(question, FindFacts):
        return 0
    return sum(map(len, question.texts)) if isinstance(question, EncodeTexts) else len(question.conversation)


def _packed(encoded: list[list[int]]) -> list[bytes]:
    return [array("I", ids).tobytes() for ids in encoded]


def _unpacked(ids: bytes) -> list[int]:
    return array("I", ids).tolist()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
