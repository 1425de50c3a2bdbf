"""The engine: batches, stop conditions, refusals, sampling, failures."""

import functools
import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from batching import DEMO, requests, single_engine
from ranks import Ranks, eventually, run_ranks
from rungs import COMPILED, needs_compiled
from safetensors.torch import load_file, save_file
from tiny import make_checkpoint

from tilerank.kernels.kv_pages import PAGE_TOKENS
from tilerank.loader.weights import LoadReport, load_weights
from tilerank.parallel.embedding import VocabParallelEmbedding
from tilerank.parallel.parameters import PlainParameter
from tilerank.runtime.lead.engine import Engine, Request
from tilerank.runtime.lead.pages import PagePool
from tilerank.runtime.lead.sampling import SamplingParams, uniform
from tilerank.runtime.models.decoder import Decoder
from tilerank.runtime.protocol.errors import EngineError, RequestError
from tilerank.runtime.protocol.events import FailedEvent, TokenEvent
from tilerank.runtime.protocol.prompt import Prompt

PROMPT = json.loads((DEMO / "eval_tokens.json").read_text())["sequences"][3][:40]


@pytest.fixture(scope="module")
def engine() -> Engine:
    return single_engine(DEMO, dtype=torch.float32, context_length=256, max_total_tokens=512)


def run(engine: Engine, prompt: list[int], **params: Any) -> list[TokenEvent]:
    return list(engine.generate([Request(Prompt(prompt), SamplingParams(**params))]))


# In the absorbed form, which this model always has, as keys and values are as large as two latents.
DEEPSEEK: dict[str, Any] = {"hidden": 96, "vocab": 4200, "layers": 3, "inter": 200, "moe_inter": 80}
DEEPSEEK["config"] = {"kv_lora_rank": 64, "qk_nope_head_dim": 64, "v_head_dim": 64}


@needs_compiled
@pytest.mark.parametrize("kv_dtype", [None, "int8"])
@pytest.mark.parametrize(("tp", "family"), [(1, "demo"), (3, "demo"), (2, "deepseek_v3")])
def test_a_batch_gives_the_bits_of_single_requests(tmp_path: Path, tp: int, family: str, kv_dtype: str | None) -> None:
    """Tokens and log-probabilities; prompts whole and in chunks, alone and mixed with others that decode, from shared
    pages, and after preemption."""
    model = DEMO if family == "demo" else make_checkpoint(family, tmp_path, seed=5, **DEEPSEEK)
    cases = [("bfloat16", rung) for rung in COMPILED]
    if kv_dtype is None:  # the two best rungs have the same kernels in fp32
        cases += [("float32", rung) for rung in COMPILED if rung != "amx"]
    kwargs = {"cases": cases, "model": str(model), "kv_dtype": kv_dtype}
    results = run_ranks(tp, "batching:same_answers", kwargs=kwargs, timeout=300)[0]
    assert results == {f"{rung} {dtype}": [] for dtype, rung in cases}


@pytest.mark.skipif(not COMPILED, reason="nothing is recorded in plain torch")
def test_a_profile_changes_nothing(engine: Engine) -> None:
    expected = [event.token_id for event in run(engine, PROMPT, max_new_tokens=5)]
    assert engine.worker.profile() is None  # nobody watched
    engine.worker.start_profiling()
    found, profiles = [], []
    for event in engine.generate([Request(Prompt(PROMPT), SamplingParams(max_new_tokens=5))]):
        found.append(event.token_id)
        profiles.append(engine.worker.profile())
    assert found == expected
    assert profiles[0] is None  # of a prompt's step, which is recorded to be run once
    for profile in profiles[1:]:
        assert profile is not None and 0 < sum(seconds for _, seconds in profile.entries) <= profile.seconds
        assert {"attention", "linear_f32"} <= {kernel for kernel, _ in profile.entries}


def test_sampling_draws_from_the_warped_distribution_of_every_row(engine: Engine) -> None:
    """Every sampled token is what plain torch draws from the scored logits with the request's own settings."""
    some = requests()
    found: list[list[int]] = [[] for _ in some]
    for event in engine.generate(some):
        found[event.request].append(event.token_id)
    for request, new in zip(some, found, strict=True):
        logits = engine.score(Prompt([*request.prompt.token_ids, *new]))
        for i, token in enumerate(new):
            position = len(request.prompt.token_ids) + i
            assert token == draw(logits[position - 1].double(), request.params, position)


