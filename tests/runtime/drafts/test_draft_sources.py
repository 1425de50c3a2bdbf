"""What n-grams propose, and how many drafts are checked, by hand."""

from collections import abc

import pytest
from drafting import NoDrafts

from tests.runtime.test_scheduler import new_sequence
from tilerank.runtime.lead.drafting.draft_counts import TRIAL_EVERY, TRIAL_STEPS, DraftCounts, Proposal, StepTimes
from tilerank.runtime.lead.drafting.drafts import Drafting, DraftSource
from tilerank.runtime.lead.drafting.ngrams import INDEXED, SHARED_BLOCK, NgramDrafts
from tilerank.runtime.lead.pages import PagePool
from tilerank.runtime.lead.scheduler import Scheduler
from tilerank.runtime.lead.sequence import Sequence
from tilerank.runtime.protocol.rank_messages import Chunk


def proposed(source: NgramDrafts, tokens: list[int], count: int = 4) -> list[int]:
    (found,) = source.propose([new_sequence(tokens, 100)], [count])
    return found.tokens


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([1, 2, 3, 4, 5, 6, 1, 2], [3, 4, 5, 6]),
        ([1, 2, 3, 9, 1, 2, 4, 9, 1, 2], [4, 9, 1, 2]),  # the latest of two
        ([5, 1, 2, 3, 9, 6, 1, 2, 4, 9, 5, 1, 2], [3, 9, 6, 1]),  # the one with more equal tokens before it
        ([7, 1, 2, 8, 1, 2], [8, 1, 2, 8]),  # a period that goes on
        ([6, 6, 6], [6, 6, 6, 6]),
        ([1, 2, 3, 2], []),
        ([1, 2], []),
        ([1], []),
    ],
)
def test_proposes_what_followed_the_same_tokens(tokens: list[int], expected: list[int]) -> None:
    assert proposed(NgramDrafts(), tokens) == expected


def test_a_text_that_grows_is_followed() -> None:
    source, sequence = NgramDrafts(), new_sequence([1, 2, 3], 100)
    assert source.propose([sequence], [3]) == [Proposal([])]
    for token in (8, 9, 1, 2):
        sequence.append(token)
        source.propose([sequence], [3])
    assert source.propose([sequence], [3]) == [Proposal([3, 8, 9], 2)]


def test_a_long_prompt_is_indexed_a_part_at_a_time() -> None:
    source = NgramDrafts()
    sequence = new_sequence([*range(100, 102 + INDEXED), 1, 2, 3, *range(100, 900), 1, 2], 100)
    found = [source.propose([sequence], [1])[0].tokens for _ in range(4)]
    assert [] in found and found[-1] == [3]


def test_texts_of_other_requests_are_proposed() -> None:
    source = NgramDrafts()
    one = new_sequence([1], 200)
    for token in range(10, 10 + SHARED_BLOCK):
        one.append(token)
        source.propose([one], [4])
    assert proposed(source, [3, 20, 21, 22]) == [23, 24, 25, 26]
    assert proposed(source, [3, 4, 21, 22]) == []  # two equal tokens are too common
    assert proposed(source, [20, 21, 22, 5, 20, 21, 22]) == [5, 20, 21, 22]  # its own text goes first


def counts_with(times: dict[int, float], shares: float) -> tuple[DraftCounts, Sequence]:
    """Return counts that have measured steps of some sizes, and a sequence whose drafts were right in this share."""
    counts, sequence = DraftCounts(), new_sequence([1], 1000)
    for size, seconds in times.items():
        for _ in range(4):
            counts.time(size, seconds)
    for i in range(200):
        right = int((i + 1) * shares) - int(i * shares)
        counts.learn(sequence, Proposal([5, 5]), [5, 5] if right else [4])
    return counts, sequence


def test_the_first_step_of_a_size_is_not_measured() -> None:
    times = StepTimes()
    assert times.expected(4) is None
    times.add(1, 9.0)
    assert times.expected(1) is None
    times.add(1, 2.0)
    assert times.expected(1) == 2.0
    assert times.expected(4) == pytest.approx(2.0 * 1.05**2)  # a guess
    times.add(4, 9.0)
    times.add(4, 3.0)
    assert times.expected(4) == 3.0
    assert times.expected(8) == pytest.approx(3.0 * 1.05)
    times.add(4, 4.0)
    assert times.expected(4) == 3.5


ROWS_FREE = {1: 1.0, 2: 1.0, 4: 1.05, 8: 1.1, 16: 1.2}
ROWS_DEAR = {1: 1.0, 2: 1.9, 4: 3.6, 8: 7.0, 16: 14.0}


@pytest.mark.parametrize(
    ("times", "share", "least", "most"),
    [
        (ROWS_FREE, 1.0, 15, 15),
        (ROWS_FREE, 0.0, 0, 0),
        (ROWS_FREE, 0.5, 15, 15),
        (ROWS_DEAR, 0.6, 0, 0),
        (ROWS_DEAR, 1.0, 1, 15),
    ],
)
def test_as_many_drafts_as_yield_the_most_tokens_a_second(
    times: dict[int, float], share: float, least: int, most: int
) -> None:
    """If all are right, 16 rows that take 1.2 yield 16 tokens; if none is, one row yields the most. Rows that take as
    long as each alone pay only if nearly all are right."""
    counts, sequence = counts_with(times, share)
    assert least <= counts.choose([(sequence, Proposal([5] * 15))], 1)[0] <= most


def test_rows_of_the_recorded_size_are_free() -> None:
    """Three sequences are computed in a step of four rows."""
    counts, sequence = counts_with({2: 1.0, 4: 2.0, 8: 20.0}, 0.2)
    other = new_sequence([2], 100)
    assert sum(counts.choose([(sequence, Proposal([5] * 3)), (other, Proposal([5] * 3))], 3)) == 1


def test_what_was_dear_is_tried_again() -> None:
    counts, sequence = counts_with({1: 1.0, 2: 5.0, 4: 5.0}, 1.0)
    chosen = [counts.choose([(sequence, Proposal([5] * 3))], 1)[0] for _ in range(TRIAL_EVERY)]
    assert sorted(set(chosen)) == [0, 3] and chosen.count(3) == TRIAL_STEPS
    for _ in range(12):
        counts.time(4, 1.0)
    assert counts.choose([(sequence, Proposal([5] * 3))], 1) == [3]


def test_proposals_that_do_not_pay_become_rare() -> None:
    """After 16 steps without drafts, one step of 8 asks for them, until steps have another size."""
    asked: list[int] = []

    class Source(DraftSource):
        def propose(self, sequences: abc.Sequence[Sequence], most: abc.Sequence[int]) -> list[Proposal]:
            asked.append(len(sequences))
            return [Proposal([5])] * len(sequences)

    scheduler = Scheduler([PagePool(4)], 4, 80)
    drafting = Drafting(Source(), scheduler, NoDrafts())
    step = [(new_sequence([1], 100, request), Chunk(request, 1, [5], [], 1)) for request in range(2)]
    for sequence, _ in step:
        sequence.append(5)
    for _ in range(17 + 16):
        drafting.extend(step[:1])
    assert len(asked) == 17 + 2
    drafting.extend(step)
    assert asked[-1] == 2
