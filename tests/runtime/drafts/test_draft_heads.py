"""The draft heads of checkpoints: what is read of them, what they hold and take, and which models have none.

test_conformance.py compares their logits and drafts with transformers, test_step_graphs.py recorded passes with eager
ones.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from batching import answers, memory_files, prefilled, single_engine
from drafting import AllDrafts, NoDrafts
from model_configs import write_config
from safetensors.torch import load_file, save_file
from tiny import make_checkpoint

from tilerank.kernels.kv_pages import KVPages
from tilerank.launch.bench.public import public_config
from tilerank.loader.card import read_card
from tilerank.loader.checkpoint import Checkpoint
from tilerank.loader.errors import CheckpointError, ConfigError
from tilerank.loader.weights import load_weights
from tilerank.parallel.sharding import Sharding
from tilerank.runtime.lead.drafting.drafts import Drafting
from tilerank.runtime.lead.drafting.head_drafts import HeadDrafts
from tilerank.runtime.lead.engine import Request
from tilerank.runtime.lead.pages import PagePool
from tilerank.runtime.lead.sampling import SamplingParams
from tilerank.runtime.protocol.prompt import Prompt
from tilerank.runtime.protocol.rank_messages import Draft
from tilerank.runtime.protocol.sizes import KEPT_ROWS
from tilerank.runtime.rank.registry import build_model
from tilerank.runtime.rank.transfer_memory import Transfer
from tilerank.runtime.step.bytes_per_step import bytes_per_draft
from tilerank.runtime.step.cache import bytes_per_token
from tilerank.runtime.step.model import Model

TINY: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"hidden": 96, "inter": 104, "layers": 2, "experts": 8, "moe_inter": 48, "vocab": 400},
    "glm4_moe": {"hidden": 96, "inter": 104, "layers": 2, "vocab": 400, "config": {"draft_vocab_size": 53}},
    "qwen3_5_moe": {"hidden": 96, "layers": 4, "experts": 4, "moe_inter": 48, "vocab": 400},
}


@pytest.fixture(params=TINY, ids=str)
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return make_checkpoint(request.param, tmp_path, **TINY[request.param])


def built(model_dir: Path, *, draft_head: bool) -> Model:
    return build_model(replace(read_card(model_dir), draft_head=draft_head), Sharding(0, 1, torch.bfloat16, None))


def load(model: Model, model_dir: Path) -> None:
    load_weights(model, Checkpoint(model_dir), ignore=model.ignore, progress=False)


def test_a_head_is_read_only_if_it_is_used(checkpoint: Path) -> None:
    plain, drafting = (built(checkpoint, draft_head=used) for used in (False, True))
    for model in (plain, drafting):
        load(model, checkpoint)
    names = [{rectangle.name for rectangle in model.rectangles()} for model in (plain, drafting)]
    head = drafting.draft_head
    assert head is not None
    of_head = {name for name in names[1] if name.startswith(head.module)}
    assert names[1] - names[0] == of_head and len(of_head) > 10
    # All of the head is read but its copies of the embedding and the output head of the model.
    ignored = {
        name for name in Checkpoint(checkpoint).tensors if name.startswith(head.module) and drafting.ignore(name)
    }
    copies = {"embed_tokens.weight", "shared_head.head.weight"} if "deepseek" in checkpoint.name else set[str]()
    assert ignored == {f"{head.module}{name}" for name in copies}
    # A layer more of the cache; the projection from twice the hidden size, and the hidden states of a step, in bf16.
    specs = [model.cache_specs() for model in (plain, drafting)]
    assert len(specs[1]) == len(specs[0]) + 1 and bytes_per_token(specs[1]) > bytes_per_token(specs[0])
    assert drafting.nbytes() - plain.nbytes() > 2 * 96 * (2 * 96 + KEPT_ROWS)


def test_a_head_that_is_not_whole_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    """A tensor that is missing, one that the model has no place for, and a checkpoint that has lost all of the head."""
    head, stored = built(checkpoint, draft_head=True).draft_head, Checkpoint(checkpoint)
    assert head is not None
    norm = next(name for name in stored.tensors if name.startswith(head.module) and "input_layernorm" in name)
    tensors = {name: x for file in checkpoint.glob("*.safetensors") for name, x in load_file(file).items()}
    write_config(tmp_path, {}, dict(read_card(checkpoint).fields.values))
    without = {name: x for name, x in tensors.items() if name != norm}
    more, lost = f"{norm}_2", {name: x for name, x in tensors.items() if not name.startswith(head.module)}
    for changed, sentence in (
        (without, f"the model needs tensor {norm}, found in no file"),
        (tensors | {more: tensors[norm].clone()}, f"the model has no place for tensor {more}"),
        (lost, "--speculative mtp: expected a checkpoint with a multi-token-prediction head"),
    ):
        save_file(changed, tmp_path / "model.safetensors")
        with pytest.raises((CheckpointError, ConfigError), match=sentence):
            load(built(tmp_path, draft_head=True), tmp_path)


def test_a_family_without_heads(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"expected a family with multi-token-prediction heads .* found 'llama'"):
        built(write_config(tmp_path, {}), draft_head=True)


def test_the_head_of_deepseek(tmp_path: Path) -> None:
    """By hand, with the whole embedding and output head left out: the layer of the public model has 11.5 G weights, of
    which the experts are 256 times 3 * 7168 * 2048, and the projection is 7168 * 14336."""
    card = read_card(write_config(tmp_path, {}, public_config("deepseek-v3.1")))
    plain, drafting = (
        build_model(replace(card, draft_head=used), Sharding(0, 1, torch.bfloat16, None)).parameters()
        for used in (False, True)
    )
    attention = 7168 * 1536 + 1536 * 128 * 192 + 7168 * 576 + 512 * 128 * 256 + 128 * 128 * 7168
    norms = 5 * 7168 + 1536 + 512
    experts = 257 * 3 * 7168 * 2048 + 256 * 7168 + 256
    assert drafting - plain == attention + norms + experts + 7168 * 14336


@pytest.mark.parametrize("rows", [129280, 32000])
def test_a_pass_of_the_head_of_deepseek_reads_its_layer_and_the_output_head(rows: int, tmp_path: Path) -> None:
    """By hand, in bf16, norms left out: attention, the shared expert, the router, the projection, and the output head,
    whole or with rows of some tokens; and 256 experts, of which a token chooses some."""
    config = public_config("deepseek-v3.1") | ({} if rows == 129280 else {"draft_vocab_size": rows})
    card = replace(read_card(write_config(tmp_path, {}, config)), draft_head=True)
    read = bytes_per_draft(build_model(card, Sharding(0, 1, torch.bfloat16, None)))
    attention = 7168 * 1536 + 1536 * 128 * 192 + 7168 * 576 + 512 * 128 * 256 + 128 * 128 * 7168
    dense = attention + 3 * 7168 * 2048 + 256 * 7168 + 7168 * 14336
    assert read.weights == pytest.approx(2 * (dense + rows * 7168), rel=0.01)
    assert sum(part.nbytes for part in read.experts) == 2 * 256 * 3 * 7168 * 2048
    assert read.cached == 576 * 2


def test_a_draft_vocabulary_takes_memory_for_its_rows(tmp_path: Path) -> None:
    """By hand: 32,000 rows of 7168 in bf16, and their tokens in int64. Of 1,000 blocks of 32 rows, six ranks have 167
    each, with one of zeros on the last two."""
    config = public_config("deepseek-v3.1")
    cards = [read_card(write_config(tmp_path, fields, config)) for fields in ({}, {"draft_vocab_size": 32000})]
    for rank, ranks, rows in ((0, 1, 32000), (0, 6, 167 * 32), (5, 6, 167 * 32)):
        sharding = Sharding(rank, ranks, torch.bfloat16, None)
        without, held = (build_model(replace(card, draft_head=True), sharding).nbytes() for card in cards)
        assert held - without == 2 * rows * 7168 + 8 * 32000


def test_a_draft_vocabulary_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    """A token outside of the vocabulary, tokens as floats, more rows than there are tokens, or than are stored."""
    model_dir = make_checkpoint("glm4_moe", tmp_path, **TINY["glm4_moe"])
    tensors = {name: x for file in model_dir.glob("*.safetensors") for name, x in load_file(file).items()}
    fields, ids = dict(read_card(model_dir).fields.values), "model.layers.2.d2t"
    outside = tensors[ids].clone()
    outside[52] = 400 - 52
    for changed, size, sentence in (
        ({ids: outside}, 53, f"model.safetensors: tensor {ids}: row 52: expected a token from 0 to 399, found 400"),
        ({ids: tensors[ids].bfloat16()}, 53, f"tensor {ids}: expected I64, found BF16"),
        ({}, 401, "config.json: draft_vocab_size: expected an integer from 1 to 400, found 401"),
        ({}, 52, r"tensor model.layers.2.(d2t|shared_head.head.weight): expected shape \[52(, 96)?\], found \[53"),
    ):
        save_file(tensors | changed, tmp_path / "model.safetensors")
        write_config(tmp_path, {"draft_vocab_size": size}, fields)
        with pytest.raises((CheckpointError, ConfigError), match=sentence):
            load(built(tmp_path, draft_head=True), tmp_path)


def test_a_head_rests_where_its_drafts_do_not_pay(tmp_path: Path) -> None:
    """No draft is checked: after some steps, few have drafts. Prompts are read all the same."""
    engine = single_engine(
        make_checkpoint("glm4_moe", tmp_path, **TINY["glm4_moe"]),
        dtype=torch.float32,
        max_total_tokens=512,
        speculative="mtp",
    )
    counts = list[int]()

    def counted(message: Draft) -> list[list[int]]:
        counts.append(max(message.counts))
        return draft(message)

    draft = engine.worker.draft
    with mock.patch.object(engine.worker, "draft", counted):
        engine.drafting = Drafting(HeadDrafts(engine.worker), engine.scheduler, NoDrafts())
        for seed in range(2):
            prompt = Prompt([seed + i for i in range(20)])
            list(engine.generate([Request(prompt, SamplingParams(max_new_tokens=200, ignore_eos=True))]))
            assert 2 <= len(counts) < 40 and max(counts) > 0
            counts.clear()


def test_decode_ranks_take_what_the_head_of_prefill_ranks_has_read(tmp_path: Path) -> None:
    """Of a prompt of 100 tokens, 96 with the token after each: the entries are those of ranks that do both."""
    model = make_checkpoint("glm4_moe", tmp_path, **TINY["glm4_moe"])
    config: dict[str, Any] = {"dtype": torch.float32, "max_total_tokens": 512, "speculative": "mtp", "eager": True}
    request = Request(Prompt(list(range(100))), SamplingParams(max_new_tokens=9, ignore_eos=True, logprobs=1))
    with memory_files() as files:
        prefill, decode, both = (
            single_engine(model, **config, transfer=transfer)
            for transfer in (Transfer(files, True), Transfer(files, False), None)
        )
        for engine in (prefill, decode, both):
            engine.drafting = Drafting(HeadDrafts(engine.worker), engine.scheduler, AllDrafts())
        given = replace(request, slots=prefilled(prefill, request))
        assert answers(decode, [given]) == answers(both, [request]) and decode.state().taken_pages == 3
    states = [engine.state() for engine in (decode, both)]
    assert len({(state.drafted_tokens, state.accepted_tokens) for state in states}) == 1 and states[0].drafted_tokens
    kept = []
    for engine in (decode, both):
        (pool,) = (kind for kind in engine.scheduler.kinds if isinstance(kind, PagePool))
        numbers = [page.number for page in pool.prefix(request.prompt.keys)]
        cache = engine.worker._caches[-1]
        assert len(numbers) == 3 and isinstance(cache, KVPages)
        kept.append([tensor[numbers] for tensor in cache.tensors])
    assert all(torch.equal(*pair) and pair[0].any() for pair in zip(*kept, strict=True))