def draw(logits: torch.Tensor, params: SamplingParams, position: int) -> int:
    if params.temperature == 0:
        return int(logits.argmax())
    values, order = (logits / params.temperature).sort(descending=True, stable=True)
    if params.top_k:
        values = values.where(values >= values[params.top_k - 1], -torch.inf)
    p = values.softmax(-1)
    p = p.where(p.cumsum(-1) - p < params.top_p, 0.0)
    p = p / p.sum()
    return int(order[int((p.cumsum(-1) > uniform(params.seed, position)).nonzero()[0])])


def test_uniform_numbers_are_uniform_and_belong_to_seed_and_position() -> None:
    numbers = torch.tensor([uniform(seed, position) for seed in range(40) for position in range(250)]).double()
    assert numbers.min() >= 0 and numbers.max() < 1
    assert len(set(numbers.tolist())) > 9980  # of 2^24 values, 10,000 draws repeat 3 on average
    distance = (numbers.sort().values - (torch.arange(10000) + 0.5) / 10000).abs().max()
    assert distance < 0.0163  # Kolmogorov-Smirnov at 1 %
    by_seed = numbers.view(40, 250)
    assert torch.corrcoef(by_seed).fill_diagonal_(0).abs().max() < 0.3
    assert float(torch.tensor(uniform(7, 9), dtype=torch.float32)) == uniform(7, 9)  # exact in what the kernel takes


def test_seeds_give_texts(engine: Engine) -> None:
    texts = [
        [e.token_id for e in run(engine, PROMPT, max_new_tokens=12, temperature=1.0, seed=seed, ignore_eos=True)]
        for seed in (1, 2, 1)
    ]
    assert texts[0] == texts[2] != texts[1]


@pytest.mark.parametrize(
    "params", [{"temperature": 1e-300}, {"temperature": 1.0, "top_p": 0.0}, {"temperature": 1e6, "top_k": 1}]
)
def test_extremes_that_leave_one_token(engine: Engine, params: dict[str, float]) -> None:
    greedy = [event.token_id for event in run(engine, PROMPT, max_new_tokens=6, ignore_eos=True)]
    assert [e.token_id for e in run(engine, PROMPT, max_new_tokens=6, seed=3, ignore_eos=True, **params)] == greedy


def test_logprobs_are_those_of_the_raw_logits(engine: Engine) -> None:
    events = run(engine, PROMPT, max_new_tokens=8, temperature=1.5, top_k=5, seed=5, logprobs=4, ignore_eos=True)
    logits = engine.score(Prompt([*PROMPT, *(event.token_id for event in events)]))
    for event, row in zip(events, logits[len(PROMPT) - 1 :], strict=False):
        expected = row.double() - row.double().logsumexp(0)
        assert event.logprobs is not None
        assert event.logprobs.chosen == pytest.approx(float(expected[event.token_id]), abs=1e-5)
        ids, values = zip(*event.logprobs.top, strict=True)
        best = expected.topk(4)
        assert list(ids) == best.indices.tolist()
        assert values == pytest.approx(best.values.tolist(), abs=1e-5)
    assert all(event.logprobs is None for event in run(engine, PROMPT, max_new_tokens=2))


def test_ends_after_max_new_tokens(engine: Engine) -> None:
    events = run(engine, PROMPT, max_new_tokens=5, ignore_eos=True)
    assert [event.finish_reason for event in events] == [None] * 4 + ["length"]
    times = [event.time_s for event in events]
    assert times == sorted(times) and times[0] > 0
    assert [event.finish_reason for event in run(engine, PROMPT, max_new_tokens=1)] == ["length"]


def test_ends_at_the_context_length(engine: Engine) -> None:
    events = run(engine, (PROMPT * 7)[:253], max_new_tokens=50, ignore_eos=True)
    assert [event.finish_reason for event in events] == [None, None, "length"]


