"""Pages of layers with a window: what a sequence holds, which prompts continue where, and what waits for memory."""

from collections import Counter
from dataclasses import dataclass, field

import pytest
from drafting import keys_with_drafts
from drafting.slots import path
from hypothesis import settings

from tests.runtime.test_scheduler import Schedules, new_sequence, step_of, tree
from tilerank.kernels.kv_pages import PAGE_TOKENS
from tilerank.runtime.lead.pages import Page, PagePool
from tilerank.runtime.lead.scheduler import Scheduler
from tilerank.runtime.lead.sequence import Scheduled, Sequence
from tilerank.runtime.lead.window_pages import WindowPages
from tilerank.runtime.protocol.rank_messages import Step
from tilerank.runtime.protocol.sizes import num_window_tokens, tokens_for
from tilerank.runtime.step.batch import RankSequence


class Windows:
    """The pages of layers with a window as a worker holds them: of each slot, the keys up to that of its values."""

    def __init__(self, pages: int, window: int) -> None:
        self.pool = WindowPages(pages, window)
        self.window = window
        self.memory: dict[int, tuple[int, ...]] = {}
        self.held: dict[int, RankSequence] = {}
        self.most = 0  # pages that sequences held in a step

    def step(self, scheduled: Scheduled, step: Step) -> None:
        """Write the tokens of all chunks, then read what each row attends to."""
        for number in step.finished:
            self.held.pop(number, None)
        for number, index, pages in step.window_pages:
            self.held.setdefault(number, RankSequence()).add_window_pages(index, pages)
        written = set[int]()
        for sequence, chunk in scheduled:
            held = self.held[chunk.sequence]
            stop = chunk.start + len(chunk.token_ids)
            assert len(held.window_pages) == -(-stop // PAGE_TOKENS)
            for position in range(chunk.start, stop):
                slot = self.slot(held, position)
                assert slot not in written
                written.add(slot)
                self.memory[slot] = tuple(keys_with_drafts(sequence, chunk)[: position + 1])
        for sequence, chunk in scheduled:
            held, stop = self.held[chunk.sequence], chunk.start + len(chunk.token_ids)
            keys = keys_with_drafts(sequence, chunk)
            for position in range(max(chunk.start - self.window + 1, 0), stop):
                assert self.memory[self.slot(held, position)] == tuple(keys[: position + 1])
        self.most = max(self.most, self.pool.pool.pinned)

    @staticmethod
    def slot(held: RankSequence, position: int) -> int:
        return held.window_pages[position // PAGE_TOKENS] * PAGE_TOKENS + position % PAGE_TOKENS

    def check(self, running: list[Sequence]) -> None:
        """Every page is in one place, every entry has the users that hold it, and idle ones those of the tree."""
        kind, pool = self.pool, self.pool.pool
        numbers = [number for entry in pool.entries for number in entry.numbers]
        assert sorted(numbers + pool._free) == list(range(pool.capacity))
        users = Counter(entry for window in kind._windows.values() for entry in window.entries)
        assert kind._windows.keys() == set(running)
        assert sum(window.quota for window in kind._windows.values()) == kind._reserved <= pool.capacity
        for window in kind._windows.values():
            assert len(window.entries) <= window.quota <= -(-(self.window - 1) // PAGE_TOKENS) + 1
        for entry in pool.entries:
            assert entry.users == users[entry] and (entry in pool.idle) == (not entry.users)
            if entry.ready:
                assert isinstance(entry.key, Page)
                keys, (number,) = path(entry.key), entry.numbers
                found = [self.memory[number * PAGE_TOKENS + i] for i in range(PAGE_TOKENS)]
                assert found == [keys[: len(keys) - PAGE_TOKENS + i + 1] for i in range(PAGE_TOKENS)]


class SchedulesWithWindows(Schedules):
    """Random schedules; four sequences would hold 16 pages of windows."""

    def __init__(self) -> None:
        self.slots = Windows(12, 70)
        super().__init__()


TestSchedulesWithWindows = SchedulesWithWindows.TestCase
TestSchedulesWithWindows.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)


@dataclass
class Machine:
    """A scheduler with windows, which are checked in each step. rows: computed, by request."""

    window: int = 64
    window_pages: int = 40
    pages: int = 100
    chunk_rows: int = 512
    rows: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.windows = Windows(self.window_pages, self.window)
        self.tree = PagePool(self.pages, [self.windows.pool])
        self.scheduler = Scheduler([self.windows.pool, self.tree], 8, self.chunk_rows)
        self.requests = 0

    def add(self, prompt: list[int], new_tokens: int = 1) -> Sequence:
        sequence = new_sequence(list(prompt), new_tokens, self.requests)
        self.requests += 1
        self.scheduler.add(sequence)
        return sequence

    def step(self, token: int = 7) -> Step:
        scheduled = self.scheduler.schedule()
        step = step_of(self.scheduler, scheduled)
        self.windows.step(scheduled, step)
        self.scheduler.publish(scheduled)
        for sequence, chunk in scheduled:
            self.rows[sequence.request] = self.rows.get(sequence.request, 0) + len(chunk.token_ids)
            if chunk.logits:
                sequence.append(token)
                if len(sequence.tokens) - sequence.prompt_len == sequence.params.max_new_tokens:
                    self.scheduler.remove(sequence)
        self.windows.check(self.scheduler.running)
        return step

    def run(self, *sequences: Sequence) -> list[int]:
        """Run until these are complete. Returns how many rows were computed for each."""
        for _ in range(2000):
            if not any(s in self.scheduler.running or s in self.scheduler.waiting for s in sequences):
                break
            self.step()
        return [self.rows[sequence.request] for sequence in sequences]


def tokens(count: int, start: int = 100) -> list[int]:
    return list(range(start, start + count))


def test_a_sequence_holds_its_window_and_its_chunk() -> None:
    """64 tokens see 63 before them, in 2 pages; a chunk of 96 tokens takes 3 more, and a token that decodes 1."""
    machine = Machine(chunk_rows=96)
    sequence = machine.add(tokens(400), 100)
    steps = [machine.step() for _ in range(5)]
    assert [(index, len(pages)) for step in steps for _, index, pages in step.window_pages] == [
        (0, 3),
        (3, 3),
        (6, 3),
        (9, 3),
        (12, 1),
    ]
    assert machine.windows.most == 5
    machine.windows.most = 0
    machine.run(sequence)
    assert machine.windows.most == 3 and machine.windows.pool.pool.pinned == 0


@pytest.mark.parametrize("window", [1, 2, 31, 32, 33, 34, 64, 65, 97])
def test_windows_that_end_anywhere_in_a_page(window: int) -> None:
    """A sequence that decodes holds at most the page of its next token and those of the window - 1 tokens before."""
    machine = Machine(window, chunk_rows=50)
    sequence = machine.add(tokens(130), 150)
    for _ in range(3):
        machine.step()
    machine.windows.most = 0
    assert machine.run(sequence) == [279]
    assert machine.windows.most == -(-(window - 1) // 32) + 1


def test_a_repeated_prompt_is_found_when_its_answer_has_slid_past_it() -> None:
    """Of 300 tokens, 9 full pages; the window at their end is kept while the 200 tokens of the answer slide."""
    machine = Machine(window_pages=10)
    first = machine.add(tokens(300), 200)
    machine.run(first)
    assert machine.run(machine.add(tokens(300)), machine.add([*first.tokens[:499], 8])) == [300 - 288, 500 - 480]


def test_a_beginning_that_is_no_end_is_kept_while_there_is_room() -> None:
    """The second prompt leaves the tree where the first one slid on. In a small pool, the first two pages are left of
    what they share. Then these pages are the end of a prefix, and are kept."""
    common = tokens(130)
    for pages, rows in ((40, [430, 430 - 128, 430 - 128]), (6, [430, 430 - 64, 430 - 128])):
        machine = Machine(window_pages=pages, chunk_rows=64)
        found = [machine.run(machine.add(common + tokens(300, start=1000 * i)))[0] for i in (1, 2, 3)]
        assert found == rows


def test_prompts_that_arrive_together_share_their_beginning() -> None:
    """The first one keeps the window where the others leave it, though it goes on by ten pages in a small pool."""
    machine, common = Machine(window_pages=12, chunk_rows=64), tokens(130)
    together = [machine.add(common + tokens(300, start=1000 * i)) for i in range(1, 4)]
    assert machine.run(*together) == [430, 430 - 128, 430 - 128]


def test_the_choices_of_a_request_compute_its_prompt_once() -> None:
    machine = Machine()
    choices = [machine.add(tokens(200), 3) for _ in range(4)]
    assert machine.run(*choices) == [202, *[202 - 192] * 3]


def test_a_prefix_is_shared_as_far_as_the_window_is_held() -> None:
    """The pages of the second window are gone, so that a prompt continues at the end of the first."""
    machine = Machine(window_pages=40)
    machine.run(machine.add(tokens(300)))
    pool = machine.windows.pool.pool
    pages = {len(path(page)) // PAGE_TOKENS: page for page in tree(machine.tree)}
    pool.remove(pool[pages[6]])
    assert machine.run(machine.add([*tokens(250), 1])) == [251 - 160]  # of 7 pages, 5
    pool.remove(pool[pages[4]])
    assert machine.run(machine.add([*tokens(190), 2])) == [190 + 1 - 96]


def test_a_sequence_waits_for_the_pages_of_its_window() -> None:
    """Of 9 pages, windows take 3 each, and the chunk of a prompt up to 5 of its own for the time of its step."""
    machine = Machine(window_pages=9, chunk_rows=400)
    first, second = machine.add(tokens(256), 200), machine.add(tokens(256, start=1000), 50)
    step = machine.step()
    assert [len(chunk.token_ids) for chunk in step.chunks] == [256] and second in machine.scheduler.waiting
    step = machine.step()  # both: 3 pages are held, and 6 are left
    assert [len(chunk.token_ids) for chunk in step.chunks] == [1]
    third = machine.add(tokens(20, start=500), 3)
    machine.run(first)
    assert machine.run(second, third) == [256 + 49, 20 + 2]
    assert machine.scheduler.preemptions == 0


def test_chunks_are_shortened_to_what_other_sequences_leave() -> None:
    """Of 13 pages, three short sequences reserve one each, and two once they grow. A prompt of ten pages gets the rest,
    and no other sequence is admitted before it is computed."""
    kind = WindowPages(13, 64)
    long, *short = [new_sequence(tokens(length), 100, i) for i, length in enumerate((320, 20, 20, 20))]
    for sequence in (long, *short):
        assert kind.reserve(sequence)
        kind.commit(sequence)
    assert not kind.reserve(new_sequence(tokens(20), 1, 4))
    assert kind.limit(long, 320) == 320
    for sequence in short:
        sequence.cached = 32
        assert kind.grow(sequence)
    assert kind.limit(long, 320) == 7 * 32 and kind.limit(long, 200) == 200


def test_the_youngest_gives_way_when_windows_grow() -> None:
    """Two sequences begin with one page each and grow to three, but there are five."""
    machine = Machine(window_pages=5)
    old, young = machine.add(tokens(20), 150), machine.add(tokens(20, start=500), 150)
    machine.step()
    assert len(machine.scheduler.running) == 2
    while not machine.scheduler.preemptions:
        machine.step()
    assert young in machine.scheduler.waiting
    machine.run(old, young)
    # It had 64 tokens in two full pages, and continued after them.
    assert machine.rows[old.request] == 169 and machine.rows[young.request] <= 169 + 32


def test_pages_with_values_that_are_not_shared_are_empty_at_once() -> None:
    machine = Machine()
    sequence = machine.add(tokens(300), 50)
    for _ in range(10):
        machine.step()
    machine.scheduler.remove(sequence, share=False)
    assert machine.windows.pool.pool.used == 0
    machine.windows.check([])


def test_an_evicted_page_takes_that_of_its_window_along() -> None:
    machine = Machine(pages=8)
    machine.run(machine.add(tokens(100)))
    assert len(machine.windows.pool.pool.idle) == 3
    machine.run(machine.add(tokens(7 * PAGE_TOKENS, start=1000)))
    assert {page for entry in machine.windows.pool.pool.idle if isinstance(page := entry.key, Page)} <= set(
        tree(machine.tree)
    )


def test_the_room_for_windows_follows_from_the_tokens_of_the_cache() -> None:
    """At least 8 windows and a chunk, an eighth of the tokens, at most what 256 sequences use; never more than all."""
    assert num_window_tokens(1 << 20, 0) == num_window_tokens(0, 128) == 0
    assert num_window_tokens(1000, 128) == 1000
    assert num_window_tokens(10000, 128) == 8 * (128 + 64) + 2048
    assert num_window_tokens(131072, 1024) == 131072 // 8
    assert num_window_tokens(1 << 20, 128) == 256 * (128 + 64) + 2048


def test_a_cache_has_room_for_sequences_that_run_at_once() -> None:
    """By hand: 16 states need 16 x 2,048 tokens; 16 windows of 512 and 64 tokens and a chunk, 8 times their tokens."""
    assert tokens_for(16, 300, states=False, window=0) == 16 * 300
    assert tokens_for(8, 300, states=True, window=0) == 8 * 300
    assert tokens_for(16, 300, states=True, window=0) == 16 * 2048
    assert tokens_for(16, 300, states=False, window=512) == 16 * 300
    assert tokens_for(16, 1100, states=False, window=512) == 8 * (16 * 576 + 2048)
    assert num_window_tokens(tokens_for(16, 1100, states=False, window=512), 512) == 16 * 576 + 2048
