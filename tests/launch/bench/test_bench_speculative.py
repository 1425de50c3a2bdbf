"""bench speculative, by hand: the limit of one token a read, tokens a step, and which tokens are timed.
tests/benchmarks runs the command."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from tilerank.launch.bench.speculative.command import time_decoding, tokens_per_step
from tilerank.launch.bench.speculative.limit import bytes_read
from tilerank.launch.errors import LaunchError
from tilerank.launch.planning.work import ModelWork
from tilerank.parallel.cost import Cost
from tilerank.runtime.lead.engine import Request
from tilerank.runtime.protocol.events import TokenEvent
from tilerank.runtime.protocol.prompt import Prompt


def test_the_bytes_of_plain_decoding_by_hand() -> None:
    """Weights of 1000 bytes and 2 bytes for a cached token: three steps, of which the first one has both answers."""
    work = ModelWork(Cost(read=900), Cost(read=100), cached=2)
    steps = [1000 + 2 * (10 + 1) + 2 * (20 + 1), 1000 + 2 * (10 + 2), 1000 + 2 * (10 + 3)]
    assert bytes_read(work, [(10, 4), (20, 2)]) == sum(steps)


def test_a_sequence_that_has_ended_takes_part_in_no_step() -> None:
    """Of two sequences, one ends after the first step. The other goes on alone, with three tokens and with one."""
    assert tokens_per_step([[7, 7, 8], [8, 8, 8], [8]]) == (2 + 1 + 3 + 1) / (2 + 1 + 1)


class Scripted:
    """Stands in for an engine: yields in each step tokens of the requests whose numbers are listed."""

    def __init__(self, *steps: list[int]) -> None:
        self._steps, self._submitted = list(steps), 0
        self.drafting = SimpleNamespace(drafted=4, accepted=3)

    def submit(self, request: Request) -> int:
        self._submitted += 1
        return self._submitted - 1

    @property
    def busy(self) -> bool:
        return bool(self._steps)

    def step(self) -> list[TokenEvent]:
        return [TokenEvent(number, 10 + number, 0.0) for number in self._steps.pop(0)]


def timed(*steps: list[int]) -> dict[str, Any]:
    return time_decoding(cast(Any, Scripted(*steps)), "free", [Request(Prompt([1])), Request(Prompt([2]))])


def test_tokens_count_once_each_answer_has_one() -> None:
    """The second answer begins in the third step. Five tokens follow, of which the first answer has four."""
    found = timed([0], [0], [0, 1], [0, 0, 1], [], [0, 0])
    assert found["token_ids"] == [[10] * 7, [11] * 2]
    assert (found["steps"], found["tokens"]) == ([[0, 0, 1], [0, 0]], 5)
    assert found["seconds"] > 0 and (found["drafted"], found["accepted"]) == (4, 3)


@pytest.mark.parametrize("steps", [([0, 1],), ([0], [0], [1])], ids=["one token each", "one ends before the other"])
def test_answers_that_leave_nothing_to_time_are_refused(steps: tuple[list[int], ...]) -> None:
    sentence = "bench speculative: task free: expected tokens once each answer has one, found none"
    with pytest.raises(LaunchError, match=sentence):
        timed(*steps)
