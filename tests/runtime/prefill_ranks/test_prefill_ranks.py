"""Prompts that one group of ranks computes and another continues: the texts are those of ranks that do both.

The groups run one after the other here, with a file as the memory between them.
"""

import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from batching import DEMO, answers, memory_files, prefilled, served, single
from ranks import run_ranks
from tiny import make_checkpoint

from tilerank.parallel.join import Team
from tilerank.runtime.lead import media_encoding
from tilerank.runtime.lead.engine import Engine, Request
from tilerank.runtime.lead.sampling import SamplingParams
from tilerank.runtime.lead.states import StatePool
from tilerank.runtime.lead.transfers import page_reads
from tilerank.runtime.lead.transfers.given_pages import GivenPages
from tilerank.runtime.lead.window_pages import WindowPages
from tilerank.runtime.protocol.areas import Area
from tilerank.runtime.protocol.events import Event, PrefilledEvent, TokenEvent
from tilerank.runtime.protocol.page_requests import SlotReader
from tilerank.runtime.protocol.prompt import Medium, PlaceholderRange, Prompt
from tilerank.runtime.rank.rank_config import RankConfig
from tilerank.runtime.rank.transfer_memory import Transfer
from tilerank.runtime.rank.worker import Worker

NEW = 6
LENGTHS = (150, 64, 33, 170)
"""Of prompts: four full pages and 22 tokens, two pages, a page and a token, and a prompt that begins like the first."""
PROMPT_ALONE = SamplingParams(max_new_tokens=0)
ANSWER = SamplingParams(max_new_tokens=NEW, ignore_eos=True, logprobs=1)
Slots = list[list[int]]
# Of the prompt that begins like the first, three pages are in the slots of that one. A page with the last token is
# not given.
PAGES_ALONE: list[Slots] = [[[0, 1, 2, 3]], [[4]], [[5]], [[0, 1, 2, 6, 7]]]
SLOTS: dict[str, list[Slots]] = {
    "gpt_oss": [[[0, 1, 2, 3], [0, 1, 2]], [[4], [3]], [[5], [4]], [[0, 1, 2, 6, 7], [1, 5, 6]]],
    # States are given after whole blocks of 64 tokens that at least eight follow.
    "qwen3_5": [[[0, 1, 2, 3], [], [0]], [], [], [[0, 1, 2, 4], [], [1]]],
}
# Three pages of the last prompt are in the tree, but neither a window nor states at their end.
TAKEN = {"gpt_oss": 7 + 2 + 2 + 8, "qwen3_5": 5 + 5}
# In the absorbed form, which this model always has: the other one has other bits.
DEEPSEEK: dict[str, Any] = {"hidden": 96, "vocab": 4200, "layers": 3, "inter": 200, "moe_inter": 80}
DEEPSEEK["config"] = {"kv_lora_rank": 64, "qk_nope_head_dim": 64, "v_head_dim": 64}
# A window of which a prompt of some pages needs the last three.
GPT_OSS: dict[str, Any] = {"heads": 10, "kv_heads": 5, "hidden": 104, "inter": 112, "vocab": 777, "layers": 2}
GPT_OSS["config"] = {"sliding_window": 70}
# 3 key heads, and 6 value heads, in three of the layers.
QWEN3_5: dict[str, Any] = {"hidden": 96, "heads": 6, "kv_heads": 3, "head_dim": 32, "inter": 200, "vocab": 600}
QWEN3_5 |= {"layers": 4, "linear_num_key_heads": 3, "linear_num_value_heads": 6}
TINY = {"deepseek_v3": DEEPSEEK, "gpt_oss": GPT_OSS, "qwen3_5": QWEN3_5}
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


def ask(engine: Engine, prompt: list[int], slots: Slots, salt: str = "", **params: Any) -> Answer:
    asked = SamplingParams(max_new_tokens=NEW, ignore_eos=True, logprobs=1, **params)
    tokens = [
        event
        for event in engine.generate([Request(Prompt(prompt, salt=salt), asked, slots=slots)])
        if isinstance(event, TokenEvent) and event.logprobs is not None
    ]
    return [event.token_id for event in tokens], [event.logprobs.chosen for event in tokens if event.logprobs]


