"""DeepSeek-V3 against transformers, on tiny checkpoints whose heads, widths and vocabularies do not divide."""

import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from model_configs import ABSENT, write_config
from ranks import run_ranks
from rungs import COMPILED
from safetensors.torch import load_file
from tiny import make_checkpoint
from torch import Tensor

from tilerank.launch.bench.public import public_config
from tilerank.loader.card import read_card
from tilerank.loader.errors import ConfigError
from tilerank.loader.weight_formats import weight_formats
from tilerank.parallel.latent import AbsorbedHeads
from tilerank.parallel.sharding import KVSplit, Sharding
from tilerank.runtime.models.deepseek import read_latent_config
from tilerank.runtime.rank.registry import build_model
from tilerank.runtime.step.latent_forms import ContextPart, LatentForms, latent_forms
from tilerank.runtime.step.rope import RopeTable, inverse_frequencies

V31 = public_config("deepseek-v3.1")
NEW_TOKENS = 24
TP = [1, 2, 3, 5, 6]
TINY = {"family": "deepseek_v3", "hidden": 128, "inter": 200, "vocab": 500, "layers": 3, "moe_inter": 80}
MODELS: list[dict[str, Any]] = [
    TINY | {"name": "as-published", "seed": 1},
    TINY
    | {
        "name": "halves-biases-one-group",
        "seed": 2,
        "hidden": 96,
        "heads": 7,
        "config": {"rope_interleave": False, "attention_bias": True, "n_group": 1, "topk_group": 1},
    },
    TINY
    | {
        "name": "plain-queries-no-yarn",  # more ranks than heads
        "seed": 3,
        "layers": 2,
        "heads": 5,
        "config": {"q_lora_rank": None, "rope_scaling": None, "n_shared_experts": 2, "norm_topk_prob": False},
    },
]
NAMES = [model["name"] for model in MODELS]
PROMPT_LENGTHS = (1, 21, 150)
"""The longest is computed in the expanded form, beside the others in the absorbed one, and scored in both."""

