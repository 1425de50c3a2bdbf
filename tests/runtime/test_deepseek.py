"""DeepSeek-V3: its configuration, forms of latent attention, parts of contexts, and the cuts of the public model."""

import json
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from model_configs import ABSENT, MIXTURE, write_config

from tilerank.launch.bench.public import public_config
from tilerank.loader.card import read_card
from tilerank.loader.errors import ConfigError
from tilerank.loader.weight_formats import weight_formats
from tilerank.parallel.sharding import KVSplit, Sharding
from tilerank.runtime.models.deepseek import read_latent_config
from tilerank.runtime.rank.registry import build_model
from tilerank.runtime.step.latent_forms import ContextPart, LatentForms, latent_forms
from tilerank.runtime.step.rope import RopeTable, inverse_frequencies

V31 = public_config("deepseek-v3.1")


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
        ({"mlp_layer_types": ["dense"]}, "mlp_layer_types: expected 'dense' or 'sparse' for each of the 61 layers"),
        (
            {"mlp_layer_types": ["dense", *["sparse"] * 60]},
            "first_k_dense_replace: expected the dense layers of mlp_layer_types, found 3",
        ),
        ({"rope_interleave": 1}, "rope_interleave: expected true or false, found 1"),
    ],
)
def test_what_is_unsupported_or_inconsistent_is_refused(tmp_path: Path, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_model(read_card(write_config(tmp_path, changes, V31)), Sharding(0, 1, torch.bfloat16, None))
    assert str(caught.value).startswith(f"{tmp_path / 'config.json'}: {sentence}")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"qk_norm_type": "per_head"}, "qk_norm_type: expected 'per_layer', found 'per_head'"),
        ({"attn_type_list": [1, 0]}, "attn_type_list: expected a list of 1 only"),
        ({"partial_rotary_factor": 1.0}, "rotary_dim: expected 128 dimensions, the part of a head that"),
        ({"num_local_experts": ABSENT, "num_experts": ABSENT}, "num_local_experts: expected an integer from 1 to"),
    ],
)
def test_other_kinds_of_minimax_are_refused(tmp_path: Path, changes: dict[str, Any], sentence: str) -> None:
    """The mixture of MiniMax-M2 is that of DeepSeek-V3."""
    minimax = MIXTURE | {"model_type": "minimax_m2", "num_local_experts": 128, "head_dim": 128, "rotary_dim": 64}
    with pytest.raises(ConfigError) as caught:
        build_model(read_card(write_config(tmp_path, changes, minimax)), Sharding(0, 1, torch.bfloat16, None))
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
    """The cuts of the public fp8 checkpoint, by hand: 22 or 21 heads, 11 or 10 of the 64 tiles of an expert, the
    whole latent."""
    config = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic", "fmt": "e4m3"}
    card = read_card(write_config(tmp_path, {"quantization_config": config}, V31))
    formats = weight_formats(card.quantization, torch.bfloat16, None)
    models = [build_model(card, Sharding(r, 6, torch.bfloat16, None, formats=formats)) for r in range(6)]
    cuts = dict(models[0].cuts())
    assert [span.size for span in cuts["heads"].spans] == [22, 22, 21, 21, 21, 21]
    assert [span.size // 32 for span in cuts["expert width"].spans] == [11, 11, 11, 11, 10, 10]
    assert {spec.nbytes(32) for model in models for spec in model.cache_specs()} == {32 * 576 * 2}
    read = {r.name for model in models for r in model.rectangles()}
    assert len(read) == 61 * 9 + 3 * 3 + 58 * (2 + 3 + 3 * 256) + 3
