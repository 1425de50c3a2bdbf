"""The scheduler and the page pool under random schedules, with a model of the cache that checks each step."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tilerank.kernels.kv_pages import PAGE_TOKENS
from tilerank.runtime.encodings import EncoderCache
from tilerank.runtime.pages import Page, PagePool
from tilerank.runtime.prompt import Prompt
from tilerank.runtime.sampling import SamplingParams
from tilerank.runtime.scheduler import Scheduler, Sequence

BLOCKS, MAX_RUNNING, CHUNK = 12, 4, 80
COMMON = st.sampled_from((0, 20, PAGE_TOKENS, PAGE_TOKENS + 3, 2 * PAGE_TOKENS, 3 * PAGE_TOKENS))


def new_sequence(prompt: list[int], new_tokens: int, request: int = 0) -> Sequence:
    return Sequence(request, SamplingParams(max_new_tokens=new_tokens), Prompt(prompt))


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
    """Sequences arrive, run, end and are cancelled in any order. `memory`: the content of a real cache."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(BLOCKS)
        self.scheduler = Scheduler(self.pool, EncoderCache(0), max_running=MAX_RUNNING, chunk_rows=CHUNK)
        self.memory: dict[int, tuple[int, ...]] = {}  # slot -> all tokens up to the one whose keys are in it
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
    )
    def add(self, begin: int, common: int, own: int, new: int, constrained: bool) -> None:
        prompt = [begin] * common + [2 + self.requests % 3] * own
        sequence = new_sequence(prompt, new, self.requests)
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
    @rule(token=st.integers(0, 4), steps=st.integers(1, 40))
    def run(self, token: int, steps: int) -> None:
        for _ in range(steps if self.alive else 0):
            self.step(token)
            if not self.alive:
                break

    def step(self, token: int) -> None:
        scheduled = self.scheduler.schedule()
        assert scheduled or not all(sequence.ready for sequence in self.alive), "a sequence waits, and nothing runs"
        for number in self.scheduler.finished:
            self.tables.pop(number, None)  # it may end before its first step, which waits for its mask
        self.scheduler.finished.clear()
        assert sum(len(chunk.token_ids) for s, chunk in scheduled if len(chunk.token_ids) > 1) <= CHUNK
        written: set[int] = set()
        for sequence, chunk in scheduled:
            table = self.tables.setdefault(chunk.sequence, [])
            table += chunk.new_pages
            self.write(sequence, chunk.start, chunk.token_ids, table, written)
        self.scheduler.publish(scheduled)
        for sequence, chunk in scheduled:
            assert chunk.logits == (sequence.cached == len(sequence.tokens)) <= sequence.ready
            if chunk.logits:
                sequence.append(token)
                if len(sequence.tokens) - sequence.prompt_len >= sequence.params.max_new_tokens:
                    self.scheduler.remove(sequence)
                    self.alive.remove(sequence)

    def write(self, sequence: Sequence, start: int, token_ids: list[int], table: list[int], written: set[int]) -> None:
        def slot(position: int) -> int:
            return table[position // PAGE_TOKENS] * PAGE_TOKENS + position % PAGE_TOKENS

        tokens = sequence.tokens
        assert token_ids == tokens[start : start + len(token_ids)] and token_ids
        for position in range(start):
            assert self.memory[slot(position)] == tuple(tokens[: position + 1]), "another sequence's keys"
        for position in range(start, start + len(token_ids)):
            assert slot(position) not in written, "two sequences write the same slot in one step"
            written.add(slot(position))
            self.memory[slot(position)] = tuple(tokens[: position + 1])

    @invariant()
    def every_page_is_in_one_place(self) -> None:
        pool, running = self.pool, self.scheduler.running
        pages = tree(pool)
        own = [block for sequence in running for block in sequence.table.own]
        assert sorted(pool._empty + [page.number for page in pages] + own) == list(range(BLOCKS))
        for page in pages:
            users = [sequence for sequence in running if page in sequence.table.shared]
            assert page.users == len(users)
            assert (page in pool._idle) == (not users)
            assert page.parent is not None and page.parent.children[page.keys] is page
        assert pool.free == len(pool._empty) + sum(not page.users for page in pages)

    @invariant()
    def arrival_is_kept(self) -> None:
        order = [sequence.request for sequence in [*self.scheduler.running, *self.scheduler.waiting]]
        assert order == sorted(order)
        assert sorted(order) == sorted(sequence.request for sequence in self.alive)
        assert len(self.scheduler.running) <= MAX_RUNNING

    def teardown(self) -> None:
        for sequence in self.alive:
            sequence.grammar_mask = None
        while self.alive:
            self.step(0)
        assert self.pool.free == BLOCKS


TestSchedules = Schedules.TestCase
TestSchedules.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


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
    scheduler = Scheduler(PagePool(20), EncoderCache(0), max_running=4, chunk_rows=512)
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
        scheduler = Scheduler(PagePool(40), EncoderCache(0), max_running=8, chunk_rows=40)
        alone = new_sequence(list(prompts[0]), 1)
        rest = [new_sequence(list(prompt), 1, i + 1) for i, prompt in enumerate(prompts[1:])]
        stranger = new_sequence([7] * 30, 1, 9)
        for sequence in (alone, *rest, stranger):
            scheduler.add(sequence)
        rows = finish(scheduler, alone, *rest, stranger)
        assert rows == len(prompts[0]) + sum(len(prompt) - 96 for prompt in prompts[1:]) + 30


def test_the_least_recently_used_page_goes_first() -> None:
    pool = PagePool(4)
    scheduler = Scheduler(pool, EncoderCache(0), max_running=1, chunk_rows=512)
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
    scheduler = Scheduler(pool, EncoderCache(0), max_running=4, chunk_rows=512)
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
