"""Rendering of chat templates: the interface that the server calls."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from tilerank.loader.tokenizer import Tokenizer


class Renderer(Protocol):
    """Renders the chat template of the model. Raises TokenizerError; its cause is the
    template's own error unless there is no template."""

    async def render(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
        """Return the text of a conversation, as Tokenizer.apply_chat_template."""

    async def takes_calls(self) -> bool:
        """Return ChatTemplate.takes_calls."""

    async def after_answer(self) -> str:
        """Return ChatTemplate.after_answer."""


class DirectRenderer:
    """Renders in the calling thread, which a template that never ends blocks for ever."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    async def render(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
        return self._tokenizer.apply_chat_template(messages, **variables)

    async def takes_calls(self) -> bool:
        return self._tokenizer.chat_template.takes_calls

    async def after_answer(self) -> str:
        return self._tokenizer.chat_template.after_answer
