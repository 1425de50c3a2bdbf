"""Turns conversations and texts into tokens: the interface that prompts.py calls, and what its implementations share.

The process of launch/serving/text_processes.py imports this file, which therefore imports no library of servers.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, Protocol

from tilerank.loader.chat.template import ReasoningStart, Rendered, Segment
from tilerank.loader.errors import TokenizerError
from tilerank.loader.tokenizer import Tokenizer

MAX_TOKENS = 1 << 20
"""Tokens of the texts of a request together."""
_MAX_REASON = 1000
"""Characters of a template's error."""

Cause = Literal["no template", "template", "tools", "characters", "tokens", "tokenizer", "limits"]
"""Why there are no tokens: there is no template; it refuses the messages; it prints no tools; the text has too many
characters; it has too many tokens; the tokenizer refuses it; all that takes too much time or memory."""


class TextError(Exception):
    """A conversation or a text has no tokens. The message says why, unless `cause` does, and names no path."""

    def __init__(self, cause: Cause, message: str = "") -> None:
        super().__init__(message)
        self.cause: Cause = cause


class Conversation(NamedTuple):
    """A conversation for the chat template.

    variables: of the template. described: text that the template must print. add_special_tokens: also those that the
    tokenizer adds to a text. longest: the most characters that its text may have.
    """

    messages: Sequence[Mapping[str, Any]]
    variables: Mapping[str, Any]
    described: str
    add_special_tokens: bool
    longest: int


class TemplateFacts(NamedTuple):
    """What is known of the chat templates of a model.

    variables, tool_variables: that the template for messages without and with tools reads. efforts, takes_calls,
    after_answer: see ChatTemplate.
    """

    variables: frozenset[str]
    tool_variables: frozenset[str]
    efforts: tuple[str, ...]
    takes_calls: bool
    after_answer: str


class TextEncoder(Protocol):
    """Renders conversations and tokenises texts. Its methods raise TextError and UnavailableError."""

    async def facts(self) -> TemplateFacts:
        """Return what is known of the chat templates."""

    async def render(self, conversation: Conversation) -> Rendered:
        """Return the text of a conversation."""

    async def encode_chat(self, conversation: Conversation) -> tuple[list[int], ReasoningStart]:
        """Return the tokens of the text of a conversation, and how the answer to it begins."""

    async def encode(self, texts: Sequence[str], add_special_tokens: bool, marks: bool = True) -> list[list[int]]:
        """Return the tokens of each text. marks: special tokens in a text become their ids."""


class DirectTextEncoder:
    """Works in the calling thread, which a template or a tokenizer that never ends blocks for ever."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    async def facts(self) -> TemplateFacts:
        return template_facts(self._tokenizer)

    async def render(self, conversation: Conversation) -> Rendered:
        return render(self._tokenizer, conversation)

    async def encode_chat(self, conversation: Conversation) -> tuple[list[int], ReasoningStart]:
        rendered = render(self._tokenizer, conversation)
        return encode_rendered(self._tokenizer, rendered, conversation.add_special_tokens), rendered.thinking

    async def encode(self, texts: Sequence[str], add_special_tokens: bool, marks: bool = True) -> list[list[int]]:
        return encode(self._tokenizer, texts, add_special_tokens, marks)


def template_facts(tokenizer: Tokenizer) -> TemplateFacts:
    """Return what is known of the chat templates of a model. Raises TextError."""
    try:
        template = tokenizer.chat_template
        without, with_tools = template.variables(None), template.variables([])
        return TemplateFacts(without, with_tools, template.efforts, template.takes_calls, template.after_answer)
    except TokenizerError as e:
        raise _template_error(e) from e


def render(tokenizer: Tokenizer, conversation: Conversation) -> Rendered:
    """Return the text of a conversation. Raises TextError."""
    try:
        rendered = tokenizer.chat_template.render(conversation.messages, **conversation.variables)
    except TokenizerError as e:
        raise _template_error(e) from e
    if conversation.described not in rendered.text:
        raise TextError("tools")
    if (length := len(rendered.text)) > conversation.longest:
        raise TextError("characters", str(length))
    return rendered


def encode_rendered(tokenizer: Tokenizer, rendered: Rendered, add_special_tokens: bool) -> list[int]:
    """Return the tokens of the text of a conversation. Raises TextError."""
    with _token_errors():
        ids = tokenizer.encode_segments(rendered.segments, add_special_tokens)
    _check_count(len(ids))
    return ids


def encode(tokenizer: Tokenizer, texts: Sequence[str], add_special_tokens: bool, marks: bool = True) -> list[list[int]]:
    """Return the tokens of each text. marks: special tokens in a text become their ids. Raises TextError."""
    with _token_errors():
        encoded = [tokenizer.encode_segments([Segment(text, marks)], add_special_tokens) for text in texts]
    _check_count(sum(map(len, encoded)))
    return encoded


@contextmanager
def _token_errors() -> Iterator[None]:
    try:
        yield
    except TokenizerError as e:
        raise TextError("tokenizer", str(e)) from e


def _check_count(tokens: int) -> None:
    if tokens > MAX_TOKENS:
        raise TextError("tokens", str(tokens))


def _template_error(error: TokenizerError) -> TextError:
    """Return the error of a template for clients: its cause alone, because the sentence names a path of the server."""
    if error.__cause__ is None:
        return TextError("no template")
    if isinstance(error.__cause__, MemoryError):
        return TextError("limits", "the memory that it may have")
    return TextError("template", str(error.__cause__)[:_MAX_REASON])
