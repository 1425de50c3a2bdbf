"""States of sequences with a tiny Qwen3.5: prompts that continue snapshots, chunks cut everywhere, preemption, padding.

A prompt that continues a snapshot is compared with the same prompt computed whole: their bits are the same, unless the
snapshot is of generated tokens, or a chunk is cut inside a block of the delta rule.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from batching import answers, forget, single_engine
from drafting import Lengths, always_right, always_wrong, mixed, with_drafts, without_drafts
from media_prompts import LARGE, SMALL, VIDEO, medium, text
from media_prompts import ask as ask_for
from media_prompts import prompt as prompt_with
from ranks import run_ranks
from rungs import COMPILED, needs_compiled
from tiny import make_checkpoint

from tilerank.kernels.state_slots import StateSlots
from tilerank.parallel.join import Team
from tilerank.runtime.lead import engine as module
from tilerank.runtime.lead.engine import Engine, Request
from tilerank.runtime.lead.sampling import SamplingParams
from tilerank.runtime.protocol.events import ScoredEvent
from tilerank.runtime.protocol.prompt import Prompt
from tilerank.runtime.rank.rank_config import RankConfig
from tilerank.runtime.rank.worker import Worker

DENSE: dict[str, Any] = {
    "family": "qwen3_5",
    "hidden": 96,
    "heads": 6,
    "kv_heads": 3,
    "head_dim": 32,
    "inter": 200,
    "vocab": 600,
    "layers": 4,
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 6,
}
MIXTURE = DENSE | {"family": "qwen3_5_moe", "experts": 6, "topk": 2, "moe_inter": 80}
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Answer:
    """tokens and their log-probabilities; computed: how many tokens of the prompt were computed."""

    tokens: list[int]
    logprobs: list[float]
    computed: int

    def check_near(self, other: "Answer") -> None:
        assert self.tokens == other.tokens
        assert max(abs(a - b) for a, b in zip(self.logprobs, other.logprobs, strict=True)) < TOLERANCE


@pytest.fixture(scope="module", params=[DENSE, MIXTURE], ids=["dense", "mixture"])
def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    model = make_checkpoint(tmp=tmp_path_factory.mktemp("states"), **request.param)
    return single_engine(model, dtype=torch.float32, max_total_tokens=2048, states=12, speculative="ngram")


def fresh(shared: Engine, *, states: int = 12, pages: int | None = None, chunk_rows: int = 2048) -> Engine:
    """Return the engine, without drafts, and without pages and snapshots of earlier prompts. Its slots hold what these
    have left there."""
    forget(shared, states=states, pages=pages, chunk_rows=chunk_rows)
    return without_drafts(shared)


def request(prompt: list[int], new: int) -> Request:
    return Request(Prompt(prompt), SamplingParams(max_new_tokens=new, ignore_eos=True, logprobs=1))


def ask(engine: Engine, prompt: list[int], new: int = 24) -> Answer:
    before = engine.state().prompt_tokens
    events = list(engine.generate([request(prompt, new)]))
    logprobs = [event.logprobs.chosen for event in events if event.logprobs is not None]
    return Answer([event.token_id for event in events], logprobs, engine.state().prompt_tokens - before)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 600, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@needs_compiled
@pytest.mark.parametrize("length", [1, 64, 65, 66, 129, 193, 200, 385])
def test_the_size_of_chunks_changes_no_bit_of_an_answer(shared: Engine, length: int) -> None:
    prompt = prompt_of(length)
    whole = ask(fresh(shared), prompt)
    for rows in (128, 200, 300):
        found = ask(fresh(shared, chunk_rows=rows), prompt)
        assert (found.tokens, found.logprobs) == (whole.tokens, whole.logprobs)


@pytest.mark.parametrize("rows", [1, 7, 33, 63, 64, 65, 100, 128])
def test_chunks_cut_everywhere_give_the_scores_of_the_whole_prompt(
    shared: Engine, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = Prompt(prompt_of(131))
    monkeypatch.setattr(module, "SCORE_ROWS", 131)
    whole = fresh(shared).score(prompt)
    monkeypatch.setattr(module, "SCORE_ROWS", rows)
    assert (fresh(shared).score(prompt) - whole).abs().max() < TOLERANCE


def test_prompts_are_scored_beside_each_other(shared: Engine) -> None:
    """Of three prompts, two of which are equal, in steps that they share."""
    engine, prompts = fresh(shared), [prompt_of(150), prompt_of(200, 1), prompt_of(150)]
    params = SamplingParams(max_new_tokens=2, ignore_eos=True, prompt_logprobs=0)
    numbers = [engine.submit(Request(Prompt(prompt), params)) for prompt in prompts]
    found: dict[int, list[float]] = {number: [] for number in numbers}
    while engine.busy:
        for event in engine.step():
            if isinstance(event, ScoredEvent):
                found[event.request] += [one.chosen for one in event.logprobs]
    for number, prompt in zip(numbers, prompts, strict=True):
        rows = torch.log_softmax(fresh(shared).score(Prompt(prompt)), -1)
        expected = rows[torch.arange(len(prompt) - 1), prompt[1:]].tolist()
        assert found[number] == pytest.approx(expected, abs=TOLERANCE)


def test_a_chat_continues_its_snapshots(shared: Engine) -> None:
    prompts, answers = chat(fresh(shared))
    snapshots = [0, *((len(prompt) - 8) // 64 * 64 for prompt in prompts)]
    for prompt, answer, cached in zip(prompts, answers, snapshots, strict=False):
        assert answer.computed == len(prompt) - cached
        whole = ask(fresh(shared), prompt)
        answer.check_near(whole)
        if COMPILED:
            assert answer.logprobs == whole.logprobs


def chat(engine: Engine) -> tuple[list[list[int]], list[Answer]]:
    """Return the prompts and the answers of four turns. Each repeats the prompt of the one before and what was
    answered, but not how the answer began."""
    history, prompts, answers = prompt_of(100), [], []
    for turn in range(4):
        prompts.append([*history, 5, 6])
        answers.append(ask(engine, prompts[-1]))
        history += [*answers[-1].tokens[2:], *prompt_of(90, seed=turn + 1)]
    return prompts, answers


def chat_on_ranks(team: Team, *, model: str) -> list[tuple[list[int], int]]:
    worker = Worker(Path(model), team, RankConfig(dtype=torch.float32, max_total_tokens=2048, states=3))
    if team.group.rank != 0:
        worker.follow()
        return []
    _, answers = chat(Engine(worker))
    worker.stop()
    return [(answer.tokens, answer.computed) for answer in answers]


@pytest.mark.parametrize("tp", [2, 5])
def test_every_rank_continues_the_snapshots(shared: Engine, tp: int) -> None:
    """Five ranks share three groups of heads: the last ones have no states."""
    _, answers = chat(fresh(shared))
    kwargs = {"model": str(shared.worker.model_dir)}
    found = run_ranks(tp, "tests.runtime.test_states_model:chat_on_ranks", kwargs=kwargs)[0]
    assert [tuple(answer) for answer in found] == [(answer.tokens, answer.computed) for answer in answers]


def test_generated_tokens_are_continued(shared: Engine) -> None:
    engine, prompt = fresh(shared), prompt_of(90)
    first = ask(engine, prompt, 120)
    longer = [*prompt, *first.tokens, *prompt_of(10, seed=1)]
    second = ask(engine, longer)
    assert second.computed == len(longer) - 192  # of 209 cached tokens
    second.check_near(ask(fresh(shared), longer))


def test_requests_with_one_beginning_continue_it_together(shared: Engine) -> None:
    """The first is computed whole, and the second as well, up to where they part; the others continue from there."""
    prompts = [[*prompt_of(140), *prompt_of(70, seed=i)] for i in range(1, 6)]
    engine = fresh(shared)
    before = engine.state().prompt_tokens
    tokens: list[list[int]] = [[] for _ in prompts]
    for event in engine.generate([request(prompt, 24) for prompt in prompts]):
        tokens[event.request].append(event.token_id)
    assert engine.state().prompt_tokens - before == 2 * 210 + 3 * (210 - 128)
    assert tokens == [ask(fresh(shared), prompt).tokens for prompt in prompts]


def test_the_preempted_give_the_answers_of_the_others(shared: Engine) -> None:
    """There are pages for two of four sequences that grow, and slots for their snapshots only now and then."""
    prompts = [prompt_of(40 + 9 * i, seed=i) for i in range(4)]
    wanted = [ask(fresh(shared), prompt, 70).tokens for prompt in prompts]
    for states in (4, 12):
        engine = fresh(shared, states=states, pages=9)
        tokens: list[list[int]] = [[] for _ in prompts]
        for event in engine.generate([request(prompt, 70) for prompt in prompts]):
            tokens[event.request].append(event.token_id)
        assert tokens == wanted
        assert engine.state().preemptions > 0


def long_requests(count: int, new: int) -> list[Request]:
    """Return requests whose texts pass the ends of blocks, greedy and sampled."""
    made = []
    for i in range(count):
        params = SamplingParams(
            max_new_tokens=new + 9 * i, temperature=(0.0, 0.8)[i % 2], seed=i, ignore_eos=True, logprobs=1
        )
        made.append(Request(Prompt(prompt_of(40 + 37 * i, seed=i)), params))
    return made


@needs_compiled
@pytest.mark.parametrize("lengths", [always_right, always_wrong, mixed])
def test_drafts_change_no_bit_of_an_answer(shared: Engine, lengths: Lengths) -> None:
    """There are slots for two of four sequences: prompts of others come while states have drafts to take in."""
    some = long_requests(4, 70)
    wanted = answers(fresh(shared), some)
    for states in (2, 12):
        engine = with_drafts(fresh(shared, states=states), some, wanted, lengths)
        assert answers(engine, some) == wanted
        assert engine.drafting.drafted > 100 and (engine.drafting.accepted > 0) == (lengths is not always_wrong)


@needs_compiled
def test_the_preempted_are_drafted_again(shared: Engine) -> None:
    """There are pages for two of four sequences that grow, and slots for their snapshots only now and then."""
    some = long_requests(4, 70)
    wanted = answers(fresh(shared), some)
    for states in (4, 12):
        engine = with_drafts(fresh(shared, states=states, pages=10), some, wanted)
        found = answers(engine, some)
        assert [[token for token, *_ in answer] for answer in found] == [[token for token, *_ in a] for a in wanted]
        assert engine.state().preemptions > 0


@needs_compiled
def test_a_prompt_continues_the_snapshot_of_a_drafted_answer(shared: Engine) -> None:
    """Its states are those of an answer without drafts, bit for bit."""
    prompt = prompt_of(90)
    some = [Request(Prompt(prompt), SamplingParams(max_new_tokens=120, ignore_eos=True, logprobs=1))]
    engine = fresh(shared)
    wanted = answers(engine, some)
    longer = [*prompt, *(token for token, *_ in wanted[0]), *prompt_of(10, seed=1)]
    continued = ask(engine, longer)
    for lengths in (always_right, mixed):
        engine = with_drafts(fresh(shared), some, wanted, lengths)
        assert answers(engine, some) == wanted
        assert ask(without_drafts(engine), longer) == continued
        assert continued.computed == len(longer) - 192  # of 209 cached tokens


def test_no_step_touches_a_slot_of_no_sequence_in_it(shared: Engine) -> None:
    """Three sequences decode in a step padded to four rows; the other slots keep what they hold, bit for bit."""
    engine = fresh(shared, states=12)
    layers = [cache for cache in shared.worker._caches if isinstance(cache, StateSlots)]
    for cache in layers:
        cache.conv.fill_(7.0)
        cache.state.fill_(-3.0)
    events = engine.generate([request(prompt_of(20, seed=i), 10) for i in range(3)])
    assert len(list(events)) == 30
    assert layers and all((cache.conv[3:] == 7.0).all() and (cache.state[3:] == -3.0).all() for cache in layers)
    assert not any((cache.state[:3] == -3.0).any() for cache in layers)


@needs_compiled
def test_pictures_in_a_mixed_batch_give_the_bits_of_single_requests(shared: Engine) -> None:
    """Steps of 64 rows end inside of a picture and between two: the state that one leaves is continued by the next."""
    prompts = [
        prompt_with(text(4, 90)),
        prompt_with(text(1, 50), LARGE, text(2, 60), SMALL, text(3, 3)),
        prompt_with(VIDEO, text(5, 70)),
        prompt_with(text(6, 1)),
    ]
    requests = [ask_for(one, 8) for one in prompts]
    alone = [answers(fresh(shared), [one])[0] for one in requests]
    for rows in (2048, 64):
        assert answers(fresh(shared, chunk_rows=rows), requests) == alone
    other = prompt_with(text(1, 50), medium(9, 5, 8), text(2, 60), SMALL, text(3, 3))
    assert answers(fresh(shared), [ask_for(other, 8)])[0] != alone[1]


def test_as_many_requests_run_as_there_are_slots(shared: Engine) -> None:
    engine = fresh(shared, states=3)
    for i in range(5):
        engine.submit(request(prompt_of(20, seed=i), 4))
    engine.step()
    state = engine.state()
    assert (state.running, state.waiting) == (3, 2)
    while engine.busy:
        engine.step()


def test_a_score_is_that_of_the_whole_prompt(shared: Engine) -> None:
    """In chunks of 128 rows; the log-probabilities of an answer follow from the scores before its tokens."""
    engine, prompt = fresh(shared), prompt_of(300)
    answer = ask(engine, prompt, 8)
    logits = engine.score(Prompt([*prompt, *answer.tokens]))
    expected = logits[len(prompt) - 1 : -1].double().log_softmax(-1)
    for token, logprob, row in zip(answer.tokens, answer.logprobs, expected, strict=True):
        assert logprob == pytest.approx(float(row[token]), abs=TOLERANCE)


@pytest.mark.parametrize(("speculative", "drafts"), [("off", 0), ("ngram", 7)])
def test_sizes_that_a_worker_derives(tmp_path: Path, speculative: str, drafts: int) -> None:
    model = make_checkpoint(tmp=tmp_path, **DENSE)
    found = single_engine(model, dtype=torch.float32, max_total_tokens=20000, speculative=speculative).worker
    slots = [cache.state.shape[0] for cache in found._caches if isinstance(cache, StateSlots)]
    assert found.states == 10 and slots == [10] * 3
    channels = 2 * 3 * 32 + 6 * 32
    of_draft = (2 * channels + 2 * 6) * 4  # inputs of the convolution, q, k and v, and gates
    state = 3 * (6 * 32 * 32 * 4 + 3 * channels * 4 + drafts * of_draft)
    assert found.cache_bytes == state * 10 + found.cache_tokens * 2 * 3 * 32 * 4
