"""bench model and make-model: the work of a model by hand, rows of known timings, and checkpoints read by others."""

import argparse
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from command import DEMO, known_peaks, run

from tilerank.kernels import core
from tilerank.launch.bench import command
from tilerank.launch.bench.cases import Case, Timing, cases_of, prompts, timing_of
from tilerank.launch.bench.peaks import Peaks
from tilerank.launch.bench.public import public_config
from tilerank.launch.bench.report import phase_rows
from tilerank.launch.bench.step_shares import FIELDS, kernel_group, median_step, shares_of
from tilerank.launch.errors import LaunchError
from tilerank.launch.planning.work import ModelWork, model_work
from tilerank.loader.card import read_card
from tilerank.loader.quantization_config import Quantization
from tilerank.parallel.cost import Cost, ExpertBytes, Work

PEAKS = Peaks(stream_read_gbs=20.0, amx_bf16_tflops=4.0, amx_int8_tops=8.0, core_to_core_ns=100.0, first_touch_gbs=5.0)


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(words)


def test_work_of_the_demo_model_by_hand() -> None:
    """hidden 256, MLP 704, 8 query and 2 KV heads of 64, 6 layers, vocabulary 4096, tied."""
    work = model_work(read_card(DEMO), torch.bfloat16)
    qkv, rest = 256 * (8 + 2 + 2) * 64, 8 * 64 * 256 + 3 * 256 * 704
    layer, pair = qkv + rest, 8 * 64 * 4  # heads, dims, 2 for Q K^T and 2 for P V
    # In the last layer, only rows that need logits are computed beyond keys and values.
    assert (work.body.token, work.body.pair) == (Work(bf16=2 * (5 * layer + qkv)), Work(bf16=5 * pair))
    assert (work.end.token, work.end.pair) == (Work(bf16=2 * (rest + 4096 * 256)), Work(bf16=pair))
    norms = 6 * (256 + 256 + 64 + 64) + 256
    assert work.weights == 2 * (6 * layer + 4096 * 256 + norms)
    assert work.cached == 6 * 2 * 2 * 64 * 2  # layers, K and V, heads, dims, bytes
    assert work.body.experts == work.end.experts == ()


def test_float32_weights_are_twice_the_bytes_and_use_no_tiles() -> None:
    card = read_card(DEMO)
    half, whole = model_work(card, torch.bfloat16), model_work(card, torch.float32)
    assert (whole.weights, whole.cached) == (half.weights * 2, half.cached * 2)
    for ours, theirs in ((whole.body, half.body), (whole.end, half.end)):
        assert (ours.token, ours.pair) == (Work(fp32=theirs.token.bf16), Work(fp32=theirs.pair.bf16))


def test_work_of_int8_weights() -> None:
    card = read_card(DEMO)
    half, quantised = model_work(card, torch.bfloat16), model_work(card, torch.bfloat16, Quantization("int8"))
    for ours, theirs in ((quantised.body, half.body), (quantised.end, half.end)):
        assert (ours.token, ours.pair) == (Work(int8=theirs.token.bf16), theirs.pair)
    # Half the bytes, and a scale for each row of a matrix; attention is not quantised.
    assert 0.5 < quantised.weights / half.weights < 0.53
    assert quantised.cached == half.cached


