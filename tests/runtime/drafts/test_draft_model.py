"""A small model that drafts for another: texts are those of plain decoding, and a model that drafts for itself is
always right, whatever its cache has gone through."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from batching import DEMO, forget, memory_files, prefilled, single_engine
from drafting import without_drafts
from drafting.models import with_draft_model, with_sizes, without_last_layer
from model_configs import LLAMA, write_config
from ranks import run_ranks

from tests.runtime.drafts.test_drafts import PROMPTS, requests, run, texts
from tilerank.launch.bench.public import public_config
from tilerank.loader.errors import ConfigError
from tilerank.parallel.sharding import Sharding
from tilerank.runtime.lead.drafting.draft_depth import DraftDepth
from tilerank.runtime.lead.drafting.model_drafts import MAX_MODEL_DRAFTS
from tilerank.runtime.lead.engine import Engine, Request
from tilerank.runtime.lead.sampling import SamplingParams
from tilerank.runtime.protocol.events import Event
from tilerank.runtime.protocol.prompt import Prompt
from tilerank.runtime.rank.registry import build_draft_model, read_draft_card
from tilerank.runtime.rank.transfer_memory import Transfer


@pytest.fixture(scope="module")
def shorter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return without_last_layer(tmp_path_factory.mktemp("shorter") / "model")


@pytest.fixture(scope="module")
def engine_of() -> Callable[[Path], Engine]:
    """Return what makes an engine for which a model drafts, once for each."""
    made = dict[Path, Engine]()

    def engine(draft_model: Path) -> Engine:
        if draft_model not in made:
            made[draft_model] = single_engine(
                DEMO,
                dtype=torch.float32,
                context_length=256,
                max_total_tokens=1024,
                speculative="draft",
                draft_model=draft_model,
            )
        forget(made[draft_model])
        return made[draft_model]

    return engine


def greedy(new_tokens: int = 40) -> list[Request]:
    params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
    return [Request(Prompt(prompt), params) for prompt in PROMPTS]


def plain(engine: Engine, some: list[Request]) -> list[list[Event]]:
    forget(engine)
    found, _ = run(without_drafts(engine), some)
    forget(engine)
    return found


def test_drafts_change_no_text(engine_of: Callable[[Path], Engine], shorter: Path) -> None:
    """Greedy and sampled; with penalties, bias, filters, log-probabilities and a grammar."""
    engine = engine_of(shorter)
    wanted = plain(engine, requests())
    drafted, _ = run(with_draft_model(engine), requests())
    assert texts(drafted) == texts(wanted)
    assert 0 < engine.drafting.accepted < engine.drafting.drafted


def test_right_drafts_save_steps(engine_of: Callable[[Path], Engine]) -> None:
    """A prompt with the first token, and 40 more: 8 in each of five steps."""
    some = greedy(41)[:1]
    engine = engine_of(DEMO)
    wanted = plain(engine, some)
    drafted, steps = run(with_draft_model(engine), some)
    assert texts(drafted) == texts(wanted) and steps == 6
    assert engine.drafting.drafted == engine.drafting.accepted == 35


@pytest.mark.parametrize(
    ("drafting", "resting", "sizes"),
    [(1, 0, {}), (2, 1, {}), (3, 12, {"chunk_rows": 9}), (1, 0, {"pages": 12}), (2, 3, {"pages": 12})],
)
def test_its_own_draft_model_is_always_right(
    engine_of: Callable[[Path], Engine], drafting: int, resting: int, sizes: dict[str, int]
) -> None:
    """While prompts come in chunks and sequences give way to others; after steps in which it read nothing; and once
    more from shared pages."""
    engine, some = engine_of(DEMO), greedy()
    wanted = texts(plain(engine, some))
    forget(engine, **sizes)
    for _ in range(2):
        found, _ = run(with_draft_model(engine, drafting, resting), some)
        assert texts(found) == wanted
        assert engine.drafting.drafted == engine.drafting.accepted > 30
    assert ("pages" in sizes) == (engine.scheduler.preemptions > 0)
    assert engine.scheduler.hit_tokens > 0 and not engine.state().cache_used


def test_decode_ranks_take_what_it_has_read_of_a_prompt_on_prefill_ranks() -> None:
    """A model that drafts for itself is right only where it has the entries of the prompt."""
    config: dict[str, Any] = {"dtype": torch.float32, "context_length": 256, "max_total_tokens": 1024, "eager": True}
    (request,) = (one for one in greedy() if len(one.prompt.token_ids) == 90)
    with memory_files() as files:
        prefill, decode = (
            single_engine(DEMO, **config, speculative="draft", draft_model=DEMO, transfer=Transfer(files, gives))
            for gives in (True, False)
        )
        given = replace(request, slots=prefilled(with_draft_model(prefill), request))
        found, _ = run(with_draft_model(decode), [given])
    assert decode.state().taken_pages == 2
    assert decode.drafting.drafted == decode.drafting.accepted > 30
    assert texts(found) == texts(plain(decode, [request]))


def test_a_request_can_be_cancelled_between_steps(engine_of: Callable[[Path], Engine]) -> None:
    engine, some = engine_of(DEMO), greedy()
    wanted = texts(plain(engine, some))
    with_draft_model(engine)
    kept = texts(run(engine, some, cancel_first_after=3)[0])
    assert kept[1:] == wanted[1:] and kept[0] == wanted[0][: len(kept[0])] and 1 < len(kept[0]) < 40
    assert engine.drafting.drafted == engine.drafting.accepted


@pytest.mark.parametrize(("vocab", "context"), [(400, 4096), (5000, 64)])
def test_other_sizes_of_vocabulary_and_context(
    engine_of: Callable[[Path], Engine], tmp_path: Path, vocab: int, context: int
) -> None:
    """Tokens that only one of the models has are neither read nor proposed, and nothing is drafted behind the context
    of the draft model."""
    engine = engine_of(with_sizes(tmp_path / "model", vocab, context))
    wanted = plain(engine, greedy())
    found, _ = run(with_draft_model(engine), greedy())
    assert texts(found) == texts(wanted) and engine.drafting.accepted > 0


@pytest.mark.parametrize(("tp", "own"), [(2, True), (3, False)])
def test_ranks_draft_together(shorter: Path, tp: int, own: bool) -> None:
    """Heads of the model and of the draft model are cut alike. Greedy and sampled texts, in chunks, and with too few
    pages for all."""
    job = {"model": str(DEMO), "draft_model": str(DEMO if own else shorter), "prompts": PROMPTS[:4]}
    found = run_ranks(tp, "drafting.models:same_texts", kwargs=job, timeout=300)[0]
    assert not found.pop("others")
    for name, (drafted, accepted) in found.items():
        assert drafted == accepted > 0 if own else drafted > accepted > 0, name


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (public_config("gemma-3-1b"), "model_type: expected a family whose models can draft: .* found 'gemma3_text'"),
        (public_config("qwen3.5-9b"), "model_type: expected a family whose models can draft: .* found 'qwen3_5'"),
        (public_config("qwen3-vl-8b"), "model_type: expected a family whose models can draft: .* found 'qwen3_vl'"),
        (LLAMA | {"architectures": ["LlamaForSequenceClassification"]}, "found one that scores pairs of texts"),
    ],
)
def test_models_that_cannot_draft(tmp_path: Path, config: dict[str, Any], sentence: str) -> None:
    """They have layers with windows, states, an encoder, and no output head."""
    with pytest.raises(ConfigError, match=sentence):
        build_draft_model(
            read_draft_card(write_config(tmp_path, {}, config), 4096), Sharding(0, 1, torch.bfloat16, None)
        )


def depths(depth: DraftDepth, sequences: int, right: int, steps: int) -> list[int]:
    """Return how many tokens are drafted after each of some steps, of which the first `right` are right."""
    found = []
    for _ in range(steps):
        count = depth.choose(sequences)
        found.append(count)
        for _ in range(sequences if count else 0):
            depth.learn(sequences, [1] * count, [1] * min(right, count) + [2] * (right < count))
    return found


def test_drafts_are_made_as_long_as_they_pay() -> None:
    """With a cost of 0.1, and 0.03 of a row, by hand: if all first ones are right and 0.4 of those after a right one,
    two yield 2.4 tokens in 1.26 steps, and three 2.56 in 1.39, which is less a second."""
    assert depths(DraftDepth(0.1, MAX_MODEL_DRAFTS), 1, MAX_MODEL_DRAFTS, 30)[-1] == MAX_MODEL_DRAFTS
    assert depths(DraftDepth(0.1, MAX_MODEL_DRAFTS), 16, MAX_MODEL_DRAFTS, 30)[-1] == 4  # 64 in a step
    depth = DraftDepth(0.1, MAX_MODEL_DRAFTS)
    for number in range(400):
        depth.learn(1, [1, 1], [1, 1] if number % 5 in (0, 3) else [1, 2])
    assert depth.choose(1) == 2
    assert DraftDepth(1.0, MAX_MODEL_DRAFTS).choose(1) == 0  # as large as the model itself


def test_useless_drafts_are_forgotten_and_tried_again() -> None:
    """For a step in about twenty, with one draft. Batches of other sizes are measured apart."""
    depth = DraftDepth(0.2, MAX_MODEL_DRAFTS)
    found = depths(depth, 1, 0, 400)
    assert found[0] == MAX_MODEL_DRAFTS and found[:20].count(0) > 10
    assert found[100:].count(1) + found[100:].count(0) == 300 and 5 < found[100:].count(1) < 20
    assert depth.choose(16) == 4
    assert depths(depth, 1, MAX_MODEL_DRAFTS, 400)[-1] == MAX_MODEL_DRAFTS


def test_drafts_that_are_not_checked_are_useless() -> None:
    depth = DraftDepth(0.2, MAX_MODEL_DRAFTS)
    for _ in range(40):
        depth.learn(16, [1, 1, 1], [])
    assert depth.choose(16) == 0


def test_more_drafts_are_tried_where_the_first_are_right() -> None:
    """A draft that takes 0.4 pays if all are right, whatever was measured of other texts."""
    depth = DraftDepth(0.4, MAX_MODEL_DRAFTS)
    for _ in range(40):
        depth.learn(1, [1, 1], [1, 2])
    assert depth.choose(1) == 1
    assert depths(depth, 1, MAX_MODEL_DRAFTS, 400)[-1] == MAX_MODEL_DRAFTS
