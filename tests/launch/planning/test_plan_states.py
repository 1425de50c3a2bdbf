"""What plans say of the states of sequences: Qwen3.5-9B's, by arithmetic from its published shape."""

import json
from pathlib import Path
from typing import Any

import pytest
from fake_sysfs import GIB, sockets
from planning import plan_on

from tilerank.launch.planning.plan_text import as_json, render
from tilerank.launch.planning.plan_types import RANK_OVERHEAD, Plan
from tilerank.launch.ranks.ranks_table import render as render_ranks
from tilerank.loader.card import read_card
from tilerank.runtime.protocol.sizes import most_tokens, num_states
from tilerank.runtime.server.link.messages import RankInfo

# 24 of 32 layers are delta nets: 32 heads of 128 x 128 in fp32, 3 inputs of 16 * 2 * 128 + 32 * 128 channels in bf16.
STATE = 24 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)
TOKEN = 8 * 2 * 4 * 256 * 2  # the other layers: K and V, 4 heads of 256
QWEN35_9B: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "full_attention_interval": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "intermediate_size": 12288,
    "vocab_size": 248320,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 262144,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    "torch_dtype": "bfloat16",
    "eos_token_id": 248044,
}


def plan(tmp_path: Path, tp: int, **options: Any) -> Plan:
    (tmp_path / "config.json").write_text(json.dumps(QWEN35_9B))
    return plan_on(sockets(2, 8), tmp_path, read_card(tmp_path), tp, **options)


def test_a_state_takes_what_the_shape_says(tmp_path: Path) -> None:
    whole, half = plan(tmp_path, 1).ranks[0], plan(tmp_path, 2).ranks[0]
    assert (whole.state, whole.cache_per_token) == (STATE, TOKEN)
    assert (half.state, half.cache_per_token) == (STATE // 2, TOKEN // 2)
    assert round(STATE / (1 << 20), 1) == 49.1
    # For each of 7 drafts another input of the convolution, q, k and v, and 2 gates of a head in fp32.
    drafts = 24 * 7 * (2 * 8192 * 2 + 2 * 32 * 4)
    assert plan(tmp_path, 1, speculative="auto").ranks[0].state == STATE + drafts


def test_states_and_tokens_fit_together(tmp_path: Path) -> None:
    """Node 0 has 64 GiB. One page more, with the states that belong to it, would not fit."""
    found = plan(tmp_path, 2, cached_tokens=None, mem_fraction=0.4)
    rank = found.ranks[0]
    room = int(0.4 * 64 * GIB) - rank.weights
    assert found.states == -(-found.cached_tokens // 2048) > 100

    def need(tokens: int) -> float:
        return tokens * rank.cache_per_token + -(-tokens // 2048) * rank.state

    assert need(found.cached_tokens) <= room < need(found.cached_tokens + 32)
    assert found.cache_reason is not None
    assert found.cache_reason.endswith("at 16.0 KiB a token and 24.6 MiB for the states of every 2,048 tokens")
    cache = found.cached_tokens * TOKEN + found.states * STATE
    assert found.need == found.memory.weights + cache + 2 * RANK_OVERHEAD


def test_a_given_size_has_its_states(tmp_path: Path) -> None:
    assert [plan(tmp_path, 2, cached_tokens=n).states for n in (0, 1, 16384, 16385, 100000)] == [0, 8, 8, 9, 49]
    large = plan(tmp_path, 2, cached_tokens=4 << 20)
    assert large.states == 2048 and f", {2048 * STATE / GIB:.1f} GiB for 2,048 states, " in str(large.refusal())


def test_the_text_says_how_many_states_there_are_and_why(tmp_path: Path) -> None:
    text = render(plan(tmp_path, 2, cached_tokens=100000))
    assert (
        "States of 49 sequences, 2.35 GiB: one for every 2,048 tokens of the KV cache, at least 8; a running request "
        "takes one, and the others are snapshots from which prompts with the same beginning continue."
    ) in text
    lines = text.splitlines()
    header = next(i for i, line in enumerate(lines) if "KV per token" in line)
    assert lines[header].split()[-5:] == ["KV", "cache", "states", "memory", "where"]
    assert "  1.53 GiB   1.18 GiB   node 0  " in lines[header + 1]  # 100,000 tokens and 49 states, a half each
    assert as_json(plan(tmp_path, 2, cached_tokens=100000))["state"] == STATE


@pytest.mark.parametrize("per_state", [0, 7, 5000])
def test_the_most_tokens_are_the_last_ones_that_fit(per_state: int) -> None:
    def need(tokens: int) -> float:
        return 3 * tokens + (num_states(tokens) * per_state if per_state else 0)

    for room in [*range(8 * per_state, 8 * per_state + 50), 49151, 49152, 60000, 88151, 88152, 100000, 123456]:
        most = most_tokens(room, need)
        assert (not most or need(most) <= room) and need(most + 1) > room, room


def test_the_table_of_ranks_has_the_slots_of_models_with_states() -> None:
    rank = RankInfo(0, "here", "0", "0-1", "avx2", 3 * GIB, 2 * GIB, 1.0)
    title, row = (line.split() for line in render_ranks([rank], 4096, 1024).splitlines())
    assert title[title.index("tokens") + 1] == "states"
    assert row[row.index("4,096") + 1] == "1,024"
    assert "states" not in render_ranks([rank], 4096, 0)
