"""Snapshots of states: which prompts continue them, what is computed again, and what goes when memory is needed."""

from dataclasses import dataclass, field

import pytest
from drafting.slots import Slots

from tests.runtime.test_scheduler import FakeGrammarMask, new_sequence, step_of
from tilerank.kernels.kv_pages import PAGE_TOKENS
from tilerank.runtime.lead.pages import PagePool
from tilerank.runtime.lead.scheduler import Scheduler
from tilerank.runtime.lead.sequence import Sequence
from tilerank.runtime.lead.states import StatePool


@dataclass
class Machine:
    """A scheduler with states, and slots that check that every sequence continues its own."""

    pages: int = 40
    states: int = 10
    chunk_rows: int = 512
    rows: dict[int, int] = field(default_factory=dict)  # computed, by request

    def __post_init__(self) -> None:
        self.pool = StatePool(self.states)
        self.slots = Slots(self.pool)
        self.scheduler = Scheduler([self.pool, PagePool(self.pages, [self.pool])], 8, self.chunk_rows)
        self.requests = 0

    def add(self, prompt: list[int], new_tokens: int = 1) -> Sequence:
        sequence = new_sequence(list(prompt), new_tokens, self.requests)
        self.requests += 1
        self.scheduler.add(sequence)
        return sequence

    def step(self, token: int = 7) -> None:
        scheduled = self.scheduler.schedule()
        self.slots.step(scheduled, step_of(self.scheduler, scheduled))
        self.scheduler.publish(scheduled)
        for sequence, chunk in scheduled:
            self.rows[sequence.request] = self.rows.get(sequence.request, 0) + len(chunk.token_ids)
            if chunk.logits:
                sequence.append(token)
                if len(sequence.tokens) - sequence.prompt_len == sequence.params.max_new_tokens:
                    self.scheduler.remove(sequence)
        self.slots.check(self.scheduler.running)

    def run(self, *sequences: Sequence) -> list[int]:
        """Run until these are complete. Returns how many rows were computed for each."""
        for _ in range(1000):
            if not any(s in self.scheduler.running or s in self.scheduler.waiting for s in sequences):
                break
            self.step()
        return [self.rows[sequence.request] for sequence in sequences]


def tokens(count: int, start: int = 100) -> list[int]:
    return list(range(start, start + count))


def test_a_prompt_is_cut_for_its_snapshot() -> None:
    """At the last 64 tokens that leave out 8: 200 - 8 = 192 = 3 * 64, 199 - 8 = 191 gives 2."""
    for length, cut in ((200, 192), (199, 128), (72, 64), (71, 0), (33, 0)):
        machine = Machine()
        sequence = machine.add(tokens(length))
        machine.step()
        assert machine.rows[0] == (cut or length), length
        machine.run(sequence)
        assert len(machine.pool.pool.idle) == (cut > 0), length


def test_every_turn_of_a_chat_continues_the_one_before() -> None:
    """The answer is not repeated by the next prompt, nor are the last two tokens, which open it: "<think>"."""
    machine, history = Machine(), tokens(150)
    for turn in range(5):
        cached = (len(history) + 2 - 8) // 64 * 64 if turn else 0
        history += tokens(90, start=1000 * (turn + 1))
        assert machine.run(machine.add([*history, 1, 2], 40)) == [len(history) + 2 - cached + 39]
    assert machine.rows[0] == 240 + 2 + 39


def test_generated_tokens_are_continued_too() -> None:
    """The 100 prompt tokens and the first 99 generated ones fill 3 * 64; a prompt repeats and extends them."""
    machine = Machine()
    first = machine.add(tokens(100), 100)
    machine.run(first)
    assert machine.rows[0] == 100 + 99
    # One of the prompt, and one of 192 tokens, for which that of 128 has made room.
    assert len(machine.pool.pool.idle) == 2
    assert machine.run(machine.add([*first.tokens, 8, 9], 1)) == [100 + 100 + 2 - 192]


def test_a_common_beginning_is_computed_twice_and_then_continued() -> None:
    """The first prompt has no snapshot where the others leave it. The second takes one there."""
    machine, common = Machine(), tokens(130)
    rows = [machine.run(machine.add(common + tokens(100, start=1000 * i)))[0] for i in range(1, 5)]
    assert rows == [230, 230, 230 - 128, 230 - 128]


def test_prompts_that_arrive_together_share_their_beginning() -> None:
    machine, common = Machine(), tokens(130)
    together = [machine.add(common + tokens(100, start=1000 * i)) for i in range(1, 5)]
    assert machine.run(*together) == [230, 230, 230 - 128, 230 - 128]
    # The first prompt, of several chunks, is cut where the later ones leave it.
    machine, common = Machine(chunk_rows=70), tokens(130)
    together = [machine.add(common + tokens(100, start=1000 * i)) for i in range(1, 4)]
    assert machine.run(*together) == [230, 230 - 128, 230 - 128]


