"""Decode steps replayed against the same steps run eagerly: the same bits, on any number of ranks."""

import signal
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from families.text import SHORT
from made_once import made_once
from ranks import Ranks, run_ranks
from replay import DECODING
from tiny import make_checkpoint

from tilerank.kernels import core
from tilerank.parallel.join import join
from tilerank.parallel.rendezvous import Membership
from tilerank.runtime.protocol.rank_messages import Chunk, Step
from tilerank.runtime.rank import registry
from tilerank.runtime.rank.rank_config import RankConfig
from tilerank.runtime.rank.worker import Worker
from tilerank.runtime.step.batch import padded_size

DEMO = Path(__file__).parents[2] / "assets" / "demo-lm"

pytestmark = pytest.mark.skipif(core.isa() == "reference", reason="plain torch cannot be recorded")

_DEEPSEEK = {
    "family": "deepseek_v3",
    "heads": 5,
    "hidden": 112,
    "inter": 200,
    "experts": 8,
    "moe_inter": 80,
    "layers": 3,
}
# One model of each family, with heads, widths and vocabularies that three ranks cannot share evenly.
TINY: dict[str, dict[str, Any]] = {
    "deepseek_v3": _DEEPSEEK | {"vocab": 777},
    "kimi_k2": _DEEPSEEK | {"vocab": 777, "config": {"model_type": "kimi_k2", "n_group": 1, "topk_group": 1}},
    "llama": {"family": "llama3", "heads": 10, "kv_heads": 5, "head_dim": 24, "hidden": 160, "vocab": 777, "layers": 2},
    "qwen2": {"family": "qwen2", "heads": 7, "kv_heads": 1, "hidden": 112, "inter": 208, "vocab": 777, "layers": 2},
    "qwen3": {"family": "qwen3", "heads": 2, "kv_heads": 2, "head_dim": 40, "hidden": 130, "vocab": 801, "layers": 2},
    "qwen3_moe": {"family": "qwen3_moe", "hidden": 104, "experts": 6, "moe_inter": 112, "vocab": 801, "layers": 2},
    "gpt_oss": {
        "family": "gpt_oss",
        "heads": 10,
        "kv_heads": 5,
        "hidden": 104,
        "inter": 112,
        "vocab": 777,
        "layers": 2,
    },
    "gemma3_text": {"family": "gemma3_text", "vocab": 777, "layers": 3},
    "gemma3": {"family": "gemma3", "vocab": 777, "layers": 3},
    "qwen3_vl": {
        "family": "qwen3_vl",
        "heads": 10,
        "kv_heads": 5,
        "head_dim": 24,
        "hidden": 112,
        "vocab": 777,
        "layers": 4,
    },
    "gemma4_text": {
        "family": "gemma4_text",
        "hidden": 96,
        "head_dim": 16,
        "inter": 104,
        "vocab": 801,
        "layers": 3,
        "experts": 6,
    },
    "gemma4": {
        "family": "gemma4",
        "hidden": 96,
        "head_dim": 16,
        "inter": 104,
        "vocab": 777,
        "layers": 6,
        "per_layer": 64,
    },
    "mllama": {"family": "mllama", "heads": 6, "kv_heads": 3, "hidden": 144, "inter": 200, "vocab": 777, "layers": 6},
    "qwen3_vl_moe": {"family": "qwen3_vl_moe", "hidden": 96, "experts": 6, "moe_inter": 80, "vocab": 801, "layers": 4},
    "moss_vl": {"family": "moss_vl", "heads": 6, "kv_heads": 3, "hidden": 144, "inter": 200, "vocab": 777, "layers": 6},
    "qwen3_omni_moe": {"family": "qwen3_omni_moe", "vocab": 801},
    "qwen3_5": {
        "family": "qwen3_5",
        "hidden": 96,
        "heads": 6,
        "kv_heads": 3,
        "head_dim": 32,
        "inter": 200,
        "vocab": 777,
        "layers": 4,
        "linear_num_key_heads": 5,
        "linear_num_value_heads": 10,
    },
    "qwen3_5_moe": {
        "family": "qwen3_5_moe",
        "hidden": 112,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 64,
        "vocab": 801,
        "layers": 4,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 4,
        "experts": 6,
        "moe_inter": 80,
    },
}

TINY |= {model["family"]: model for model in SHORT.models.values()}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    def make(out: Path) -> None:
        for model_type, options in TINY.items():
            (out / model_type).symlink_to(make_checkpoint(tmp=out, **options))

    folder = made_once(tmp_path_factory, "recorded", make)
    return {model_type: str(folder / model_type) for model_type in TINY}


@cache
def compared(tp: int, threads: int, models: tuple[str, ...]) -> list[tuple[dict[str, Any], ...]]:
    return list(zip(*run_ranks(tp, "replay:compare", kwargs={"models": list(models)}, threads=threads), strict=True))


