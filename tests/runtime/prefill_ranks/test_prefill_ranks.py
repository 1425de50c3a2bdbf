"""Prompts that one group of ranks computes and another continues: the texts are those of ranks that do both.

The groups run one after the other here, with a file as the memory between them.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from batching import DEMO, single
from ranks import run_ranks
from tiny import make_checkpoint

from tilerank.parallel.join import Team
from tilerank.runtime.lead.engine import Engine, Request
from tilerank.runtime.lead.sampling import SamplingParams
from tilerank.runtime.protocol.events import PrefilledEvent, TokenEvent
from tilerank.runtime.protocol.prompt import Prompt
from tilerank.runtime.rank.rank_config import RankConfig
from tilerank.runtime.rank.transfer_memory import Transfer
from tilerank.runtime.rank.worker import Worker

NEW = 6
LENGTHS = (150, 64, 33, 170)
"""Of prompts: four full pages and 22 tokens, two pages, a page and a token, and a prompt that begins like the first."""
PROMPT_ALONE = SamplingParams(max_new_tokens=0)
# In the absorbed form, which this model always has: the other one has other bits.
DEEPSEEK: dict[str, Any] = {"hidden": 96, "vocab": 4200, "layers": 3, "inter": 200, "moe_inter": 80}
DEEPSEEK["config"] = {"kv_lora_rank": 64, "qk_nope_head_dim": 64, "v_head_dim": 64}
Answer = tuple[list[int], list[float]]


def prompts() -> list[list[int]]:
    made = [
        torch.randint(0, 500, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
        for seed, length in enumerate(LENGTHS)
    ]
    made[3][:100] = made[0][:100]
    return made


def compute(engine: Engine, *some: list[int]) -> list[PrefilledEvent]:
    """Return where the pages of prompts are."""
    for prompt in some:
        engine.submit(Request(Prompt(prompt), PROMPT_ALONE))
    found: list[PrefilledEvent] = []
    while engine.busy:
        found += [event for event in engine.step() if isinstance(event, PrefilledEvent)]
    return sorted(found, key=lambda event: event.request)


def ask(engine: Engine, prompt: list[int], slots: list[int], salt: str = "", **params: Any) -> Answer:
    asked = SamplingParams(max_new_tokens=NEW, ignore_eos=True, logprobs=1, **params)
    tokens = [
        event
        for event in engine.generate([Request(Prompt(prompt, salt=salt), asked, slots=slots)])
        if isinstance(event, TokenEvent) and event.logprobs is not None
    ]
    return [event.token_id for event in tokens], [event.logprobs.chosen for event in tokens if event.logprobs]


def config_of(fd: int, dtype: str, kv_dtype: str | None, *, gives: bool) -> RankConfig:
    return RankConfig(
        dtype=getattr(torch, dtype),
        kv_dtype=getattr(torch, kv_dtype) if kv_dtype else None,
        max_total_tokens=2560,
        transfer=Transfer(fd, gives),
    )


def given(team: Team, *, model: str, file: str, **dtypes: Any) -> list[list[int]]:
    """Compute the prompts on prefill ranks and return the slots of each, on rank 0."""
    worker = Worker(Path(model), team, config_of(os.open(file, os.O_RDWR), gives=True, **dtypes))
    if team.group.rank != 0:
        worker.follow()
        return []
    found = compute(Engine(worker), *prompts())
    worker.stop()
    return [event.slots for event in found]


def taken(team: Team, *, model: str, file: str, slots: list[list[int]], **dtypes: Any) -> dict[str, Any]:
    """Return, on rank 0, greedy and sampled answers that continue pages of prefill ranks, those of prompts that are
    computed here, and how many pages were taken."""
    worker = Worker(Path(model), team, config_of(os.open(file, os.O_RDWR), gives=False, **dtypes))
    if team.group.rank != 0:
        worker.follow()
        return {}
    engine, found = Engine(worker), dict[str, Any]()
    for name, params in (("greedy", {}), ("sampled", {"temperature": 1.0, "seed": 5})):
        for salt in ("", "computed here"):
            found[f"{name} {salt}".strip()] = [
                ask(engine, prompt, [] if salt else where, f"{salt} {name}" if salt else "", **params)
                for prompt, where in zip(prompts(), slots, strict=True)
            ]
    state = engine.state()
    found["pages"] = [state.taken_pages, state.missed_prompts, state.queried_tokens]
    worker.stop()
    return found


@pytest.mark.parametrize(
    ("prefill", "decode", "family", "dtype", "kv_dtype"),
    [
        (1, 1, "demo", "bfloat16", "int8"),
        (2, 2, "demo", "bfloat16", None),
        (2, 2, "deepseek_v3", "bfloat16", None),
        (2, 1, "demo", "float32", None),
        (1, 2, "demo", "float32", None),
        (3, 2, "demo", "float32", None),
        (1, 2, "deepseek_v3", "float32", None),
    ],
)
def test_texts_are_those_of_ranks_that_do_both(
    tmp_path: Path, prefill: int, decode: int, family: str, dtype: str, kv_dtype: str | None
) -> None:
    """Bit for bit where both groups cut the model alike, and otherwise up to the rounding of sums."""
    model = DEMO if family == "demo" else make_checkpoint(family, tmp_path, seed=5, **DEEPSEEK)
    file = tmp_path / "pages"
    file.touch()
    kwargs: dict[str, Any] = {"model": str(model), "file": str(file), "dtype": dtype, "kv_dtype": kv_dtype}
    here = "tests.runtime.prefill_ranks.test_prefill_ranks"
    slots = run_ranks(prefill, f"{here}:given", kwargs=kwargs)[0]
    # Of the prompt that begins like the first, three pages are in the slots of that one.
    assert slots == [[0, 1, 2, 3], [4, 5], [6], [0, 1, 2, 7, 8]]
    found = run_ranks(decode, f"{here}:taken", kwargs=kwargs | {"slots": slots})[0]
    # A page that ends with the prompt is not taken, and of the last prompt three pages are in the tree.
    assert found["pages"] == [4 + 1 + 1 + 2, 0, 2 * sum(LENGTHS)]
    for name in ("greedy", "sampled"):
        apart, together = found[name], found[f"{name} computed here"]
        if prefill == decode:
            assert apart == together
        for (tokens, logprobs), (same_tokens, same_logprobs) in zip(apart, together, strict=True):
            assert tokens == same_tokens and len(tokens) == NEW
            assert logprobs == pytest.approx(same_logprobs, abs=1e-3)


@pytest.fixture
def file() -> Iterator[int]:
    fd = os.memfd_create("pages")
    yield fd
    os.close(fd)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """A prefill rank whose cache, and the memory beside it, has six pages."""
    fd = os.memfd_create("pages")
    config = RankConfig(dtype=torch.float32, max_total_tokens=192, eager=True, transfer=Transfer(fd, True))
    yield Engine(Worker(DEMO, single(), config))
    os.close(fd)


def test_prompts_wait_while_all_slots_are_pinned(engine: Engine) -> None:
    """Slots are pinned until the request is cancelled. Then others have them; those of a prompt that comes again keep
    its pages."""
    first, other = prompts()[0], prompts()[3][100:164]
    (one,) = compute(engine, first)
    assert (engine.state().transfer_slots, engine.state().transfer_slots_used) == (6, 4)
    (two,) = compute(engine, other)
    assert engine.state().transfer_slots_used == 6 and not {*one.slots} & {*two.slots}
    waiting = engine.submit(Request(Prompt(prompts()[1]), PROMPT_ALONE))
    assert [engine.step() for _ in range(3)] == [[]] * 3 and engine.busy
    engine.cancel(two.request)
    (event,) = (event for event in engine.step() if isinstance(event, PrefilledEvent))
    assert event.request == waiting and {*event.slots} == {*two.slots}
    given = engine.state().given_pages
    for request in (one.request, waiting):
        engine.cancel(request)
    assert engine.state().transfer_slots_used == 0
    (again,) = compute(engine, first)
    assert again.slots == one.slots and engine.state().given_pages == given
    engine.cancel(again.request)


def test_a_prompt_that_is_cancelled_pins_nothing(engine: Engine) -> None:
    engine.scheduler.chunk_rows = 32
    running = engine.submit(Request(Prompt(prompts()[1][::-1]), PROMPT_ALONE))
    assert engine.step() == [] and engine.state().transfer_slots_used == 2
    engine.cancel(running)
    assert not engine.busy and engine.state().transfer_slots_used == 0


def test_pages_that_are_gone_are_computed(engine: Engine, file: int) -> None:
    """Another memory file has none of them: as if the prefill ranks had started again."""
    config = RankConfig(dtype=torch.float32, max_total_tokens=640, eager=True, transfer=Transfer(file, False))
    decode = Engine(Worker(DEMO, single(), config))
    (given,) = compute(engine, prompts()[0])
    engine.cancel(given.request)
    answer = ask(decode, prompts()[0], given.slots)
    assert answer == ask(decode, prompts()[0], [], "computed here")
    assert (decode.state().taken_pages, decode.state().missed_prompts) == (0, 1)