@pytest.mark.parametrize("length", [200, 199, 192, 193, 194])
def test_the_choices_of_a_request_compute_its_prompt_once(length: int) -> None:
    machine = Machine()
    choices = [machine.add(tokens(length), 3) for _ in range(4)]
    shared = (length - 2) // 64 * 64  # two tokens are left, or more
    assert machine.run(*choices) == [length + 2, *[length + 2 - shared] * 3]


def test_the_least_recently_used_snapshot_goes_first() -> None:
    machine, prompts = Machine(states=4), [tokens(100, start=1000 * i) for i in range(5)]
    for prompt in (prompts[0], prompts[1], prompts[2], prompts[0], prompts[3]):  # one slot is the running sequence's
        machine.run(machine.add(prompt))
    again = [machine.run(machine.add(prompts[i]))[0] for i in (0, 2, 3, 1)]
    assert again == [100 - 64, 100 - 64, 100 - 64, 100]


def test_a_snapshot_may_become_the_sequence_that_continues_it() -> None:
    """There are two slots: the second sequence takes the only one with a snapshot, its own, and copies nothing."""
    machine = Machine(states=2)
    machine.run(machine.add(tokens(100)))
    other = machine.add(tokens(40, start=900), 60)
    machine.step()
    second = machine.add(tokens(100), 60)
    machine.step()
    assert {*map(machine.pool.slot, (other, second))} == {0, 1} and machine.rows[second.request] == 100 - 64
    waiting = machine.add(tokens(40, start=500))
    machine.step()
    assert waiting in machine.scheduler.waiting  # all slots are in use
    machine.run(other, second, waiting)


def test_an_evicted_page_takes_its_snapshot_along() -> None:
    machine = Machine(pages=8)
    machine.run(machine.add(tokens(100)))
    assert len(machine.pool.pool.idle) == 1
    large = machine.add(tokens(7 * PAGE_TOKENS, start=1000))  # of the three full pages, it leaves the first one
    machine.run(large)
    assert machine.run(machine.add(tokens(100))) == [100]


def test_a_preempted_sequence_goes_on_from_its_newest_snapshot() -> None:
    machine = Machine(pages=9)
    old, young = machine.add(tokens(20), 150), machine.add(tokens(100, start=500), 100)
    for _ in range(100):
        machine.step()
        if machine.scheduler.preemptions:
            break
    before = machine.rows[young.request]
    assert 160 < before < 192 and young in machine.scheduler.waiting
    machine.scheduler.remove(old)
    machine.run(young)
    assert machine.rows[young.request] == before + 199 - 128


def test_prompts_are_cut_at_blocks_and_leave_no_single_token() -> None:
    """Two prompts share 150 rows: the second gets a whole block of what the first leaves, and the rest later."""
    machine = Machine(chunk_rows=150)
    first, second = machine.add(tokens(70), 9), machine.add(tokens(300, start=500), 9)
    starts = []
    for _ in range(6):
        scheduled = machine.scheduler.schedule()
        starts += [(chunk.start, len(chunk.token_ids)) for s, chunk in scheduled if s is second and s.uncached > 1]
        machine.slots.step(scheduled, step_of(machine.scheduler, scheduled))
        machine.scheduler.publish(scheduled)
        for sequence, chunk in scheduled:
            if chunk.logits:
                sequence.append(7)
    assert first.cached > 70 and starts == [(0, 64), (64, 128), (192, 64)]
    alone = Machine(chunk_rows=128)
    single = alone.add(tokens(129))
    alone.step()
    assert alone.rows[0] == 64 and alone.run(single) == [129]


def test_a_prompt_waits_for_its_mask_in_front_of_its_last_block() -> None:
    machine = Machine()
    sequence = machine.add(tokens(200), 2)
    mask = FakeGrammarMask()
    sequence.grammar_mask = mask  # type: ignore[assignment]
    machine.step()
    assert sequence.cached == 192 and not machine.scheduler.computable(sequence) and not machine.scheduler.can_step
    machine.step()
    assert sequence.cached == 192
    mask.ready = True
    assert machine.run(sequence) == [201]


def test_a_score_uses_a_slot() -> None:
    machine = Machine(states=1)
    machine.run(machine.add(tokens(100)))
    alone = new_sequence(tokens(50), 1, 9)
    assert machine.scheduler.admit(alone)
    assert (machine.pool.slot(alone), machine.pool.available) == (0, 0)
    machine.scheduler.remove(alone)
    assert machine.pool.available == 1
