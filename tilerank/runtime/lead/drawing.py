"""The choice of tokens after a step: one for each sequence, and one more after each draft that was right.

A token depends on the logits of its row, its request, its position and the tokens before it, and not on drafts. A draft
is accepted if it is the token that is chosen in its place. Drafted texts therefore have the tokens of plain decoding,
sampled ones included.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from ..protocol.rank_messages import Chunk
from .sampling import Row, SampledToken, choose
from .sequence import Sequence as TextSequence


@dataclass(eq=False)
class Draw:
    """The tokens of a sequence that a step yields.

    rows: the rows of logits of its chunk. accepted: how many drafts were right so far. is_open: whether another token
    follows, because the last one was drafted.
    """

    sequence: TextSequence
    chunk: Chunk
    rows: range
    accepted: int = 0
    is_open: bool = True
    _drafts: list[int] = field(init=False)

    def __post_init__(self) -> None:
        count = self.chunk.drafts
        self.rows = self.rows[len(self.rows) - 1 - count :]
        self._drafts = self.chunk.token_ids[len(self.chunk.token_ids) - count :]

    @property
    def next_rows(self) -> list[Row]:
        """What tokens are chosen for now: for all rows that are left, or for one if its logits change with the tokens
        before it."""
        sequence = self.sequence
        first = Row(sequence.params, sequence.tokens, sequence.rules, sequence.allowed)
        if first.changes_logits:
            return [first]
        left = len(self.rows) - self.accepted
        return [first, *(Row(sequence.params, sequence.tokens, sequence.rules, None, i) for i in range(1, left))]

    def take(self, token_id: int) -> bool:
        """Append the next token to the sequence. Returns whether it was drafted.

        The keys and values of a draft that was right are there. It counts as cached once the token after it is chosen:
        all tokens but the last one are cached then, as after any step.
        """
        self.sequence.cached += self.accepted > 0
        self.sequence.append(token_id)
        self.is_open = self.accepted < len(self._drafts) and self._drafts[self.accepted] == token_id
        self.accepted += self.is_open
        return self.is_open


def choose_next(
    draws: Sequence[Draw], logits: Tensor, argmax: Callable[[Tensor], Tensor]
) -> list[list[SampledToken | None]]:
    """Return for each draw the tokens of its next rows; those after the first that was not drafted do not count.

    logits: of the step, which may change in place if all rows are chosen for. None, argmax: as in `choose`.
    """
    rows = [draw.next_rows for draw in draws]
    flat = [row for of_draw in rows for row in of_draw]
    if len(flat) < logits.shape[0]:
        numbers = [
            draw.rows[draw.accepted + i] for draw, of_draw in zip(draws, rows, strict=True) for i in range(len(of_draw))
        ]
        logits = logits[numbers]
    chosen = iter(choose(logits, flat, argmax))
    return [[next(chosen) for _ in of_draw] for of_draw in rows]