def config_of(files: list[str], dtype: str, kv_dtype: str | None, *, gives: bool) -> RankConfig:
    return RankConfig(
        dtype=getattr(torch, dtype),
        kv_dtype=getattr(torch, kv_dtype) if kv_dtype else None,
        max_total_tokens=2560,
        transfer=Transfer(tuple(os.open(file, os.O_RDWR) for file in files), gives),
    )


def given(team: Team, *, model: str, files: list[str], **dtypes: Any) -> list[Slots]:
    """Compute the prompts on prefill ranks and return the slots of each, on rank 0."""
    worker = Worker(Path(model), team, config_of(files, gives=True, **dtypes))
    if team.group.rank != 0:
        worker.follow()
        return []
    found = compute(Engine(worker), *prompts())
    worker.stop()
    return [event.slots for event in found]


def taken(
    team: Team, *, model: str, files: list[str], own_files: list[str], slots: list[Slots], **dtypes: Any
) -> dict[str, Any]:
    """Return, on rank 0, greedy and sampled answers that continue pages of prefill ranks, those of prompts that are
    computed here, and how many pages were taken. own_files: of the decode ranks, if they are on another host."""
    config = config_of(own_files or files, gives=False, **dtypes)
    if own_files:
        assert config.transfer is not None
        reader = SlotReader(partial(served, [os.open(file, os.O_RDONLY) for file in files]), 60)
        config = replace(
            config, transfer=replace(config.transfer, fetches=True, reader=None if team.group.rank else reader)
        )
    worker = Worker(Path(model), team, config)
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
    ("hosts", "prefill", "decode", "family", "dtype", "kv_dtype"),
    [
        (1, 1, 1, "demo", "bfloat16", "int8"),
        (2, 2, 2, "gpt_oss", "bfloat16", None),
        (1, 2, 2, "deepseek_v3", "bfloat16", None),
        (1, 2, 1, "gpt_oss", "float32", None),
        (1, 1, 2, "gpt_oss", "float32", None),
        (2, 1, 1, "qwen3_5", "bfloat16", None),
        (1, 2, 1, "qwen3_5", "float32", None),
        (2, 1, 2, "qwen3_5", "float32", None),
        (1, 3, 2, "demo", "float32", None),
        (2, 1, 2, "deepseek_v3", "float32", None),
    ],
)
def test_texts_are_those_of_ranks_that_do_both(
    tmp_path: Path, hosts: int, prefill: int, decode: int, family: str, dtype: str, kv_dtype: str | None
) -> None:
    """Bit for bit where both groups cut the model alike, and otherwise up to the rounding of sums."""
    model = DEMO if family == "demo" else make_checkpoint(family, tmp_path, seed=5, **TINY[family])
    files, own_files = ([tmp_path / f"{area.name} {host}" for area in Area] for host in range(2))
    for file in files + own_files:
        file.touch()
    kwargs: dict[str, Any] = {"model": str(model), "files": [*map(str, files)], "dtype": dtype, "kv_dtype": kv_dtype}
    here = "tests.runtime.prefill_ranks.test_prefill_ranks"
    slots = run_ranks(prefill, f"{here}:given", kwargs=kwargs)[0]
    assert slots == [one + [[]] * (len(Area) - len(one)) for one in SLOTS.get(family, PAGES_ALONE)]
    kwargs |= {"slots": slots, "own_files": [*map(str, own_files)] if hosts == 2 else []}
    found = run_ranks(decode, f"{here}:taken", kwargs=kwargs)[0]
    assert found["pages"] == [TAKEN.get(family, 4 + 1 + 1 + 2), 0, 2 * sum(LENGTHS)]
    for name in ("greedy", "sampled"):
        apart, together = found[name], found[f"{name} computed here"]
        if prefill == decode:
            assert apart == together
        for (tokens, logprobs), (same_tokens, same_logprobs) in zip(apart, together, strict=True):
            assert tokens == same_tokens and len(tokens) == NEW
            assert logprobs == pytest.approx(same_logprobs, abs=1e-3)


@pytest.fixture(scope="module")
def files() -> Iterator[tuple[int, ...]]:
    with memory_files() as files:
        yield files


def engine_of(model: Path, files: tuple[int, ...], *, gives: bool, tokens: int = 640) -> Engine:
    config = RankConfig(dtype=torch.float32, max_total_tokens=tokens, eager=True, transfer=Transfer(files, gives))
    return Engine(Worker(model, single(), config))