def test_work_of_a_mixture_of_experts_by_hand(tmp_path: Path) -> None:
    """Qwen3-30B-A3B of two layers: hidden 2048, 32 and 4 heads of 128, 8 of 128 experts of width 768."""
    config = public_config("qwen3-30b-a3b") | {"num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    work = model_work(read_card(tmp_path), torch.bfloat16)
    qkv, rest, expert = 2048 * (32 + 4 + 4) * 128, 32 * 128 * 2048 + 2048 * 128, 3 * 2048 * 768  # rest: out and router
    head, norms = 151936 * 2048, 2 * (2 * 2048 + 2 * 128) + 2048
    assert work.weights == 2 * (2 * (qkv + rest) + head + norms)
    experts, pair = (ExpertBytes(2 * 128 * expert, 8 / 128),), Work(bf16=4 * 32 * 128)
    for part, token in ((work.body, 2 * qkv + rest + 8 * expert), (work.end, rest + 8 * expert + head)):
        assert (part.token, part.pair, part.experts) == (Work(bf16=2 * token), pair, experts)
    # One token reads eight experts. Two read 15.5 on average: of the second token's, 8 x 8 / 128 are the first's.
    one, two = work.decode(1, 0), work.decode(2, 0)
    assert one.nbytes == pytest.approx(work.weights + 2 * 2 * 8 * expert)
    assert two.nbytes == pytest.approx(work.weights + 2 * 2 * (8 + 8 * 120 / 128) * expert)
    # A prompt reads all experts of the first layer, but in the last layer only those of its last token.
    assert work.prefill(1, 4000).nbytes == pytest.approx(work.weights + 2 * (128 + 8) * expert + 4000 * work.cached)


WORK = ModelWork(
    body=Cost(900, (ExpertBytes(640, 0.25),), token=Work(bf16=600, int8=10), pair=Work(bf16=16)),
    end=Cost(100, (ExpertBytes(64, 0.25),), token=Work(bf16=100), pair=Work(bf16=2)),
    cached=8,
)


STEP = [("linear_bf16", 0.06), ("moe_int8", 0.04), ("store_kv", 0.02), ("latent_attention", 0.03)]
STEP += [("shm_add_rms_norm", 0.01), ("argmax", 0.01), ("norm_rotary", 0.02), ("embedding", 0.01)]


def test_every_kernel_of_a_step_has_a_group() -> None:
    groups = {kernel: kernel_group(kernel) for kernel, _ in STEP}
    assert list(groups.values()) == ["products"] * 2 + ["attention"] * 2 + ["exchange", "sampling", "other", "other"]
    steps = [shares_of(STEP, seconds) for seconds in (0.5, 0.25, 0.2)]
    assert median_step(steps) == steps[1] and median_step([]) is None


def test_prefill_and_decode_by_hand() -> None:
    # Three queries see 1 + 2 + 3 keys; in `end` only the last one remains, which sees 3. An expert is not chosen by t
    # tokens with probability (3/4)^t.
    found, experts = WORK.prefill(2, 3), 640 * (1 - 0.75**6) + 64 * (1 - 0.75**2)
    assert found.nbytes == pytest.approx(1000 + experts + 2 * 3 * 8)
    assert (found.bf16, found.int8) == (2 * (3 * 600 + 6 * 16 + 100 + 3 * 2), 2 * 3 * 10)
    found = WORK.decode(4, 10)
    assert found.nbytes == pytest.approx(1000 + 704 * (1 - 0.75**4) + 4 * 10 * 8)
    assert (found.bf16, found.int8) == (4 * (600 + 100 + 10 * (16 + 2)), 4 * 10)


def test_rows_are_shares_of_the_peaks() -> None:
    case = Case(batch=2, prompt_tokens=3, new_tokens=4)
    plain = replace(
        WORK,
        body=Cost(900, token=Work(bf16=600), pair=Work(bf16=14)),
        end=Cost(100, token=Work(bf16=100), pair=Work(bf16=2)),
    )
    prefill, decode = phase_rows(case, Timing(0.5, 2.0, 0.25), plain, PEAKS, shares_of(STEP, 0.25))
    assert (prefill["phase"], decode["phase"]) == ("prefill", "decode")
    assert prefill["tokens_per_s"] == 2 * 3 / 2.0 and prefill["ttft_s"] == 0.5
    assert decode["tokens_per_s"] == 2 / 0.25 and decode["tpot_s"] == 0.25
    assert decode["overhead_share"] == pytest.approx(0.2) and "overhead_share" not in prefill
    assert [decode[name] for name in FIELDS[:-1]] == pytest.approx([0.4, 0.2, 0.04, 0.04, 0.12])
    assert prefill["amx_share"] == pytest.approx(2 * (3 * 600 + 6 * 14 + 100 + 3 * 2) / 2.0 / 4e12)
    # The prompt's 3 tokens and 5 new ones, of which the last is not fed back: 4 steps with 4, 5, 6, 7 cached tokens.
    assert case.context == 5.5
    assert decode["bytes"] == 1000 + 2 * 5.5 * 8
    assert decode["stream_share"] == pytest.approx((1000 + 2 * 5.5 * 8) / 0.25 / 20e9)
    # Reading is the limit: 1088 bytes at 20 GB/s take longer than 1576 operations at 4 TFLOP/s.
    assert decode["limit_share"] == decode["stream_share"]
    assert decode["limit_tokens_per_s"] == pytest.approx(2 / (1088 / 20e9))
    assert decode["peaks"] == {
        "stream_read_gbs": 20.0,
        "stream_update_gbs": None,
        "amx_bf16_tflops": 4.0,
        "amx_int8_tops": 8.0,
        "core_to_core_ns": 100.0,
        "first_touch_gbs": 5.0,
        "load_average": 0.0,
        "isa": "amx",
        "vector_fp32_tflops": None,
        "vector_bf16_tflops": None,
        "vector_int8_tops": None,
    }


def test_the_limit_is_the_slower_of_reading_and_computing() -> None:
    assert PEAKS.limit_seconds(Work(20e9, bf16=1e12)) == 1.0
    assert PEAKS.limit_seconds(Work(20e9, bf16=8e12)) == 2.0
    assert PEAKS.limit_seconds(Work(20e9, bf16=8e12, int8=8e12)) == 3.0
    vectors = Peaks(20.0, None, None, None, 5.0, 0.0, "avx512", 0.25, 0.25, 1.0)
    work = Work(20e9, bf16=0.5e12, fp32=0.25e12, int8=1e12)
    assert vectors.limit_seconds(work) == 4.0 and vectors.compute_share(work, 8.0) == 0.5
    assert vectors.amx_share(work, 8.0) is None
    without = Peaks(20.0, None, None, None, 5.0, 0.0, "reference")
    assert without.limit_seconds(work) == 1.0 and without.compute_share(work, 1.0) is None
    assert "GB/s read, no compute peak" in without.text()


def events(*steps: tuple[float, list[int]]) -> list[tuple[int, float]]:
    return [(prompt, seconds) for seconds, prompts in steps for prompt in prompts]


def test_timing_counts_steps_of_all_sequences() -> None:
    # The second prompt is prefilled in the second step, while the first decodes, and ends a step later.
    run_events = events((1.0, [0]), (3.0, [0, 1]), (3.5, [0, 1]), (4.5, [0, 1]), (9.0, [1]))
    assert timing_of(run_events, Case(2, 8, 3)) == Timing(first_token=2.0, prefill=3.0, step=0.75)


def test_a_step_without_every_sequence_does_not_count() -> None:
    run_events = events((1.0, [0, 1]), (2.0, [0, 1]), (5.0, [0]), (7.0, [0, 1]))
    assert timing_of(run_events, Case(2, 8, 3)).step == 1.5


def test_timing_needs_a_step_of_all_sequences() -> None:
    with pytest.raises(LaunchError, match="no step decoded all 2 prompts of 8 tokens together"):
        timing_of(events((1.0, [0]), (3.0, [0, 1]), (4.0, [1])), Case(2, 8, 1))


@pytest.mark.parametrize(("batch", "tokens", "rows"), [(1, 8, 100), (1, 250, 100), (3, 50, 100), (16, 512, 2048)])
def test_all_sequences_decode_together_for_the_requested_steps(batch: int, tokens: int, rows: int) -> None:
    """Simulates the engine: steps of at most `rows` rows, decoding sequences first, then prompts in order."""
    case = Case(batch, tokens, 2)
    total = case.new_tokens + case.prefill_steps(rows)
    unread, new, together = [tokens] * batch, [0] * batch, 0
    while min(new) < total:
        decoding = [i for i in range(batch) if unread[i] == 0 and new[i] < total]
        together += len(decoding) == batch
        room = rows - len(decoding)
        for i in decoding:
            new[i] += 1
        for i in range(batch):
            if unread[i] and room:
                taken = min(room, unread[i])
                unread[i], room = unread[i] - taken, room - taken
                new[i] += unread[i] == 0
    assert together >= case.new_tokens


def test_prompts_depend_on_case_and_seed_alone() -> None:
    case = Case(3, 5, 1)
    made = prompts(case, 100, seed=0)
    assert made == prompts(case, 100, seed=0) != prompts(case, 100, seed=1)
    assert [len(ids) for ids in made] == [5, 5, 5] and all(0 <= id < 100 for ids in made for id in ids)


def test_lists_of_numbers() -> None:
    args = parse("model", "x", "--batch", "4,1,4", "--prompt-tokens", "16")
    assert cases_of(args) == [Case(4, 16, 32), Case(1, 16, 32)]
    with pytest.raises(SystemExit):
        parse("model", "x", "--batch", "1,0")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("model", str(DEMO), "--prompt-tokens", "4090"), "the model's context has 4096"),
        (("model", str(DEMO), "--json", "/nowhere/x"), "expected a file in a writable directory"),
        (("model", str(DEMO), "--json", "/proc/self"), "expected a file in a writable directory"),
        (("model", str(DEMO), "--chart", "/nowhere/x.svg"), "--chart: expected a .svg file in a writable directory"),
        (("model", str(DEMO), "--nnodes", "2"), "starts its own ranks, on this machine only; found --nnodes 2"),
        (("peaks", "--cores", "0,60000"), "expected CPUs that this process may use .*, found 60000"),
        (("make-model", "/nowhere/x", "--like", "qwen3-8b"), "x cannot be created: /nowhere is not a directory"),
        (("make-model", "x", "--like", "qwen3-8b", "--layers", "99"), "expected at most the 36 layers of qwen3-8b"),
        (
            ("make-model", "x", "--like", "qwen3-vl-8b", "--vision-layers", "28"),
            "at most the 27 layers of the vision tower of qwen3-vl-8b, found 28",
        ),
        (
            ("make-model", "x", "--like", "qwen3-8b", "--vision-layers", "2"),
            "expected a model with a vision tower, found qwen3-8b",
        ),
        (("make-model", str(DEMO), "--like", "qwen3-8b"), "exists; expected a directory that does not exist yet"),
    ],
)
def test_refusals_come_before_any_work(words: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(LaunchError, match=sentence):
        command.run(parse(*words))


def test_other_launchers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LaunchError, match=r"bench starts its own ranks, .*; found rank 1 of 2 of another launcher"):
        command.run(parse("model", str(DEMO)))