def test_every_family_is_compared() -> None:
    builders = registry._builders()
    # The tiny mistral3 has the text of ministral3.
    assert {builders[model_type] for model_type in (*TINY, "ministral3")} == set(builders.values())


@pytest.mark.parametrize(("tp", "threads"), [(1, 2), (3, 2)])
def test_replay_equals_eager_bit_for_bit(checkpoints: dict[str, str], tp: int, threads: int) -> None:
    """Compare the logits of every step of 44 requests, from 22 in a step down to one, on every rank."""
    cases = compared(tp, threads, tuple(checkpoints.values()))
    assert len(cases) == 2 * len(TINY)
    for ranks in cases:
        check_replayed(ranks)
        steps = ranks[0]["eager"]
        assert {int(step.split()[0]) for step in steps} == {*DECODING}
        assert len(set(steps)) == len(steps)


def check_replayed(ranks: tuple[dict[str, Any], ...]) -> None:
    first, *_ = ranks
    for found in ranks:
        assert found["replayed"] == found["eager"] == first["eager"], (found["model"], found["dtype"])
        assert found["sizes"] == [1, 2, 4, 8, 16, 32]


def test_contexts_over_ranks_are_replayed(checkpoints: dict[str, str]) -> None:
    ranks = run_ranks(3, "replay:compare", kwargs={"models": [checkpoints["deepseek_v3"]], "kv_split": "on"})
    for cases in zip(*ranks, strict=True):
        check_replayed(cases)


@pytest.mark.parametrize(("tp", "threads"), [(1, 2), (3, 2)])
def test_rows_whose_logits_nobody_wants_change_no_others(
    checkpoints: dict[str, str], tmp_path: Path, tp: int, threads: int
) -> None:
    """Rows without logits still need keys and values in the last layer: the tokens after them attend to these."""
    one_layer = make_checkpoint(tmp=tmp_path, **TINY["llama"] | {"layers": 1})
    models = [*checkpoints.values(), str(one_layer)]
    ranks = run_ranks(tp, "replay:choose_rows", kwargs={"models": models}, threads=threads)
    assert len(ranks[0]) == 2 * len(models)
    for found in ranks:
        for case, first in zip(found, ranks[0], strict=True):
            assert case["some"] and case["most"] and case["none"] and case["after"] == first["after"], case


def test_padded_sizes() -> None:
    assert [padded_size(rows) for rows in (1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 33, 49, 256)] == [
        *(1, 2, 4, 4, 8, 8, 16, 16, 32, 32, 48, 64, 256)
    ]


def test_collectives_are_recorded() -> None:
    for found in run_ranks(3, "replay:record_collectives", threads=2):
        assert found["equal"] == [True] * 10
        assert found["closed"] == "a recorded step in a group that was closed"


# Ranks 0 and 2 share a host. The graph of a rank that leads a host has cuts; that of any other rank has none.
HOSTS = ["a", "b", "a"]


def test_replay_over_hosts_equals_eager_and_one_host(checkpoints: dict[str, str]) -> None:
    models = (checkpoints["llama"], checkpoints["qwen3_moe"])
    names = [Path(model).name for model in models]
    with Ranks(3, "replay:compare", kwargs={"models": list(models)}, hosts=HOSTS) as ranks:
        over_hosts = ranks.results(120)
    one_host = [ranks[0] for ranks in compared(3, 2, tuple(checkpoints.values())) if ranks[0]["model"] in names]
    for here, *found in zip(one_host, *over_hosts, strict=True):
        for rank in found:
            assert rank["replayed"] == rank["eager"] == here["eager"], (rank["model"], rank["dtype"])


def test_collectives_over_hosts_are_recorded() -> None:
    with Ranks(3, "replay:record_collectives", threads=2, hosts=HOSTS) as ranks:
        assert [found["equal"] for found in ranks.results(60)] == [[True] * 10] * 3


def test_sums_of_many_rows_over_hosts_are_recorded() -> None:
    with Ranks(3, "replay:record_a_sum_of_many_rows", hosts=HOSTS) as ranks:
        assert ranks.results(60) == [True] * 3


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_rank_of_either_host_killed_during_replay_is_named_by_the_others(victim: int) -> None:
    with Ranks(3, "replay:replay_in_lockstep_for_ever", timeout_s=300, hosts=HOSTS) as ranks:
        for rank in range(3):
            ranks.wait_for(rank, "replaying")
        ranks.signal(victim, signal.SIGKILL)
        for rank in {0, 1, 2} - {victim}:
            assert ranks.result(rank, 30).startswith(f"rank {victim} is gone during a recorded step")


