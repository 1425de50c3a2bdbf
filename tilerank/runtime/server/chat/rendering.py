"""How the server has chat templates rendered."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from tilerank.loader.tokenizer import Tokenizer


class Renderer(Protocol):
    """Renders the chat template of the model, outside of the event loop. Raises TokenizerError; its cause is the
    template's own error unless there is no template."""

    async def render(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
        """Return the text of a conversation, as Tokenizer.apply_chat_template."""

    async def takes_calls(self) -> bool:
        """Return ChatTemplate.takes_calls."""


class ThreadRenderer:
    """Renders in threads of this process, which a template that never ends would hold for ever."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    async def render(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
        return await asyncio.to_thread(self._tokenizer.apply_chat_template, messages, **variables)

    async def takes_calls(self) -> bool:
        return await asyncio.to_thread(lambda: self._tokenizer.chat_template.takes_calls)
