"""The scheduler, pages, states and encodings under random schedules, with a model of the caches that checks each
step."""

from collections import Counter
from collections.abc import Hashable
from typing import Any

from drafting import AllDrafts, Guesses, choose_always, keys_with_drafts
from drafting.slots import Slots
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tilerank.kernels.kv_pages import PAGE_TOKENS
from tilerank.runtime.lead.drafting.drafts import Drafting
from tilerank.runtime.lead.encodings import EncoderCache, EncodeWork
from tilerank.runtime.lead.logits_rules import LogitsRules, TextRules
from tilerank.runtime.lead.pages import Page, PagePool
from tilerank.runtime.lead.sampling import SamplingParams
from tilerank.runtime.lead.scheduler import Scheduler
from tilerank.runtime.lead.sequence import Scheduled, Sequence
from tilerank.runtime.lead.states import StatePool
from tilerank.runtime.protocol.prompt import Medium, PlaceholderRange, Prompt
from tilerank.runtime.protocol.rank_messages import Chunk, Step

BLOCKS, MAX_RUNNING, CHUNK, BUDGET, STATES = 12, 4, 80, 3, 3
NO_RULES = TextRules(LogitsRules(SamplingParams(), frozenset(), 1), ())
COMMON = st.sampled_from((0, 20, PAGE_TOKENS, PAGE_TOKENS + 3, 2 * PAGE_TOKENS, 3 * PAGE_TOKENS))


def new_sequence(prompt: list[int], new_tokens: int, request: int = 0) -> Sequence:
    return Sequence(request, SamplingParams(max_new_tokens=new_tokens), Prompt(prompt), NO_RULES)


def with_picture(before: list[int], kind: int, tokens: int, after: list[int]) -> tuple[Prompt, list[int]]:
    """Return a prompt with picture number `kind` twice, the second time cut in two places, and the bytes of both."""
    medium, digest = Medium("image", b"", (1, 1, 1), (1, 1, 1)), bytes([kind] * 16)
    places = [PlaceholderRange(len(before), tokens, 0, 0), PlaceholderRange(len(before) + tokens + 1, 1, 1, 0)]
    if tokens > 1:
        places.append(PlaceholderRange(places[1].start + 1, tokens - 1, 1, 1))
    token_ids = [*before, *[9] * tokens, 8, *[9] * tokens, *after]
    positions = [[1000 * axis + 2 * i for i in range(len(token_ids))] for axis in range(3)]
    prompt = Prompt(token_ids, [medium, medium], places, positions)
    prompt.digests = [digest, digest]
    return prompt, [1 + kind % 2] * 2


def step_of(scheduler: Scheduler, scheduled: Scheduled) -> Step:
    """Return the message of a step, as Engine makes it."""
    step = Step([chunk for _, chunk in scheduled], list(scheduler.finished))
    scheduler.finished.clear()
    for kind in scheduler.kinds:
        kind.announce(step, scheduled)
    return step


def tree(pool: PagePool) -> list[Page]:
    """Return every page of the tree, parents first."""
    pages = [pool._root]
    for page in pages:
        pages += page.children.values()
    return pages[1:]


class FakeGrammarMask:
    """A mask whose state the test sets."""

    ready = False


