"""Renders the chat template of the model in separate processes: a template is a program, and may never end."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tilerank.loader.chat import ChatTemplate
from tilerank.loader.errors import TokenizerError
from tilerank.loader.tokenizer import Tokenizer

from ..processes.limited_process import MEMORY, LimitedPool, answer_all

CPU_S = 2
"""Limit for one conversation."""
PROCESSES = 2
"""Conversations that are rendered at the same time."""


class ChatRenderer:
    """The HTTP process's end."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        special_tokens = json.dumps(dict(tokenizer.special_tokens))
        self._pool = LimitedPool(PROCESSES, __name__, str(tokenizer.model_dir), special_tokens)
        for process in self._pool.processes:
            process.start()  # the first conversation need not wait for it

    async def render(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
        """Return the text of a conversation."""
        return str(await self._ask([list(messages), dict(variables)]))

    async def takes_calls(self) -> bool:
        """Return ChatTemplate.takes_calls."""
        return bool(await self._ask(None))

    async def _ask(self, question: list[Any] | None) -> str | bool:
        answer = await self._pool.ask(json.dumps(question))
        if answer is None:
            cause = RuntimeError(f"it takes more than {CPU_S} s or {MEMORY >> 30} GiB")
            raise TokenizerError("the chat template was stopped") from cause
        found, sentence, reason = json.loads(answer)
        if sentence is not None:
            raise TokenizerError(sentence) from (None if reason is None else RuntimeError(reason))
        return found  # type: ignore[no-any-return]


def main(model_dir: Path, special_tokens: Mapping[str, str]) -> None:
    """Answer each question with [answer, error, the reason that the template gave]: the text of a conversation, or for
    null whether the template takes calls."""
    template = ChatTemplate(model_dir, special_tokens)

    def answer(question: str) -> str:
        asked = json.loads(question)
        try:
            found = template.takes_calls if asked is None else template.render(asked[0], **asked[1])
        except TokenizerError as e:
            return json.dumps([None, str(e), None if e.__cause__ is None else str(e.__cause__)])
        return json.dumps([found, None, None])

    answer_all(answer, CPU_S)


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