def test_ends_at_any_end_of_sequence_token(engine: Engine, tmp_path: Path) -> None:
    """generation_config.json lists two; the fourth greedy token is made one of them."""
    whole = [event.token_id for event in run(engine, PROMPT, max_new_tokens=12, ignore_eos=True)]
    end = whole[3]
    model = tmp_path / "model"
    shutil.copytree(DEMO, model)
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [4095, end]}))
    other = single_engine(model, dtype=torch.float32, max_total_tokens=512)
    events = run(other, PROMPT, max_new_tokens=12)
    assert [event.token_id for event in events] == whole[: whole.index(end) + 1]
    assert events[-1].finish_reason == "stop"
    assert [event.token_id for event in run(other, PROMPT, max_new_tokens=12, ignore_eos=True)] == whole


def test_ends_of_the_tokenizer_end_a_text(engine: Engine) -> None:
    """One of them lies beyond the logits, as in a tokenizer with more tokens than its model."""
    whole = [event.token_id for event in run(engine, PROMPT, max_new_tokens=12, ignore_eos=True)]
    ends = (whole[3], 1 << 20)
    events = run(engine, PROMPT, max_new_tokens=12, end_token_ids=ends)
    assert [event.token_id for event in events] == whole[: whole.index(whole[3]) + 1]
    assert events[-1].finish_reason == "stop"
    assert [e.token_id for e in run(engine, PROMPT, max_new_tokens=12, end_token_ids=ends, ignore_eos=True)] == whole
    later = [e.token_id for e in run(engine, PROMPT, max_new_tokens=12, end_token_ids=ends, min_new_tokens=8)]
    assert len(later) >= 9 and whole[3] not in later[:8]


def test_stop_tokens_end_a_text_even_with_ignore_eos(engine: Engine) -> None:
    whole = [event.token_id for event in run(engine, PROMPT, max_new_tokens=12, ignore_eos=True)]
    events = run(engine, PROMPT, max_new_tokens=12, ignore_eos=True, stop_token_ids=(whole[3], 4095))
    assert [event.token_id for event in events] == whole[: whole.index(whole[3]) + 1]
    assert events[-1].finish_reason == "stop"


@pytest.mark.parametrize("tp", [1, 2])
def test_prompts_are_scored_as_transformers_scores_them(tp: int) -> None:
    """In whatever chunks, beside requests that decode, with prefixes in the cache, and after a preemption."""
    sequences = json.loads((DEMO / "eval_tokens.json").read_text())["sequences"]
    prompts = [sequences[0][:200], sequences[0][:200], sequences[0][:170] + sequences[1][:30], sequences[2][:2], [5]]
    results = run_ranks(tp, "batching:prompt_scores", kwargs={"prompts": prompts}, timeout=300)[0]
    expected = [torch.log_softmax(logits, -1) for logits in transformers_logits(prompts)]
    for way, found in results.items():
        for i, ids in enumerate(prompts):
            assert len(found[str(i)]) == len(ids) - 1, way
            for row, token, (chosen, rank, top) in zip(expected[i], ids[1:], found[str(i)], strict=False):
                assert chosen == pytest.approx(float(row[token]), abs=1e-4), way
                best = row.topk(2)
                assert [value for _, value in top] == pytest.approx(best.values.tolist(), abs=1e-4), way
                close = ((row - row[token]).abs() < 1e-4).sum()
                assert 0 <= rank - int((row > row[token] + 1e-4).sum()) <= close, way


@functools.cache
def transformers_model() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)


@torch.inference_mode()
def transformers_logits(prompts: list[list[int]]) -> list[torch.Tensor]:
    return [transformers_model()(torch.tensor([ids])).logits[0] for ids in prompts]


def test_filters_decide_what_comes(engine: Engine) -> None:
    """min_new_tokens, allowed_token_ids and bad_words, and what happens if they leave nothing."""
    plain = [event.token_id for event in run(engine, PROMPT, max_new_tokens=8, ignore_eos=True)]
    ending = plain[2]

    def tokens(**params: Any) -> list[int]:
        return [event.token_id for event in run(engine, PROMPT, max_new_tokens=8, **params)]

    assert tokens(stop_token_ids=(ending,)) == plain[:3]
    later = tokens(stop_token_ids=(ending,), min_new_tokens=5)
    assert len(later) >= 6 and ending not in later[:5]
    assert set(tokens(allowed_token_ids=(5, 9, 300), ignore_eos=True)) <= {5, 9, 300}
    assert tokens(bad_words=((plain[1], plain[2]),), ignore_eos=True)[:2] == plain[:2]
    assert tokens(bad_words=((plain[1], plain[2]),), ignore_eos=True)[2] != plain[2]
    assert tokens(bad_words=((plain[0],),), ignore_eos=True)[0] != plain[0]
    assert tokens(bad_words=((5,),), allowed_token_ids=(5,), ignore_eos=True) == [5] * 8
    for name in ("stop_token_ids", "allowed_token_ids", "bad_words"):
        with pytest.raises(RequestError, match=f"{name}: expected token ids from 0 to 4095, found 4096"):
            tokens(**{name: ((4096,),) if name == "bad_words" else (4096,)})