class Schedules(RuleBasedStateMachine):
    """Sequences arrive, run, end and are cancelled in any order.

    memory: the content of a real cache. held: the digests of the encodings on a rank, by number. slots: those
    of states, or another kind of cache that checks each step in the same way; None for a model with pages alone.
    """

    slots: Any = None

    def __init__(self) -> None:
        super().__init__()
        states = [] if self.slots is None else [self.slots.pool]
        self.pool = PagePool(BLOCKS, states)
        self.encodings = EncoderCache(BUDGET)
        self.scheduler = Scheduler([*states, self.pool, self.encodings], MAX_RUNNING, CHUNK)
        self.guesses = Guesses()
        self.drafting = Drafting(self.guesses, self.scheduler, AllDrafts())
        self.memory: dict[int, tuple[int, ...]] = {}  # slot -> all prompt keys up to the one whose values are in it
        self.held: dict[int, Hashable] = {}
        self.tables: dict[int, list[int]] = {}  # as another rank holds them
        self.alive: list[Sequence] = []
        self.requests = 0

    # Few tokens and two common beginnings, so that prompts share pages.
    @rule(
        begin=st.integers(0, 1),
        common=COMMON,
        own=st.integers(1, 4) | st.integers(1, 40),
        new=st.integers(1, 80),
        constrained=st.booleans(),
        picture=st.none() | st.tuples(st.integers(0, 2), st.integers(1, 40)),
    )
    def add(
        self, begin: int, common: int, own: int, new: int, constrained: bool, picture: tuple[int, int] | None
    ) -> None:
        start, end = [begin] * common, [2 + self.requests % 3] * own
        sequence = new_sequence(start + end, new, self.requests)
        if picture is not None:
            prompt, nbytes = with_picture(start, *picture, end)
            sequence = Sequence(self.requests, SamplingParams(max_new_tokens=new), prompt, NO_RULES, nbytes)
        self.requests += 1
        if constrained:
            sequence.grammar_mask = FakeGrammarMask()  # type: ignore[assignment]
        if -(-sequence.max_cached // PAGE_TOKENS) <= BLOCKS:
            self.alive.append(sequence)
            self.scheduler.add(sequence)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.alive))
        self.alive.remove(sequence)
        self.scheduler.remove(sequence)

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), ready=st.booleans())
    def compute_mask(self, data: st.DataObject, ready: bool) -> None:
        sequence = data.draw(st.sampled_from(self.alive))
        if sequence.grammar_mask is not None:
            sequence.grammar_mask.ready = ready

    @precondition(lambda self: self.alive)
    @rule(token=st.integers(0, 4), steps=st.integers(1, 40), encodes=st.booleans(), drafts=st.integers(0, 8))
    def run(self, token: int, steps: int, encodes: bool, drafts: int) -> None:
        self.guesses.token, self.guesses.right, self.guesses.wrong = token, *divmod(drafts, 3)
        for _ in range(steps if self.alive else 0):
            if encodes:
                self.encode()
            self.step(token)
            if not self.alive:
                break

    def encode(self) -> None:
        work = self.scheduler.next_work()
        if work is not None:
            self.forget(self.encodings.evicted)
            self.encodings.evicted.clear()
            assert isinstance(work, EncodeWork)
            work.entry.complete()
            self.held[work.entry.number] = work.entry.key

    def forget(self, numbers: list[int]) -> None:
        for number in numbers:
            del self.held[number]

    def step(self, token: int) -> None:
        scheduled = self.scheduler.schedule()
        scheduled = self.drafting.extend(scheduled) if scheduled else scheduled
        waits = self.scheduler.next_work() is not None or not all(sequence.ready for sequence in self.alive)
        assert scheduled or waits, "a sequence waits, and nothing runs"
        step = step_of(self.scheduler, scheduled)
        self.forget(step.forgotten)
        for number in step.finished:
            self.tables.pop(number, None)  # it may end before its first step, which waits for its mask
        assert sum(len(chunk.token_ids) for s, chunk in scheduled if len(chunk.token_ids) > 1 + chunk.drafts) <= CHUNK
        written: set[int] = set()
        for sequence, chunk in scheduled:
            table = self.tables.setdefault(chunk.sequence, [])
            table += chunk.new_pages
            self.check_media(sequence, chunk)
            self.write(sequence, chunk, table, written)
        if self.slots is not None:
            self.slots.step(scheduled, step)
        self.scheduler.publish(scheduled)
        for sequence, chunk in scheduled:
            assert chunk.logits - chunk.drafts == (sequence.cached == len(sequence.tokens)) <= sequence.ready
            if chunk.logits:
                choose_always(token, self.scheduler, sequence, chunk)
                if sequence.finish_reason is not None:
                    self.scheduler.remove(sequence)
                    self.alive.remove(sequence)

    def check_media(self, sequence: Sequence, chunk: Chunk) -> None:
        """Every placeholder, and nothing else, takes its token of its medium. Positions are the prompt's and go on."""
        prompt, inserted = sequence.prompt, {}
        for run in chunk.placeholder_ranges:
            for i in range(run.count):
                inserted[chunk.start + run.start + i] = self.held[run.medium], run.first + i
        span = range(chunk.start, chunk.start + len(chunk.token_ids))
        assert inserted == {
            place.start + i: (prompt.digests[place.medium], place.first + i)
            for place in prompt.placeholder_ranges
            for i in range(place.count)
            if place.start + i in span
        }
        for axis in range(3):
            whole = (prompt.positions or [list(range(sequence.prompt_len))] * 3)[axis]
            expected = [whole[i] if i < sequence.prompt_len else i + prompt.shift for i in span]
            shifted = [i + chunk.shift for i in span]
            assert (chunk.positions[axis] if chunk.positions else shifted) == expected

    def write(self, sequence: Sequence, chunk: Chunk, table: list[int], written: set[int]) -> None:
        def slot(position: int) -> int:
            return table[position // PAGE_TOKENS] * PAGE_TOKENS + position % PAGE_TOKENS

        start, keys, count = chunk.start, keys_with_drafts(sequence, chunk), len(chunk.token_ids) - chunk.drafts
        assert chunk.token_ids[:count] == sequence.tokens[start : start + count] and count
        for position in range(start):
            assert self.memory[slot(position)] == tuple(keys[: position + 1]), "another sequence's values"
        for position in range(start, start + len(chunk.token_ids)):
            assert slot(position) not in written, "two sequences write the same slot in one step"
            written.add(slot(position))
            self.memory[slot(position)] = tuple(keys[: position + 1])

    @invariant()
    def every_page_is_in_one_place(self) -> None:
        pool, running = self.pool, self.scheduler.running
        pages = tree(pool)
        tables = [pool.tables[sequence] for sequence in running]
        own = [block for table in tables for block in table.numbers[len(table.shared) :]]
        copies = [number for page in pages for number in page.copies]
        assert sorted(pool._empty + [page.number for page in pages] + copies + own) == list(range(BLOCKS))
        for page in pages:
            users = [table for table in tables if page in table.shared]
            assert page.users == len(users)
            numbers = [table.numbers[table.shared.index(page)] for table in users]
            assert sorted(n for n in numbers if n != page.number) == sorted(page.copies)
            assert page.number in numbers or not users
            assert (page in pool._idle) == (not users)
            assert page.parent is not None and page.parent.children[page.keys] is page
        assert pool.free == len(pool._empty) + sum(not page.users for page in pages)

    @invariant()
    def every_slot_is_in_one_place(self) -> None:
        if self.slots is not None:
            self.slots.check(self.scheduler.running)

    @invariant()
    def encodings_are_held_for_those_who_need_them(self) -> None:
        cache, running = self.encodings, self.scheduler.running
        assert cache.pool.used == sum(encoding.size for encoding in cache.pool.entries) <= BUDGET
        known = {encoding.number for encoding in cache.pool.entries if encoding.ready}
        assert known == self.held.keys() - set(cache.evicted)
        users = Counter(encoding for sequence in running for encoding in cache.of(sequence).values())
        for encoding in cache.pool.entries:
            assert encoding.users == users.pop(encoding, 0)
            assert (encoding in cache.pool.idle) == (not encoding.users) and (encoding.users or encoding.ready)
        assert not users

    @invariant()
    def arrival_is_kept(self) -> None:
        """Among those that run, and among those that wait; only a sequence that waits for an encoding is overtaken."""
        running, waiting = ([s.request for s in part] for part in (self.scheduler.running, self.scheduler.waiting))
        assert running == sorted(running) and waiting == sorted(waiting)
        assert sorted(running + waiting) == sorted(sequence.request for sequence in self.alive)
        if not any(sequence.prompt.media for sequence in self.alive):
            assert running + waiting == sorted(running + waiting)
        assert len(self.scheduler.running) <= MAX_RUNNING

    def teardown(self) -> None:
        for sequence in self.alive:
            sequence.grammar_mask = None
        while self.alive:
            self.encode()
            self.step(0)
        assert self.pool.free == BLOCKS
        if self.slots is not None:
            self.slots.check([])


class SchedulesWithStates(Schedules):
    def __init__(self) -> None:
        self.slots = Slots(StatePool(STATES))
        super().__init__()


TestSchedules = Schedules.TestCase
TestSchedules.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestSchedulesWithStates = SchedulesWithStates.TestCase
TestSchedulesWithStates.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


def finish(scheduler: Scheduler, *sequences: Sequence) -> int:
    """Run steps until these sequences are complete. Returns the number of computed rows."""
    rows, left = 0, set(sequences)
    while left:
        scheduled = scheduler.schedule()
        rows += sum(len(chunk.token_ids) for _, chunk in scheduled)
        scheduler.publish(scheduled)
        for one, chunk in scheduled:
            if chunk.logits:
                one.append(7)
                if len(one.tokens) - one.prompt_len == one.params.max_new_tokens:
                    scheduler.remove(one)
                    left.discard(one)
    return rows


def test_a_second_prompt_computes_only_what_is_new() -> None:
    scheduler = Scheduler([PagePool(20)], 4, 512)
    common = list(range(100))
    first = new_sequence([*common, 1], 1)
    scheduler.add(first)
    assert finish(scheduler, first) == 101
    second = new_sequence([*common, 2], 1)
    scheduler.add(second)
    assert finish(scheduler, second) == 101 - 96  # three full pages are found

    # A prompt of whole pages is never taken from the tree completely: its last token has to be computed.
    third = new_sequence(common[:96], 1)
    scheduler.add(third)
    assert finish(scheduler, third) == 32


def test_a_common_prompt_is_computed_once() -> None:
    """Choices of one prompt, and prompts with a common beginning, arrive at the same time."""
    prompt = list(range(100))
    for prompts in ([prompt] * 4, [[*prompt[:96], *([i] * 50)] for i in range(4)]):
        scheduler = Scheduler([PagePool(40)], 8, 40)
        alone = new_sequence(list(prompts[0]), 1)
        rest = [new_sequence(list(prompt), 1, i + 1) for i, prompt in enumerate(prompts[1:])]
        stranger = new_sequence([7] * 30, 1, 9)
        for sequence in (alone, *rest, stranger):
            scheduler.add(sequence)
        rows = finish(scheduler, alone, *rest, stranger)
        assert rows == len(prompts[0]) + sum(len(prompt) - 96 for prompt in prompts[1:]) + 30


def test_the_least_recently_used_page_goes_first() -> None:
    pool = PagePool(4)
    scheduler = Scheduler([pool], 1, 512)
    prompts = [[i] * PAGE_TOKENS + [9] for i in range(3)]
    for prompt in (prompts[0], prompts[1], prompts[0], prompts[2]):  # each leaves one page, and 0 is used again
        sequence = new_sequence(list(prompt), 1)
        scheduler.add(sequence)
        finish(scheduler, sequence)
    assert {page.keys[0] for page in tree(pool)} == {0, 1, 2}
    large = new_sequence([5] * (2 * PAGE_TOKENS), 1)  # two pages: the one that was never used, and the one of prompt 1
    scheduler.add(large)
    finish(scheduler, large)
    assert {page.keys[0] for page in tree(pool)} == {0, 2, 5}


def test_the_youngest_is_preempted_and_resumed() -> None:
    pool = PagePool(4)
    scheduler = Scheduler([pool], 4, 512)
    old, young = new_sequence([1] * 31, 70, 0), new_sequence([2] * 31, 40, 1)
    scheduler.add(old)
    scheduler.add(young)
    while len(old.tokens) < 31 + 70:
        scheduled = scheduler.schedule()
        scheduler.publish(scheduled)
        for sequence, chunk in scheduled:
            if chunk.logits:
                sequence.append(3)
    scheduler.remove(old)
    assert scheduler.preemptions >= 1
    kept = list(young.tokens)
    finish(scheduler, young)
    assert young.tokens[: len(kept)] == kept and len(young.tokens) == 31 + 40
    assert pool.free == 4