needs_core = pytest.mark.skipif(not COMPILED, reason="no compiled rung runs on this machine")


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of checkpoints and of the results of transformers for them (reference_hf.py)."""
    out = tmp_path_factory.mktemp("deepseek")
    draw = random.Random(7)
    models = [
        model | {"prompts": [[draw.randrange(model["vocab"]) for _ in range(n)] for n in PROMPT_LENGTHS]}
        for model in MODELS
    ]
    job = out / "job.json"
    job.write_text(json.dumps({"out": str(out), "models": models, "new_tokens": NEW_TOKENS}))
    script = Path(__file__).parents[1] / "support" / "reference_hf.py"
    subprocess.run([sys.executable, str(script), str(job)], check=True, stdout=subprocess.DEVNULL, timeout=300)
    return out


Results = dict[tuple[str, str], dict[str, list[dict[str, Any]]]]  # by dtype and rung; by model; by rank
Run = Callable[..., Results]
PLAIN = "reference"


@pytest.fixture(scope="session")
def run(reference: Path) -> Run:
    """All cases with a number of ranks, on all compiled rungs with two of them."""

    @cache
    def run(tp: int, rung: str = "", threads: int = 1) -> Results:
        job: dict[str, Any] = {"out": str(reference), "new_tokens": NEW_TOKENS, "models": NAMES}
        rungs = [PLAIN] if rung == PLAIN else COMPILED if tp == 2 else COMPILED[:1]
        job |= {"rungs": rungs, "strategies": ["pad" if tp == 3 else "auto"]}
        env = {"TILERANK_ISA": PLAIN} if rung == PLAIN else {}
        ranks = run_ranks(tp, "exactness:run", kwargs=job, env=env, threads=threads, timeout=300)
        results: Results = {}
        for found in zip(*ranks, strict=True):
            results.setdefault((found[0]["dtype"], found[0]["rung"]), {})[found[0]["model"]] = list(found)
        assert all(list(models) == NAMES for models in results.values())
        return results

    return run


RUNS = [pytest.param((tp,), id=f"{tp}") for tp in TP if COMPILED] + [pytest.param((2, PLAIN), id="2-reference")]


@pytest.mark.parametrize("ranks", RUNS)
def test_fp32_equals_transformers(run: Run, ranks: tuple[Any, ...]) -> None:
    """Compare the logits of every position, and greedy tokens of three prompts of different lengths in one batch."""
    cases = {case: models for case, models in run(*ranks).items() if case[0] == "float32"}
    assert cases
    for case, models in cases.items():
        for model, found in models.items():
            assert found[0]["logit_error"] <= 1e-4, (case, model)
            assert found[0]["logprob_error"] <= 1e-4, (case, model)
            assert found[0]["wrong_tokens"] == [], (case, model)


@pytest.mark.parametrize("ranks", RUNS)
def test_bf16_is_as_exact_as_transformers(run: Run, ranks: tuple[Any, ...]) -> None:
    """As in test_exact.py for mixtures. The median of the errors is at most 1.1 times that of transformers in bf16, on
    average over the models. The mean is no measure here: with the large weights of chosen experts (2.5 together), a
    token that is sent to another expert is up to forty times as wrong as the rest, and there are few of them."""
    cases = {case: models for case, models in run(*ranks).items() if case[0] == "bfloat16"}
    assert cases
    for models in cases.values():
        ratios = [found[0]["median"] / found[0]["hf_median"] for found in models.values()]
        assert fmean(ratios) <= 1.1, ratios


@needs_core
@pytest.mark.parametrize("tp", TP[1:])
def test_all_ranks_hold_the_same_bits(run: Run, tp: int) -> None:
    """Compare every sum over the ranks and every gathered logit, in both dtypes."""
    for case, models in run(tp).items():
        for model, ranks in models.items():
            assert ranks[0]["collectives"] > 0
            assert len({(rank["digest"], rank["collectives"]) for rank in ranks}) == 1, (case, model)


@needs_core
def test_two_threads_a_rank_give_the_bits_of_one(run: Run) -> None:
    one, two = run(2), run(2, threads=2)
    for case, models in one.items():
        assert two[case] == models, case


def test_prompts_in_chunks_equal_transformers(reference: Path) -> None:
    """A chunk of 70 rows is in the expanded form, of three pieces where it ends with token 140."""
    job = {
        "out": str(reference),
        "models": NAMES[:1],
        "strategies": ["auto"],
        "chunk_rows": [1, 70],
        "piece_tokens": 32,
    }
    for result in run_ranks(2, "exactness:in_chunks", kwargs=job | {"new_tokens": NEW_TOKENS}, timeout=300)[0]:
        assert result["logit_error"] <= 1e-4, result
        assert result["logprob_error"] <= 1e-4, result
        assert result["wrong_tokens"] == [], result


@pytest.mark.parametrize(("tp", "model"), [(2, NAMES[0]), (3, NAMES[0]), (6, NAMES[2])])
def test_contexts_over_ranks_equal_transformers(reference: Path, tp: int, model: str) -> None:
    """Every rank reads a part of a context for all heads, also a rank without heads: the last model has 5. Steps mix
    one row of a sequence with several of another, which are computed in different forms."""
    job = {"out": str(reference), "models": [model], "strategies": ["auto"], "chunk_rows": [37], "kv_split": "on"}
    ranks = run_ranks(tp, "exactness:in_chunks", kwargs=job | {"new_tokens": NEW_TOKENS}, timeout=300)
    for result in ranks[0]:
        assert result["logit_error"] <= 1e-4, result
        assert result["logprob_error"] <= 1e-4, result
        assert result["wrong_tokens"] == [], result
    for found in ranks:
        assert [result["digest"] for result in found] == [result["digest"] for result in ranks[0]]


@needs_core
def test_contexts_over_ranks_are_replayed(reference: Path) -> None:
    """As in test_step_graphs.py: 44 requests, from 22 in a step down to one, the same bits as eager, on every rank."""
    kwargs = {"models": [str(reference / NAMES[0])], "kv_split": "on"}
    ranks = run_ranks(3, "replay:compare", kwargs=kwargs, timeout=300)
    for found in ranks:
        for case, first in zip(found, ranks[0], strict=True):
            assert case["replayed"] == case["eager"] == first["eager"], case["dtype"]
            assert case["sizes"] == [1, 2, 4, 8, 16, 32]


def test_parts_of_a_context_cover_it_once() -> None:
    for ranks in (2, 3, 6):
        for length in range(1, 300):
            parts = [ContextPart(rank, ranks).tokens(length) for rank in range(ranks)]
            assert all(first % 32 == 0 for first, _ in parts)
            assert [token for first, count in parts for token in range(first, first + count)] == list(range(length))
            assert max(count for _, count in parts) <= 32 * -(-length // (32 * ranks))


@pytest.mark.parametrize(
    ("tp", "tokens", "kv_dtype", "expected"),
    [
        (6, 32768, None, True),  # 37.7 MB of latents for 22 heads, 6.3 MB for all
        (6, 1024, None, False),  # 1.2 MB take less time than three collectives
        (2, 131072, None, False),  # 64 heads take longer to compute than to read, as do 128 of half the tokens
        (4, 32768, None, True),
        (4, 32768, torch.int8, False),  # half the bytes for the same operations
    ],
)
def test_contexts_are_split_where_it_pays(
    tmp_path: Path, tp: int, tokens: int, kv_dtype: torch.dtype | None, expected: bool
) -> None:
    """With 2176 operations for each head and token of 1152 bytes, and 100 operations in the time of a byte."""
    card = read_card(write_config(tmp_path, {"num_hidden_layers": 1, "first_k_dense_replace": 1}, V31))
    asked: KVSplit
    for rank in range(tp):
        sharding = Sharding(rank, tp, torch.bfloat16, None, cached_tokens=tokens, kv_dtype=kv_dtype)
        assert build_model(card, sharding).context_part == (ContextPart(rank, tp) if expected else None)
        for asked, found in (("on", ContextPart(rank, tp)), ("off", None)):
            assert build_model(card, replace(sharding, kv_split=asked)).context_part == found


@needs_core
@pytest.mark.parametrize("kv_dtype", [None, "int8"])
def test_a_batch_gives_the_bits_of_single_requests(tmp_path: Path, kv_dtype: str | None) -> None:
    """As in test_engine.py: in chunks, mixed with others, from shared pages, after giving way; in the absorbed form,
    which this model always has, as keys and values are as large as two latents."""
    dims: dict[str, Any] = {"hidden": 96, "vocab": 4200, "layers": 3, "inter": 200, "moe_inter": 80}
    dims["config"] = {"kv_lora_rank": 64, "qk_nope_head_dim": 64, "v_head_dim": 64}
    model = str(make_checkpoint("deepseek_v3", tmp_path, seed=5, **dims))
    cases = [(dtype, COMPILED[0]) for dtype in ("bfloat16", "float32")]
    kwargs = {"cases": cases, "model": model, "kv_dtype": kv_dtype}
    results = run_ranks(2, "batching:same_answers", kwargs=kwargs, timeout=300)[0]
    assert results == {f"{rung} {dtype}": [] for dtype, rung in cases}


QUANTISED = ["deepseek_v3_fp8", "deepseek_v3_int8_block", "deepseek_v3_int8", "deepseek_v3_int8_ct"]
IDS = random.Random(1).choices(range(500), k=48)


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints by family; beside each is one of the dequantised weights, `_dequant`.

    Heads of 48 rows begin within blocks of 128 rows that share a scale. Tokens take all experts: rounding sends none to
    another expert, so that errors are small ones.
    """
    base = tmp_path_factory.mktemp("quantised")
    dims = {"vocab": 500, "layers": 3, "experts": 6, "topk": 6, "config": {"n_group": 1, "topk_group": 1}}
    return {family: make_checkpoint(family, base, seed=4, **dims) for family in QUANTISED}