def test_other_groups_stay_eager_and_say_so_once() -> None:
    said = run_ranks(2, "replay:stays_eager", kwargs={"model": str(DEMO)}, collectives="gloo")
    assert said == [["steps run eagerly: collectives of GlooGroup cannot be recorded"], []]


def test_collectives_that_are_no_kernels_cannot_slip_into_a_recording() -> None:
    for said in run_ranks(2, "replay:gloo_is_refused", collectives="gloo"):
        assert "expected only kernels and views while recording" in said


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_killed_during_replay_is_named_by_the_others(victim: int) -> None:
    with Ranks(3, "replay:replay_in_lockstep_for_ever", threads=2, timeout_s=300) as ranks:
        for rank in range(3):
            ranks.wait_for(rank, "replaying")
        ranks.signal(victim, signal.SIGKILL)
        for rank in {0, 1, 2} - {victim}:  # long before the deadline
            assert ranks.result(rank, 120).startswith(f"rank {victim} is gone during a recorded step")


def test_a_stopped_rank_is_named_after_the_deadline() -> None:
    with Ranks(3, "replay:replay_in_lockstep_for_ever", timeout_s=5) as ranks:
        for rank in range(3):
            ranks.wait_for(rank, "replaying")
        ranks.signal(1, signal.SIGSTOP)
        for rank in (0, 2):
            assert ranks.result(rank, 120).startswith("rank 1 did not answer within 5 s during a recorded step")


@pytest.mark.parametrize("victim", [0, 2])
def test_an_engine_that_replays_ends_when_a_rank_is_killed(victim: int) -> None:
    with Ranks(3, "replay:replay_for_ever", kwargs={"model": str(DEMO)}, timeout_s=300) as ranks:
        ranks.wait_for(0, "replaying")
        ranks.signal(victim, signal.SIGKILL)
        for rank in {0, 1, 2} - {victim}:
            assert ranks.result(rank, 120).startswith(f"[1] rank {victim} is gone")


def test_plain_torch_stays_eager_and_says_so_once() -> None:
    env = {"TILERANK_ISA": "reference"}
    said = run_ranks(1, "replay:stays_eager", kwargs={"model": str(DEMO)}, env=env)
    assert said == [["steps run eagerly: kernels run in plain torch"]]


def test_a_profile_counts_the_kernels_of_a_step() -> None:
    worker = Worker(DEMO, join(Membership(0, 1, "", 0)), RankConfig(dtype=torch.float32, max_total_tokens=128))
    pages = ([0, 1], [2], [3])
    first, step = (
        Step([Chunk(0, 40, [7], own[0], 1), Chunk(1, 0, [3], own[1], 1), Chunk(2, 31, [5], own[2], 1)], [])
        for own in (pages, ([], [], []))
    )
    logits = worker.run(first).clone()
    assert worker.profile() is None
    worker.start_profiling()
    assert torch.equal(worker.run(step), logits)
    profile = worker.profile()
    assert profile is not None
    runs = {kernel: count for kernel, (count, _) in profile.by_kernel().items()}
    layers = 6  # of the demo model
    assert runs["attention"] == runs["store_kv"] == runs["norm_rotary"] == layers
    assert runs["argmax"] == runs["rope_rows"] == 1
    assert "silu_mul" not in runs and runs["rms_norm"] == 1  # fused into the preceding product, and into the rotation
    assert runs["add_rms_norm"] == 2 * layers and runs["linear_f32"] == 4 * layers + 1


def test_padding_rows_of_a_mixture_choose_no_other_experts(checkpoints: dict[str, str]) -> None:
    """Padding rows repeat the shortest sequence's row, bit for bit, in every layer, so the router sees nothing new."""
    folder = Path(checkpoints["qwen3_moe"])
    worker = Worker(folder, join(Membership(0, 1, "", 0)), RankConfig(dtype=torch.float32, max_total_tokens=256))
    for position in range(40):
        worker.run(Step([Chunk(0, position, [position + 5], [] if position else [0, 1], 1)], []))
    chunks = [Chunk(0, 40, [7], [], 1), Chunk(1, 0, [3], [2], 1), Chunk(2, 0, [9], [3], 1)]
    logits = worker.run(Step(chunks, []))
    padding = torch.as_strided(logits, (4, logits.shape[1]), logits.stride())[3]  # behind the rows of the sequences
    assert torch.equal(padding, logits[1]) and not torch.equal(padding, logits[2])
    # Now the other sequence is the shortest.
    chunks = [Chunk(0, 40, [7], [], 1), Chunk(1, 1, [4], [], 1), Chunk(2, 0, [9], [], 1)]
    logits = worker.run(Step(chunks, []))
    assert torch.equal(padding, logits[2]) and not torch.equal(padding, logits[1])