def test_requests_come_and_go_between_steps(engine: Engine) -> None:
    """Each gets the tokens that it gets alone, whoever joins, leaves or is cancelled meanwhile."""
    wanted = [[e.token_id for e in run(engine, PROMPT[i:], max_new_tokens=20, ignore_eos=True)] for i in range(3)]
    found: dict[int, list[int]] = {}
    numbers = []

    def steps(count: int) -> None:
        for _ in range(count):
            for event in engine.step():
                assert isinstance(event, TokenEvent)
                found.setdefault(event.request, []).append(event.token_id)

    for i in range(3):
        numbers.append(engine.submit(Request(Prompt(PROMPT[i:]), SamplingParams(max_new_tokens=20, ignore_eos=True))))
        steps(4)
    engine.cancel(numbers[1])
    steps(16)
    assert [found[number] for number in numbers] == [wanted[0], wanted[1][:8], wanted[2]]
    assert engine.state().cache_used == 0
    with pytest.raises(RequestError, match="the request: the prompt is empty"):
        engine.submit(Request(Prompt([])))


@pytest.mark.parametrize(
    ("prompt", "new", "says"),
    [
        ([], 1, "request 1: the prompt is empty"),
        ([5, 4096], 1, "request 1: expected token ids from 0 to 4095, found 4096"),
        ([-1], 1, "request 1: expected token ids from 0 to 4095, found -1"),
        ([7] * 256, 1, "request 1: the prompt has 256 tokens, but the context length is 256"),
    ],
)
def test_refuses_a_request_before_any_of_them_runs(engine: Engine, prompt: list[int], new: int, says: str) -> None:
    good = Request(Prompt(PROMPT), SamplingParams(max_new_tokens=2))
    with pytest.raises(RequestError, match=says):
        next(engine.generate([good, Request(Prompt(prompt), SamplingParams(max_new_tokens=new))]))
    assert len(run(engine, PROMPT, max_new_tokens=2, ignore_eos=True)) == 2


def test_refuses_what_the_cache_can_never_hold() -> None:
    small = single_engine(DEMO, dtype=torch.bfloat16, max_total_tokens=64)
    with pytest.raises(RequestError, match="need a KV cache of 65 tokens, found 64"):
        run(small, PROMPT, max_new_tokens=26)
    # The last token's keys are never needed.
    assert len(run(small, PROMPT, max_new_tokens=25, ignore_eos=True)) == 25