@torch.inference_mode()
def transformers_logits(model_dir: str, dtype: torch.dtype) -> Tensor:
    from transformers import AutoModelForCausalLM

    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype)
    found: Tensor = model.eval()(torch.tensor([IDS])).logits[0].float()
    return found


@pytest.mark.parametrize("tp", [1, 3, 6])
def test_quantised_checkpoints_equal_their_dequantised_weights(
    quantised: dict[str, Path], tp: int, tmp_path: Path
) -> None:
    """The error against transformers with the dequantised weights in fp32 is that of bf16 activations alone, which
    those weights have in bf16 as well. Int8 with a scale a row also rounds activations to 8 bits (test_quantized.py).
    """
    cases = [
        {"name": family + suffix, "model": f"{path}{suffix}", "quantization": None, "strategy": "auto"}
        for family, path in quantised.items()
        for suffix in ("", "_dequant")
    ]
    # Published files of int8 come without a quantization_config, or with that of the fp8 model they were made from.
    int8, fp8 = quantised["deepseek_v3_int8"], quantised["deepseek_v3_fp8"]
    stale = json.loads((fp8 / "config.json").read_text())["quantization_config"]
    for name, config in (("none", {}), ("stale", {"quantization_config": stale})):
        out = shutil.copytree(int8, tmp_path / name)
        raw = json.loads((int8 / "config.json").read_text())
        del raw["quantization_config"]
        (out / "config.json").write_text(json.dumps(raw | config))
        cases.append({"name": f"{name}-config", "model": str(out), "quantization": None, "strategy": "auto"})
    kwargs = {"cases": cases, "out": str(tmp_path), "ids": IDS, "new_tokens": 6}
    run_ranks(tp, "quantized_ranks:run", kwargs=kwargs, timeout=300)
    same = [
        load_file(tmp_path / f"{name}.safetensors")["logits"]
        for name in ("deepseek_v3_int8", "none-config", "stale-config")
    ]
    assert torch.equal(same[0], same[1]) and torch.equal(same[0], same[2])
    for family, path in quantised.items():
        wanted, theirs = (transformers_logits(f"{path}_dequant", dtype) for dtype in (torch.float32, torch.bfloat16))
        ours = [load_file(tmp_path / f"{family}{suffix}.safetensors")["logits"] for suffix in ("", "_dequant")]
        coded, plain, usual = (((x - wanted).abs().amax(-1) / wanted.abs().amax(-1)).mean() for x in (*ours, theirs))
        assert plain <= 1.1 * usual, family
        assert coded <= (1.25 if family in QUANTISED[:2] else 3.5) * plain, family