@pytest.fixture(scope="module")
def engine(files: tuple[int, ...]) -> Engine:
    """A prefill rank whose cache, and the memory beside it, has six pages."""
    return engine_of(DEMO, files, gives=True, tokens=192)


def test_prompts_wait_while_all_slots_are_pinned(engine: Engine) -> None:
    """Slots are pinned until the request is cancelled. Then others have them; those of a prompt that comes again keep
    its pages."""
    first, other = prompts()[0], prompts()[3][100:165]
    (one,) = compute(engine, first)
    assert (engine.state().transfer_slots, engine.state().transfer_slots_used) == (6, 4)
    (two,) = compute(engine, other)
    assert engine.state().transfer_slots_used == 6 and not {*one.slots[0]} & {*two.slots[0]}
    waiting = engine.submit(Request(Prompt(prompts()[1]), PROMPT_ALONE))
    assert [engine.step() for _ in range(3)] == [[]] * 3 and engine.busy
    engine.cancel(two.request)
    (event,) = (event for event in engine.step() if isinstance(event, PrefilledEvent))
    assert event.request == waiting and {*event.slots[0]} < {*two.slots[0]}
    given = engine.state().given_pages
    for request in (one.request, waiting):
        engine.cancel(request)
    assert engine.state().transfer_slots_used == 0
    (again,) = compute(engine, first)
    assert again.slots == one.slots and engine.state().given_pages == given
    engine.cancel(again.request)


def test_a_prompt_that_is_cancelled_pins_nothing(engine: Engine) -> None:
    engine.scheduler.chunk_rows = 32
    running = engine.submit(Request(Prompt(prompts()[0][::-1]), PROMPT_ALONE))
    assert engine.step() == [] and engine.state().transfer_slots_used == 4
    engine.cancel(running)
    assert not engine.busy and engine.state().transfer_slots_used == 0
    engine.scheduler.chunk_rows = 2048


@pytest.fixture(scope="module", params=["gpt_oss", "qwen3_5"])
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, files: tuple[int, ...]
) -> tuple[Engine, Engine]:
    """A prefill rank and a decode rank of a model that keeps more than pages."""
    model = make_checkpoint(request.param, tmp_path_factory.mktemp("pair"), seed=5, **TINY[request.param])
    return engine_of(model, files, gives=True), engine_of(model, files, gives=False)


def unused(engine: Engine) -> bool:
    """Return whether no sequence has any page or state."""
    pools = [kind.pool for kind in engine.scheduler.kinds if isinstance(kind, WindowPages | StatePool)]
    return engine.state().cache_used == 0 and not any(pool.pinned for pool in pools)


def test_pages_that_are_gone_are_computed(pair: tuple[Engine, Engine]) -> None:
    """The slots of another prompt have other pages: as if the prefill ranks had started again. The first prompt has
    nothing in the tree. The second has a beginning there, whose window is released before pages are missed."""
    prefill, decode = pair
    first, longer = prompts()[0][::-1], [*prompts()[0][::-1], *prompts()[3]]
    (given,) = compute(prefill, [*first[1:], *longer])
    prefill.cancel(given.request)
    for prompt, pages in ((first, 4), (longer, 8)):
        before, slots = decode.state(), [given.slots[0][:pages], *given.slots[1:]]
        answer = ask(decode, prompt, slots)
        assert decode.state().missed_prompts == before.missed_prompts + 1
        assert decode.state().taken_pages == before.taken_pages and unused(decode)
        assert answer == ask(decode, prompt, [], f"computed here {pages}")


