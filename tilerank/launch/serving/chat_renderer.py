"""Renders the chat template of the model in separate processes: a template is a program, and may never end."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tilerank.loader.chat import ChatTemplate
from tilerank.loader.errors import TokenizerError
from tilerank.loader.tokenizer import Tokenizer

from ..processes.limited_process import MEMORY, LimitedPool, answer_all, to_parent

CPU_S = 2
"""Limit for one conversation."""
PROCESSES = 2
"""Conversations that are rendered at the same time."""


class Rendered(msgspec.Struct, frozen=True, array_like=True):
    """The text of a conversation, or a property of the template. error: why there is none. reason: what the template
    gave for it, if anything."""

    found: str | bool | None
    error: str | None = None
    reason: str | None = None


class ChatRenderer:
    """The HTTP process's end."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        special_tokens = json.dumps(dict(tokenizer.special_tokens))
        answers = msgspec.msgpack.Decoder(Rendered)
        self.pool = LimitedPool(PROCESSES, answers, __name__, str(tokenizer.model_dir), special_tokens)
        for process in self.pool.processes:
            process.connect()  # starts it, so that the first conversation need not wait

    async def render(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
        """Return the text of a conversation."""
        return str(await self._ask([list(messages), dict(variables)]))

    async def takes_calls(self) -> bool:
        """Return ChatTemplate.takes_calls."""
        return bool(await self._ask("takes_calls"))

    async def after_answer(self) -> str:
        """Return ChatTemplate.after_answer."""
        return str(await self._ask("after_answer"))

    async def _ask(self, question: list[Any] | str) -> str | bool | None:
        # Questions are JSON in text, because schemas of tools may have whole numbers that MessagePack cannot hold.
        answer = await self.pool.ask(json.dumps(question))
        if answer is None:
            cause = RuntimeError(f"it takes more than {CPU_S} s or {MEMORY >> 30} GiB")
            raise TokenizerError("the chat template was stopped") from cause
        if answer.error is not None:
            raise TokenizerError(answer.error) from (None if answer.reason is None else RuntimeError(answer.reason))
        return answer.found


def main(model_dir: Path, special_tokens: Mapping[str, str]) -> None:
    """Answer each question: a conversation and variables of the template, or the name of a property of it."""
    template = ChatTemplate(model_dir, special_tokens)

    def answer(question: str) -> Rendered:
        asked = json.loads(question)
        try:
            found = getattr(template, asked) if isinstance(asked, str) else template.render(asked[0], **asked[1])
            return Rendered(found)
        except TokenizerError as e:
            return Rendered(None, str(e), None if e.__cause__ is None else str(e.__cause__))

    answer_all(to_parent(msgspec.msgpack.Decoder(str)), answer, CPU_S)


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