def test_bench_model_from_end_to_end(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    options = ("--tp", 2, "--prompt-tokens", "8,40", "--batch", "1,2", "--new-tokens", 3, "--repeat", 1)
    result = run("bench", "model", DEMO, *options, "--json", file, env=known_peaks(core.isa()))
    assert (result.status, result.errors) == (0, []), result.err
    rows = json.loads(file.read_text())
    found = [(row["phase"], row["prompt_tokens"], row["batch"]) for row in rows]
    assert found == [
        (phase, tokens, batch) for tokens in (8, 40) for batch in (1, 2) for phase in ("prefill", "decode")
    ]
    for row in rows:
        # stream_share = bytes / seconds / peak
        seconds = row["batch"] * (row["prompt_tokens"] if row["phase"] == "prefill" else 1) / row["tokens_per_s"]
        peak = row["peaks"]["stream_read_gbs"] * 1e9
        assert math.isclose(row["stream_share"], row["bytes"] / seconds / peak)
        assert row["tp"] == 2 and len(row["peak_rss"]) == 2 and min(row["loaded_rss"]) > 50e6
        assert all(peak >= loaded for peak, loaded in zip(row["peak_rss"], row["loaded_rss"], strict=True))
        # The bf16 weights of 6.4 million parameters with their padding, and the norms on both ranks.
        assert 12e6 < sum(row["weight_bytes"]) < 16e6
        assert 0 < row["load_s"] < row["ready_s"]
        if row["phase"] == "decode" and row["overhead_share"] is not None:  # plain torch records no steps
            assert sum(row[name] for name in FIELDS) == pytest.approx(1)
            assert min(row["products_share"], row["attention_share"], row["exchange_share"]) > 0
    fresh = rows[0]["peaks"]["first_touch_gbs"]
    assert re.search(rf"loading [\d.]+ s \([\d.]+ GB/s; first touch of fresh memory {fresh:.2f} GB/s\)", result.out)
    assert "demo-lm: bfloat16 on 2 ranks" in result.out and result.out.count("decode") == 8
