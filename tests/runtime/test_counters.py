"""The counters of ranks, against arithmetic by hand."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from command import DEMO
from ranks import run_ranks

from tests.parallel.test_group import needs_core
from tilerank.loader.card import read_card
from tilerank.parallel.cost import ExpertBytes
from tilerank.parallel.sharding import Sharding
from tilerank.runtime.lead.engine import Engine, Request
from tilerank.runtime.lead.sampling import SamplingParams
from tilerank.runtime.protocol.prompt import Prompt
from tilerank.runtime.protocol.rank_messages import Chunk, Step
from tilerank.runtime.rank.counters import RankCounters, StepCounter
from tilerank.runtime.rank.rank_config import RankConfig
from tilerank.runtime.rank.registry import build_model
from tilerank.runtime.rank.worker import Worker
from tilerank.runtime.step.bytes_per_step import BytesPerStep, bytes_per_step

LAYERS, HIDDEN, VOCAB, HEADS, KV_HEADS, DIM, WIDTH = 6, 256, 4096, 8, 2, 64, 704  # the demo model, whose head is tied
LAYER = HIDDEN * DIM * (2 * HEADS + 2 * KV_HEADS) + 3 * HIDDEN * WIDTH + 2 * HIDDEN + 2 * DIM
WHOLE = 2 * (LAYERS * LAYER + VOCAB * HIDDEN + HIDDEN)  # bf16
CACHED = LAYERS * 2 * KV_HEADS * DIM * 2

QWEN35 = {
    "model_type": "qwen3_5_text",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "full_attention_interval": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "intermediate_size": 128,
    "vocab_size": 300,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
}


def step_bytes(rank: int, size: int, model_dir: Path = DEMO) -> BytesPerStep:
    return bytes_per_step(build_model(read_card(model_dir), Sharding(rank, size, torch.bfloat16, None)))


def test_a_decode_step_reads_all_weights_and_what_is_cached() -> None:
    assert step_bytes(0, 1) == BytesPerStep(WHOLE, (), CACHED)
    assert step_bytes(0, 1).decode(3, 1000) == WHOLE + 1000 * CACHED


def test_ranks_read_their_parts() -> None:
    """Two ranks halve everything but the norms, which both hold whole."""
    norms = 2 * (LAYERS * (2 * HIDDEN + 2 * DIM) + HIDDEN)
    assert [step_bytes(rank, 2).weights for rank in range(2)] == [(WHOLE + norms) // 2] * 2
    assert step_bytes(1, 2).cached == CACHED // 2


def test_an_embedding_of_its_own_is_looked_up_not_read(tmp_path: Path) -> None:
    config = json.loads((DEMO / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    assert step_bytes(0, 1, tmp_path).weights == WHOLE


def test_states_are_read_and_written(tmp_path: Path) -> None:
    """Three layers of Qwen3.5 are delta nets: a matrix of 8 x 16 in fp32 for each of 4 heads, and 3 inputs in bf16."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN35))
    found, state = step_bytes(0, 1, tmp_path), 3 * (4 * 8 * 16 * 4 + 3 * (2 * 2 * 8 + 4 * 16) * 2)
    assert found.state == state and found.cached == 2 * 1 * 32 * 2
    assert found.decode(5, 100) == found.weights + 100 * found.cached + 5 * 2 * state


def test_experts_are_read_as_far_as_they_are_chosen(tmp_path: Path) -> None:
    config = json.loads((DEMO / "config.json").read_text())
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "norm_topk_prob": True}
    (tmp_path / "config.json").write_text(json.dumps(config | experts | {"model_type": "qwen3_moe"}))
    found = step_bytes(0, 1, tmp_path)
    nbytes = LAYERS * 8 * 3 * HIDDEN * 96 * 2
    assert found.experts == (ExpertBytes(nbytes, 2 / 8),)
    assert found.decode(1, 0) == found.weights + nbytes / 4
    assert found.decode(3, 0) == pytest.approx(found.weights + nbytes * (1 - 0.75**3))


def test_steps_with_a_piece_of_a_prompt_are_prefill() -> None:
    counter = StepCounter(BytesPerStep(1000, (), 10))
    decoding = [Chunk(0, 4, [7], [], 1), Chunk(1, 9, [7], [], 1)]
    counter.count(Step([*decoding, Chunk(2, 0, [1, 2], [], 1)], []), 0.5, 0.25)
    counter.count(Step(decoding, []), 0.25, 0.0)
    counter.count(Step(decoding[:1], []), 0.125, 0.125)
    counter.count(Step([Chunk(0, 4, [7, 8, 9], [], 3, drafts=2)], []), 0.125, 0.0)
    counter.count_encode(2.0)
    counter.count_encode(0.25)
    assert counter.counters == RankCounters(0.5, 0.5, 1000 + 15 * 10 + 1000 + 5 * 10 + 1000 + 7 * 10, 0.375, 2.25)


def run_engine(team: Any) -> list[list[float]]:
    worker = Worker(DEMO, team, RankConfig(dtype=torch.bfloat16, max_total_tokens=512))
    if team.group.rank != 0:
        worker.follow()
        return []
    engine = Engine(worker)
    before = engine.counters()
    requests = [Request(Prompt(list(range(20))), SamplingParams(max_new_tokens=6, ignore_eos=True)) for _ in range(2)]
    began = time.perf_counter()
    assert len(list(engine.generate(requests))) == 12
    took = time.perf_counter() - began
    after = engine.counters()
    for rank in after:
        assert 0 < rank.prefill_s < took and 0 < rank.decode_s < took and rank.prefill_s + rank.decode_s < took
        assert 0 <= rank.waited_s <= rank.prefill_s + rank.decode_s
    worker.stop()
    return [[rank.prefill_s + rank.decode_s + rank.decode_bytes for rank in before], [r.decode_bytes for r in after]]


@needs_core
def test_rank_0_gathers_the_counters_of_every_rank() -> None:
    """One prefill step of 20 prompt tokens, then five decode steps of two sequences."""
    before, after = run_ranks(2, "tests.runtime.test_counters:run_engine")[0]
    assert before == [0, 0]
    cached = sum(2 * (20 + step) for step in range(1, 6))
    assert after == [5 * step_bytes(rank, 2).weights + cached * CACHED // 2 for rank in range(2)]


def dawdle(team: Any) -> tuple[float, float]:
    """Make rank 1 late for every sum, until rank 0 has counted 0.1 s of waiting."""
    began = time.monotonic()
    for _ in range(2000):
        if team.group.rank == 1:
            time.sleep(5e-3)
        late = team.group.all_reduce(torch.tensor([float(team.group.rank == 0 and team.group.waited_s > 0.1)]))
        if late.item():
            break
    return team.group.waited_s, time.monotonic() - began


@needs_core
@pytest.mark.parametrize("transport", ["auto", "gloo"])
def test_the_rank_that_arrives_first_counts_waiting(transport: str) -> None:
    """The unit is seconds: the counter reaches 0.1 and stays below the elapsed time."""
    (waited, took), _ = run_ranks(2, "tests.runtime.test_counters:dawdle", collectives=transport)
    assert 0.1 < waited < took