def test_absorbed_weights_stay_in_eight_bits(quantised: dict[str, Path]) -> None:
    """Two of the 8 heads map queries of 32 to latents of 128, and latents to values of 32: 2 * 2 * 32 * 128 codes, and
    a few scales."""
    for family, path in quantised.items():
        card = read_card(path)
        formats = weight_formats(card.quantization, torch.bfloat16, None)
        model = build_model(card, Sharding(1, 4, torch.bfloat16, None, formats=formats))
        (absorbed,) = {layer.nbytes() for layer in model.walk() if isinstance(layer, AbsorbedHeads)}
        assert 16384 < absorbed < 1.1 * 16384, family


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"factor": 4, "original_max_position_embeddings": 32768, "mscale": ABSENT, "mscale_all_dim": ABSENT},
        {"mscale": 0.707, "mscale_all_dim": 1.2, "beta_fast": 20, "beta_slow": 2, "truncate": False},
        {"attention_factor": 1.3},
        {"factor": 32, "beta_fast": 1.0, "beta_slow": 1.0},
    ],
    ids=["deepseek", "qwen", "mscale", "attention-factor", "kimi-k2"],
)
def test_yarn_is_that_of_transformers(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Frequencies, tables and the factor of the scores, with the angles of the public model up to its last position."""
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as theirs

    mscale: Any = theirs.yarn_apply_mscale
    scaling = {key: value for key, value in (V31["rope_scaling"] | changes).items() if value is not ABSENT}
    write_config(tmp_path, {"rope_scaling": scaling}, V31)
    config = DeepseekV3Config.from_pretrained(tmp_path)
    rotary = theirs.DeepseekV3RotaryEmbedding(config)
    text, latent = read_latent_config(read_card(tmp_path).fields)
    assert torch.equal(inverse_frequencies(text.rope, 64, 163840), rotary.inv_freq)
    assert latent.score_factor == pytest.approx(mscale(config.rope_parameters, 1.0), rel=1e-12)
    table = RopeTable(text.rope, text.rotary_dim, 163840, torch.float32)
    table.allocate()
    some = torch.cat([torch.arange(0, 2000), torch.arange(161840, 163840)])
    cos, sin = rotary(torch.zeros(1), some[None])
    assert torch.equal(table.table[some, 0], cos[0, :, :32])
    assert torch.equal(table.table[some, 1], sin[0, :, :32])


def test_the_config_of_transformers_5_is_read_alike(tmp_path: Path) -> None:
    from transformers import DeepseekV3Config

    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    DeepseekV3Config.from_pretrained(write_config(old, {}, V31)).save_pretrained(new)
    saved = json.loads((new / "config.json").read_text())
    assert saved["head_dim"] == 64 and "rope_parameters" in saved
    assert read_latent_config(read_card(new).fields) == read_latent_config(read_card(old).fields)
    names = [
        {
            rectangle.name
            for rectangle in build_model(read_card(path), Sharding(0, 6, torch.bfloat16, None)).rectangles()
        }
        for path in (old, new)
    ]
    assert names[0] == names[1]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"scoring_func": "softmax"}, "scoring_func: expected 'sigmoid', found 'softmax'"),
        ({"topk_method": "greedy"}, "topk_method: expected 'noaux_tc', found 'greedy'"),
        ({"moe_layer_freq": 2}, "moe_layer_freq: expected 1, found 2"),
        ({"n_group": 7}, "n_group: expected a divisor of the 256 experts, found 7"),
        ({"n_group": 256}, "n_group: expected an integer from 1 to 128, found 256"),
        ({"topk_group": 9}, "topk_group: expected an integer from 1 to 8, found 9"),
        ({"num_experts_per_tok": 129}, "num_experts_per_tok: expected an integer from 1 to 128, found 129"),
        ({"num_local_experts": 128}, "num_local_experts: expected the 256 of n_routed_experts, found 128"),
        ({"kv_lora_rank": ABSENT}, "kv_lora_rank: expected an integer from 8 to 512, found no such key"),
        ({"v_head_dim": 12}, "v_head_dim: expected a multiple of 8 up to 4096, found 12"),
        ({"qk_rope_head_dim": 128}, "qk_rope_head_dim: expected an integer from 8 to 64, found 128"),
        ({"routed_scaling_factor": 0}, "routed_scaling_factor: expected a number above 0"),
        ({"first_k_dense_replace": 62}, "first_k_dense_replace: expected an integer from 0 to 61, found 62"),
        ({"rope_interleave": 1}, "rope_interleave: expected true or false, found 1"),
    ],
)
def test_what_is_unsupported_or_inconsistent_is_refused(tmp_path: Path, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_model(read_card(write_config(tmp_path, changes, V31)), Sharding(0, 1, torch.bfloat16, None))
    assert str(caught.value).startswith(f"{tmp_path / 'config.json'}: {sentence}")


def test_many_rows_are_expanded(tmp_path: Path) -> None:
    """By hand: per head, absorbing costs 512 + 64 + 512 products a pair, expanding 192 + 128 and 512 * 256 a token. A
    prompt of r rows has r (r + 1) / 2 pairs: 768 (r + 1) / 2 > 131072 from r = 341 on. The last 171 rows of many
    tokens have more than 131072 / 768 = 170.7 pairs a token, if the triangle is small."""
    _, config = read_latent_config(read_card(write_config(tmp_path, {}, V31)).fields)
    assert [config.expands(rows, rows) for rows in (1, 340, 341, 2048)] == [False, False, True, True]
    assert [config.expands(rows, 100_000) for rows in (1, 170, 171)] == [False, False, True]

    def made(*sequences: tuple[int, int, list[int]]) -> LatentForms | None:
        counts, lengths, tables = zip(*sequences, strict=True)
        return latent_forms(config.expands, [0, *accumulate(counts)], lengths, tables)

    assert made((1, 70, [4, 5, 6]), (300, 300, list(range(10)))) is None
    alone = made((400, 400, list(range(20, 33))))
    assert alone is not None and alone.absorbed is None
    (sequence,) = alone.expanded
    ((pages, _),) = sequence.pieces
    assert sequence.rows is None and pages.tolist() == list(range(20, 33))
    mixed = made((1, 70, [4, 5, 6]), (341, 341, list(range(20, 31))), (2, 33, [9, 8, 7]))
    assert mixed is not None and mixed.absorbed is not None
    (sequence,), rest = mixed.expanded, mixed.absorbed
    ((pages, runs),) = sequence.pieces
    assert (
        sequence.rows is not None
        and sequence.rows.tolist() == list(range(1, 342))
        and pages.tolist() == list(range(20, 31))
    )
    assert runs.page_tables.tolist() == [list(range(11))]
    assert (runs.seq_lens.tolist(), runs.query_starts.tolist()) == ([341], [0, 341])
    assert rest.rows is not None and rest.rows.tolist() == [0, 342, 343]
    assert rest.page_tables.tolist() == [[4, 5, 6], [9, 8, 0]]
    assert (rest.seq_lens.tolist(), rest.query_starts.tolist()) == ([70, 33], [0, 1, 3])
    long = made((2000, 14288, list(range(1, 448))))  # the rows begin with a piece, the third
    assert long is not None
    (sequence,) = long.expanded
    assert [pages.tolist() for pages, _ in sequence.pieces] == [
        list(range(1, 193)),
        list(range(193, 385)),
        list(range(385, 448)),
    ]
    assert [runs.seq_lens.tolist() for _, runs in sequence.pieces] == [[6144], [6144], [2000]]
    assert [runs.query_starts.tolist() for _, runs in sequence.pieces] == [[0, 2000]] * 3
    assert [runs.page_tables.tolist() for _, runs in sequence.pieces[1:]] == [[list(range(192))], [list(range(63))]]


def test_layers_after_the_last_are_left_out(tmp_path: Path) -> None:
    model = build_model(read_card(write_config(tmp_path, {}, V31)), Sharding(0, 6, torch.bfloat16, None))
    assert model.ignore("model.layers.61.self_attn.q_a_proj.weight") and model.ignore("model.layers.61.eh_proj.weight")
    assert not model.ignore("model.layers.60.self_attn.q_a_proj.weight")
    assert not model.ignore("model.layers.6.mlp.experts.61.up_proj.weight")


def test_six_ranks_share_the_public_model(tmp_path: Path) -> None:
    """The cuts of the public fp8 checkpoint, by hand: 22 or 21 heads, 3 or 2 of the 16 blocks of an expert, the whole
    latent."""
    config = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic", "fmt": "e4m3"}
    card = read_card(write_config(tmp_path, {"quantization_config": config}, V31))
    formats = weight_formats(card.quantization, torch.bfloat16, None)
    models = [build_model(card, Sharding(r, 6, torch.bfloat16, None, formats=formats)) for r in range(6)]
    cuts = dict(models[0].cuts())
    assert [span.size for span in cuts["heads"].spans] == [22, 22, 21, 21, 21, 21]
    assert [span.size // 128 for span in cuts["expert width"].spans] == [3, 3, 3, 3, 2, 2]
    assert {spec.nbytes(32) for model in models for spec in model.cache_specs()} == {32 * 576 * 2}
    read = {r.name for model in models for r in model.rectangles()}
    assert len(read) == 61 * 9 + 3 * 3 + 58 * (2 + 3 + 3 * 256) + 3