POISON = 7


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """The demo model with a head of its own, in which the embedding of POISON is NaN."""
    copy = Path(shutil.copytree(DEMO, tmp_path_factory.mktemp("poisoned") / "model"))
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    tensors = load_file(copy / "model.safetensors")
    head = {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    save_file(tensors | head, copy / "model.safetensors", {"format": "pt"})

    def load_poisoned(model: Decoder, *arguments: Any, **options: Any) -> LoadReport:
        report = load_weights(model, *arguments, **options)
        assert isinstance(model.embedding, VocabParallelEmbedding)
        assert isinstance(model.embedding.table, PlainParameter)
        model.embedding.table.data[POISON] = torch.nan
        return report

    with mock.patch("tilerank.runtime.rank.worker.load_weights", load_poisoned):
        return single_engine(copy, dtype=torch.float32, context_length=256, max_total_tokens=512)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("at", [5, 39], ids=["early", "last"])
def test_requests_whose_logits_are_no_numbers_fail_alone(poisoned: Engine, temperature: float, at: int) -> None:
    """Beside one with the same beginning; none of their pages is kept for later requests."""
    engine, params = poisoned, SamplingParams(max_new_tokens=5, ignore_eos=True, temperature=temperature)
    wrong = [*PROMPT[:at], POISON, *PROMPT[at:]]
    assert POISON not in PROMPT
    good = [PROMPT, PROMPT[3:]]
    expected = [[event.token_id for event in run(engine, one, **asdict(params))] for one in good]
    numbers = [engine.submit(Request(Prompt(prompt), params)) for prompt in (wrong, *good, wrong)]
    found: dict[int, list[Any]] = {number: [] for number in numbers}
    while engine.busy:
        for event in engine.step():
            found[event.request].append(event)
    for number in (numbers[0], numbers[3]):
        (event,) = found[number]
        assert isinstance(event, FailedEvent) and "computes NaN or infinity" in event.sentence
    assert [[event.token_id for event in found[number]] for number in numbers[1:3]] == expected
    assert engine.state().cache_used == 0
    (pool,) = (kind for kind in engine.scheduler.kinds if isinstance(kind, PagePool))
    assert len(pool.prefix(wrong)) * PAGE_TOKENS <= at


def test_a_score_that_is_no_number_fails_the_request(poisoned: Engine) -> None:
    engine, params = poisoned, SamplingParams(max_new_tokens=2, prompt_logprobs=1)
    number = engine.submit(Request(Prompt([*PROMPT, POISON, *PROMPT[:3]]), params))
    events = []
    while engine.busy:
        events += engine.step()
    assert [type(event) for event in events] == [FailedEvent] and events[0].request == number


def test_an_abandoned_batch_gives_its_pages_back(engine: Engine) -> None:
    for _ in range(20):  # 3 x 96 of 512 tokens each time
        events = engine.generate([Request(Prompt(PROMPT), SamplingParams(max_new_tokens=50, seed=i)) for i in range(3)])
        next(events)
        events.close()
    assert engine.state().cache_used == 0
    assert len(run(engine, PROMPT, max_new_tokens=200, ignore_eos=True)) == 200
    assert engine.state().cache_used == 0


def test_scores_a_prompt_of_the_whole_context(engine: Engine) -> None:
    assert engine.score(Prompt((PROMPT * 7)[:256])).shape == (256, 4096)
    with pytest.raises(RequestError, match="257 tokens"):
        engine.score(Prompt((PROMPT * 7)[:257]))


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"max_new_tokens": -1}, "max_new_tokens: expected at least 0, found -1"),
        ({"max_new_tokens": 3, "min_new_tokens": 4}, "min_new_tokens: expected 0 to max_new_tokens, found 4"),
        ({"bad_words": ((),)}, "bad_words"),
        ({"temperature": float("nan")}, "temperature: expected a number from 0 to 1e\\+06, found nan"),
        ({"temperature": -0.5}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"temperature": 1e39}, "temperature"),  # infinite as the kernel's float32
        ({"top_k": -1}, "top_k"),
        ({"top_p": -0.1}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"seed": -1}, "seed"),
        ({"seed": 1 << 64}, "seed"),
        ({"logprobs": -1}, "logprobs"),
    ],
)
def test_refuses_sampling_parameters_that_mean_nothing(params: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError, match=says):
        SamplingParams(**params)


@pytest.mark.parametrize("length", [1, 4097])
def test_refuses_a_context_that_the_model_does_not_have(length: int) -> None:
    with pytest.raises(EngineError, match=f"context length: expected 2 to the model's 4096 tokens, found {length}"):
        single_engine(DEMO, dtype=torch.bfloat16, context_length=length)


@pytest.mark.parametrize("culprit", [0, 2])
def test_a_rank_that_fails_ends_the_others(culprit: int) -> None:
    """Its own error on the culprit, everywhere else a sentence naming it; long before the deadline of a lost rank."""
    with Ranks(3, "batching:fails", kwargs={"culprit": culprit}, timeout_s=600.0) as ranks:
        assert all(ranks.wait(rank, timeout=300.0) != 0 for rank in range(3))
        for rank in range(3):
            says = "ValueError: the culprit's own error" if rank == culprit else f"GroupError: rank {culprit}"
            assert says in eventually(functools.partial(ranks.output, rank), says)
