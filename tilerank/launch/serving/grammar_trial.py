"""Compiles the grammars of requests in a separate process, before the engine receives them.

The engine compiles an accepted grammar again, in parallel with its steps (runtime/lead/grammar_masks.py), because a
compiled grammar cannot move between processes.
"""

import sys
from collections import OrderedDict
from pathlib import Path

import msgspec

from tilerank.runtime.protocol.errors import RequestError
from tilerank.runtime.protocol.grammar import Vocabulary

from ..processes.limited_process import LimitedPool, OverLimitError, answer_all, to_parent

CPU_S = 1
"""Limit for one grammar."""
DEADLINE_S = 30.0
"""Within which one grammar is compiled, on a busy machine."""
MEMORY = 1 << 30
"""Limit of the process, in bytes of address space."""
KEPT = 256
"""Number of accepted grammars that are remembered."""
_text = msgspec.msgpack.Decoder(str)


class GrammarTrial:
    """The HTTP process's end. The other process is started with the first grammar."""

    def __init__(self, model_dir: Path, tokenizer_dir: Path) -> None:
        self._good: OrderedDict[str, None] = OrderedDict()
        self.pool = LimitedPool(1, _text, __name__, str(model_dir), str(tokenizer_dir))

    async def check(self, grammar: str) -> None:
        """Raise RequestError if the grammar is wrong, or too expensive to compile. Raises UnavailableError."""
        if grammar in self._good:
            return
        try:
            refusal = await self.pool.ask(grammar, DEADLINE_S)
        except OverLimitError as e:
            message = f"the grammar: compiling it takes more than {CPU_S} s or {MEMORY >> 30} GiB"
            raise RequestError(message) from e
        if refusal:
            raise RequestError(refusal)
        self._good[grammar] = None
        if len(self._good) > KEPT:
            self._good.popitem(last=False)


def main(model_dir: Path, tokenizer_dir: Path) -> None:
    """Answer each grammar with an error sentence, empty if it compiles."""
    connection, vocabulary = to_parent(_text), Vocabulary(model_dir, tokenizer_dir)
    _refusal(vocabulary, "start: /x/")  # loads the tokens before the first limit applies
    answer_all(connection, lambda grammar: _refusal(vocabulary, grammar), MEMORY, lambda _: CPU_S)


def _refusal(vocabulary: Vocabulary, grammar: str) -> str:
    try:
        vocabulary.matcher(grammar)
    except RequestError as e:
        return str(e)
    return ""


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
