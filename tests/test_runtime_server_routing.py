"""Which replica gets a request, by hand."""

import pytest

from tilerank.runtime.counters import RankCounters
from tilerank.runtime.server import routing
from tilerank.runtime.server.figures import Figures, joined
from tilerank.runtime.server.messages import Counted, RankInfo, Ranks, State, together
from tilerank.runtime.server.routing import BLOCK, SLACK, Seen, choose, hashes


@pytest.mark.parametrize(
    ("loads", "known", "blocks", "expected"),
    [
        ([3, 1, 2], [0, 0, 0], 10, 1),
        ([3, 1, 2], [0, 0, 0], 0, 1),
        ([3, 1, 2], [10, 0, 0], 10, 0),
        ([3, 1, 2], [5, 0, 0], 10, 0),
        ([3, 1, 2], [4, 0, 0], 10, 1),  # less than half
        ([3, 1, 2], [5, 0, 8], 10, 2),
        ([SLACK, 0], [10, 0], 10, 0),
        ([SLACK + 1, 0], [10, 0], 10, 1),
        ([2, 1], [7, 7], 10, 1),  # of equals, the one with less to do
    ],
)
def test_most_of_the_prompt_unless_too_busy(loads: list[int], known: list[int], blocks: int, expected: int) -> None:
    assert choose(loads, known, blocks) == expected


def test_beginnings_are_known_in_whole_blocks() -> None:
    seen = Seen()
    prompt = list(range(5 * BLOCK + 7))
    seen.add(hashes(prompt))
    assert seen.known(hashes(prompt)) == 5
    assert seen.known(hashes(prompt + prompt)) == 5
    assert seen.known(hashes(prompt[: 3 * BLOCK] + [0] * BLOCK)) == 3
    assert seen.known(hashes([7, *prompt[1:]])) == 0
    # The same tokens after others are another beginning.
    assert seen.known(hashes(prompt[BLOCK:])) == 0
    assert hashes(prompt[: BLOCK - 1]) == []


def test_what_was_not_asked_for_lately_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "MAX_BLOCKS", 4)
    seen = Seen()
    first, second, third = (hashes([token] * 2 * BLOCK) for token in (1, 2, 3))
    for prompt in (first, second, first, third):
        seen.add(prompt)
    assert [seen.known(prompt) for prompt in (first, second, third)] == [2, 0, 2]
    seen.add(hashes([4] * BLOCK))
    assert seen.known(first) == 1  # its end went first


def test_the_state_of_several_engines() -> None:
    one = State(100, 300, 0.5, 1, 2, 3, 4, 5)
    other = State(80, 100, 0.1, 10, 20, 30, 40, 50)
    assert together(one, other) == State(80, 400, 0.4, 11, 22, 33, 44, 55)


def test_ranks_of_several_replicas_are_numbered_through() -> None:
    """Also where one of them has not come up yet."""

    def ranks(*counters: RankCounters) -> Figures:
        figures = Figures()
        figures.take(Ranks([RankInfo(rank, "h", "0", "0", "amx", 1, 1, None) for rank in range(2)]))
        if counters:
            figures.take(Counted(list(counters)))
        return figures

    idle, busy = ranks(), ranks(*[RankCounters(decode_s=2.0, decode_bytes=10, waited_s=waited) for waited in (0, 1)])
    whole = joined({2: busy, 0: idle, 1: Figures()})
    assert [rank.rank for rank in whole.ranks] == [0, 1, 4, 5]
    assert [rank.decode_bytes for rank in whole.counters] == [0, 0, 10, 10]
    assert whole.wait_shares == [0, 0, 0, 0.5]
    assert whole.bytes_per_s == 10
    assert joined({}).ranks == joined({0: Figures()}).ranks == []