def test_what_is_taken_in_pieces_may_be_interrupted(
    pair: tuple[Engine, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a cancellation, which leaves nothing, and by a preemption, after which it is taken again."""
    monkeypatch.setattr(page_reads, "PIECE_BYTES", 1)
    for name in ("BESIDE_S", "ALONE_S"):
        monkeypatch.setattr(media_encoding, name, 0.0)
    prefill, decode = pair
    prompt = prompts()[3][::-1]
    (given,) = compute(prefill, prompt)
    request = Request(Prompt(prompt), ANSWER, slots=given.slots)
    cancelled = decode.submit(request)
    before, missed = decode.state().taken_pages, decode.state().missed_prompts
    while decode.state().taken_pages < before + 4:
        assert decode.step() == []
    decode.cancel(cancelled)
    assert decode.step() == [] and unused(decode)
    decode.submit(request)
    before = decode.state().taken_pages
    while decode.state().taken_pages < before + 4:
        assert decode.step() == []
    decode.scheduler.preempt()
    decode.encoding.stop_if_unused()
    found: list[Event] = []
    while decode.busy:
        found += decode.step()
    taken = decode.state().taken_pages - before
    assert taken > sum(map(len, given.slots)) and decode.state().missed_prompts == missed
    tokens = [event for event in found if isinstance(event, TokenEvent) and event.logprobs is not None]
    answer = [event.token_id for event in tokens], [event.logprobs.chosen for event in tokens if event.logprobs]
    assert answer == ask(decode, prompt, [], "computed here")
    prefill.cancel(given.request)


def test_a_prompt_that_the_cache_has_is_given_at_once(pair: tuple[Engine, Engine]) -> None:
    """Another end than that of a prompt before leaves nothing to compute for prefill ranks. Where slots have been used
    for other prompts, it is given from the cache."""
    prefill, decode = pair
    first = [7, *prompts()[3]]
    prompt = [*first[:-3], 1, 2, 3]
    (one,) = compute(prefill, first)
    before = prefill.state()
    (two,) = compute(prefill, prompt)
    assert two.slots == one.slots and prefill.state().given_pages == before.given_pages
    for event in (one, two):
        prefill.cancel(event.request)
    assert unused(prefill) and prefill.state().transfer_slots_used == 0
    (given,) = (kind for kind in prefill.scheduler.kinds if isinstance(kind, GivenPages))
    for pool in given._slots:
        for entry in list(pool.idle):
            pool.remove(entry)
    (again,) = compute(prefill, prompt)
    assert prefill.state().given_pages == before.given_pages + sum(map(len, again.slots))
    assert prefill.state().prompt_tokens == before.prompt_tokens
    missed = decode.state().missed_prompts
    assert ask(decode, prompt, again.slots) == ask(decode, prompt, [], "computed here")
    assert decode.state().missed_prompts == missed
    prefill.cancel(again.request)


def test_a_picture_that_is_seen_whole_is_not_divided(tmp_path: Path, files: tuple[int, ...]) -> None:
    """Two pages end before the last token, the second one within the picture: the first alone is given."""
    model = make_checkpoint("gemma3", tmp_path, layers=3)
    pixels = bytes(torch.randint(0, 256, (48 * 64 * 3,), generator=torch.Generator().manual_seed(1)).tolist())
    picture = Medium("image", pixels, (1, 48, 64), (1, 8, 8))
    ids, places = [*prompts()[0][:56], *[7] * 16, *prompts()[1][:10]], [PlaceholderRange(56, 16, 0, 0)]
    apart, together = (Request(Prompt(ids, [picture], places, salt=salt), ANSWER) for salt in ("", "computed here"))
    slots = prefilled(engine_of(model, files, gives=True), apart)
    assert [len(one) for one in slots] == [1, 1, 0, 0]
    decode = engine_of(model, files, gives=False)
    assert answers(decode, [replace(apart, slots=slots)]) == answers(decode, [together])
    assert decode.state().taken_pages == 2


def test_prefill_ranks_continue_prompts_from_files(tmp_path: Path, files: tuple[int, ...]) -> None:
    """As after a restart: nothing of the prompt is computed but its last tokens, by the decode rank."""
    config = RankConfig(
        dtype=torch.float32, max_total_tokens=640, eager=True, transfer=Transfer(files, True), kv_dir=tmp_path / "kv"
    )
    request, slots = Request(Prompt(prompts()[0]), ANSWER), list[Slots]()
    for computed in (128, 0):
        prefill = Engine(Worker(DEMO, single(), config))
        slots.append(prefilled(prefill, request))
        assert prefill.state().prompt_tokens == computed
        assert prefill.worker.store is not None
        prefill.worker.store.close()
    decode = engine_of(DEMO, files, gives=False)
    assert ask(decode, prompts()[0], slots[-1]) == ask(decode, prompts()[0], [], "computed here")
    assert decode.state().taken_pages == 4
