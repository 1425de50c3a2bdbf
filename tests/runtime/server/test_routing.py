"""The choice of a replica, and states and statistics of several replicas, by hand."""

import pytest

from tilerank.runtime.protocol.engine_state import EngineState
from tilerank.runtime.rank.counters import RankCounters
from tilerank.runtime.server.link import routing
from tilerank.runtime.server.link.messages import Counters, RankInfo, Ranks
from tilerank.runtime.server.link.rank_stats import RankStats, merge
from tilerank.runtime.server.link.routing import BLOCK_TOKENS, MAX_EXTRA_LOAD, SeenPrompts, block_hashes, choose_replica


@pytest.mark.parametrize(
    ("loads", "known", "blocks", "expected"),
    [
        ([3, 1, 2], [0, 0, 0], 10, 1),
        ([3, 1, 2], [0, 0, 0], 0, 1),
        ([3, 1, 2], [10, 0, 0], 10, 0),
        ([3, 1, 2], [5, 0, 0], 10, 0),
        ([3, 1, 2], [4, 0, 0], 10, 1),  # less than half
        ([3, 1, 2], [5, 0, 8], 10, 2),
        ([MAX_EXTRA_LOAD, 0], [10, 0], 10, 0),
        ([MAX_EXTRA_LOAD + 1, 0], [10, 0], 10, 1),
        ([2, 1], [7, 7], 10, 1),  # of equals, the less busy one
    ],
)
def test_most_of_the_prompt_unless_too_busy(loads: list[int], known: list[int], blocks: int, expected: int) -> None:
    assert choose_replica(loads, known, blocks) == expected


def test_prompts_are_compared_in_whole_blocks() -> None:
    seen = SeenPrompts()
    prompt = list(range(5 * BLOCK_TOKENS + 7))
    seen.add(block_hashes(prompt))
    assert seen.matching(block_hashes(prompt)) == 5
    assert seen.matching(block_hashes(prompt + prompt)) == 5
    assert seen.matching(block_hashes(prompt[: 3 * BLOCK_TOKENS] + [0] * BLOCK_TOKENS)) == 3
    assert seen.matching(block_hashes([7, *prompt[1:]])) == 0
    # The same tokens after other tokens do not match.
    assert seen.matching(block_hashes(prompt[BLOCK_TOKENS:])) == 0
    assert block_hashes(prompt[: BLOCK_TOKENS - 1]) == []


def test_the_least_recently_used_blocks_are_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "MAX_BLOCKS", 4)
    seen = SeenPrompts()
    first, second, third = (block_hashes([token] * 2 * BLOCK_TOKENS) for token in (1, 2, 3))
    for prompt in (first, second, first, third):
        seen.add(prompt)
    assert [seen.matching(prompt) for prompt in (first, second, third)] == [2, 0, 2]
    seen.add(block_hashes([4] * BLOCK_TOKENS))
    assert seen.matching(first) == 1  # its end was evicted first


def test_the_state_of_several_engines() -> None:
    one = EngineState(100, 300, 0.5, 1, 2, 3, 4, 5, 6, 7)
    other = EngineState(80, 100, 0.1, 10, 20, 30, 40, 50, 60, 70)
    assert one + other == EngineState(80, 400, 0.4, 11, 22, 33, 44, 55, 66, 77)


def test_ranks_of_several_replicas_are_numbered_through() -> None:
    """Replicas that have not started yet are included."""

    def ranks(*counters: RankCounters) -> RankStats:
        stats = RankStats()
        stats.add(Ranks([RankInfo(rank, "h", "0", "0", "amx", 1, 1, None) for rank in range(2)]))
        if counters:
            stats.add(Counters(list(counters)))
        return stats

    idle, busy = ranks(), ranks(*[RankCounters(decode_s=2.0, decode_bytes=10, waited_s=waited) for waited in (0, 1)])
    whole = merge({2: busy, 0: idle, 1: RankStats()})
    assert [rank.rank for rank in whole.ranks] == [0, 1, 4, 5]
    assert [rank.decode_bytes for rank in whole.counters] == [0, 0, 10, 10]
    assert whole.wait_shares == [0, 0, 0, 0.5]
    assert whole.bytes_per_s == 10
    assert merge({}).ranks == merge({0: RankStats()}).ranks == []
