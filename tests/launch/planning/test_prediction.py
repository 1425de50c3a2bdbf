"""`tilerank plan --machine`: the time of a step by hand, the files of machines, and the two commands."""

import argparse
import json
from math import inf
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from command import DEMO
from fake_sysfs import sockets

from tilerank.launch.bench import machine as measuring
from tilerank.launch.bench.public import public_config
from tilerank.launch.commands import doctor
from tilerank.launch.commands import plan as command
from tilerank.launch.errors import LaunchError
from tilerank.launch.goodput.simulation import StepLoad, StepSeconds
from tilerank.launch.host.placement import place
from tilerank.launch.host.topology import read_topology
from tilerank.launch.options.model import ModelOptions
from tilerank.launch.planning.other_machine import idle_machine
from tilerank.launch.planning.prediction.machine import (
    Exchange,
    Machine,
    Shares,
    machine_names,
    read_machine,
    share_at,
    shares_of,
    write_machine,
)
from tilerank.launch.planning.prediction.predict import (
    PredictedServer,
    given_tokens,
    node_parts,
    predict_cases,
    predicted_server,
)
from tilerank.launch.planning.prediction.steps import products_of
from tilerank.launch.planning.work import cached_bytes, model_work
from tilerank.loader.card import read_card
from tilerank.loader.quantization_config import Quantization
from tilerank.parallel.cost import Work
from tilerank.parallel.sharding import Sharding
from tilerank.runtime.rank.registry import build_model

FULL = [(1.0, 1.0)]
SHARES = Shares(
    source="by hand",
    products={"bf16": FULL, "int8": FULL, "int4_a8": FULL},
    attention={"bfloat16": FULL},
    elementwise_gbs=1e9,
    step_us=0,
    sequence_us=0,
    layer_us=0,
)
# Reads a byte in a nanosecond, and computes in no time; the kernels between products take none.
READER = Machine("a reader", "by hand", 2, 10, 64, 1.0, 1e9, 1e9, 1e9, SHARES, between_nodes=Exchange(2.0, 1e9))

# The demo model: hidden 256, MLP 704, 8 query and 2 KV heads of 64, 6 layers, vocabulary 4096, tied.
QKV, REST, HEAD = 256 * 12 * 64, 8 * 64 * 256 + 3 * 256 * 704, 4096 * 256
NORMS = 2 * (6 * (256 + 256 + 64 + 64) + 256)
WEIGHTS = 2 * (6 * (QKV + REST) + HEAD) + NORMS
CACHED = 6 * 2 * 2 * 64 * 2  # layers, K and V, heads, dims, bytes


def server_of(machine: Machine, tp: int, prefill: int = 0) -> PredictedServer:
    topology = idle_machine(machine.nodes, 1 << 36, machine.cores)
    placement = place(topology, tp)
    return predicted_server(read_card(DEMO), ModelOptions(), machine, node_parts(machine, placement.ranks), prefill)


def step_of(machine: Machine, tp: int) -> StepSeconds:
    return server_of(machine, tp).step_s


def changed(machine: Machine, **fields: Any) -> Machine:
    return msgspec.structs.replace(machine, **fields)


def with_shares(**fields: Any) -> Machine:
    return changed(READER, shares=msgspec.structs.replace(SHARES, **fields))


def test_shares_between_two_points_follow_the_logarithm_of_the_balance() -> None:
    points = [(0.1, 0.9), (10.0, 0.5), (20.0, 0.6)]
    found = [share_at(points, balance) for balance in (0.0, 0.05, 0.1, 1.0, 10.0, 20.0, inf)]
    assert found == pytest.approx([0.9, 0.9, 0.9, 0.7, 0.5, 0.6, 0.6])


def test_a_decode_step_takes_the_time_of_its_bytes() -> None:
    """One rank on two nodes reads at both rates."""
    seconds = step_of(READER, 1)(StepLoad.decode(3, 100))
    assert seconds == pytest.approx((WEIGHTS + 3 * 100 * CACHED) * 1e-9 / 2, rel=1e-6)
    measured = step_of(with_shares(products={"bf16": [(1.0, 0.5)]}, step_us=70, sequence_us=10, layer_us=5), 1)
    extra = (WEIGHTS - NORMS) * 1e-9 / 2 + (70 + 3 * 10 + 6 * 5) * 1e-6
    assert measured(StepLoad.decode(3, 100)) == pytest.approx(seconds + extra, rel=1e-6)


def test_ranks_read_their_parts_and_add_up() -> None:
    """Two ranks have a node each, and halve everything but the norms. Sums: after the embedding, two for a layer, and
    the logits."""
    seconds = step_of(READER, 2)(StepLoad.decode(1, 100))
    part = (WEIGHTS - NORMS + 100 * CACHED) / 2 + NORMS
    assert seconds == pytest.approx(part * 1e-9 + 14 * 2e-6, rel=1e-6)
    slow, fast = step_of(changed(READER, between_nodes=Exchange(2.0, 1e-3)), 2), step_of(READER, 2)
    decode, prompt = StepLoad.decode(5, 100), StepLoad.prompt(0, 100, last=True)
    assert slow(decode) - fast(decode) == pytest.approx((13 * 5 * 256 * 2 + 5 * 4096 * 4) / 1e6, rel=1e-6)
    # In the last layer, only the last token of the prompt goes on.
    exchanged = (11 * 100 + 2) * 256 * 2 + 4096 * 4
    assert slow(prompt) - fast(prompt) == pytest.approx(exchanged / 1e6, rel=1e-6)


def test_ranks_that_share_the_cores_of_a_node_have_a_part_of_its_rate() -> None:
    one_node = changed(READER, nodes=1)
    halves = step_of(one_node, 2)(StepLoad.decode(1, 100))
    part = (WEIGHTS - NORMS + 100 * CACHED) / 2 + NORMS
    assert halves == pytest.approx(2 * part * 1e-9 + 14 * 2e-6, rel=1e-6)


def test_ranks_that_are_apart_copy_what_they_cache() -> None:
    """Of 100 tokens, a prefill rank computes 96, whose bytes each rank copies once at 0.5 bytes in a nanosecond."""
    machine = changed(READER, between_nodes=Exchange(2.0, 0.5))
    [case] = predict_cases(server_of(machine, 2, prefill=1), [100], [1], new_tokens=1)
    computed, rest, copies = WEIGHTS + 96 * CACHED, WEIGHTS + 100 * CACHED, 2 * 96 * CACHED / 0.5
    assert case.first_s == pytest.approx((computed + copies + rest) * 1e-9, rel=1e-6)
    assert case.step_s == pytest.approx((WEIGHTS + 101 * CACHED) * 1e-9, rel=1e-6)


def test_what_prefill_ranks_compute_of_a_prompt() -> None:
    """Full pages of 32 tokens before the last token; with states, full blocks of 64 before the last 8."""
    assert [given_tokens(tokens, states=False) for tokens in (1, 32, 33, 64, 65)] == [0, 0, 32, 32, 64]
    assert [given_tokens(tokens, states=True) for tokens in (1, 71, 72, 135, 136)] == [0, 0, 64, 64, 128]


def test_caches_of_a_sequence_in_bytes(tmp_path: Path) -> None:
    """Gemma-3-1B: 26 layers of one head of 256, of which 4 keep all tokens and 22 a window of 512."""
    (tmp_path / "config.json").write_text(json.dumps(public_config("gemma-3-1b")))
    nbytes = cached_bytes(build_model(read_card(tmp_path), Sharding(0, 1, torch.bfloat16, None)).cache_specs())
    token = 2 * 256 * 2  # of a layer: K and V in bfloat16
    assert (nbytes(100), nbytes(1000)) == (26 * 100 * token, (4 * 1000 + 22 * 512) * token)


def test_ranks_that_are_not_bound_have_as_many_cores_as_threads() -> None:
    placement = place(idle_machine(2, 1 << 36, 10), 2, "none")
    assert node_parts(READER, placement.ranks) == [1, 1]


def test_a_prompt_takes_the_time_of_its_operations() -> None:
    """Logits, and in the last layer all but keys and values, are of the last token alone."""
    machine = changed(READER, nodes=1, read_gbs=1e9, bf16_tflops=1e-3)
    [case] = predict_cases(server_of(machine, 1), [1000], [1], new_tokens=1)
    pairs = 1000 * 1001 // 2
    products = 1000 * (6 * QKV + 5 * REST) + REST + HEAD
    attention = 8 * 64 * 4 * (5 * pairs + 1000)
    assert case.first_s == pytest.approx((2 * products + attention) / 1e9, rel=1e-4)
    one = 2 * (6 * (QKV + REST) + HEAD) + 6 * 8 * 64 * 4 * 1001
    assert case.step_s == pytest.approx(one / 1e9, rel=1e-4)
    assert case.tokens_per_s == 1 / case.step_s


def test_kernels_between_products_take_the_time_of_their_bytes() -> None:
    """In a layer, a token adds two sums to the residual, rotates 10 heads in place, and stores 2 keys and 2 values.

    An addition reads and writes four rows of 256. In the last layer, only the token with logits has additions.
    """
    machine = changed(READER, nodes=1, read_gbs=1e9, shares=msgspec.structs.replace(SHARES, elementwise_gbs=1.0))
    sums, heads = 2 * 4 * 256 * 2, (2 * 10 + 2 * 4) * 64 * 2
    seconds = step_of(machine, 1)
    prompt = 1000 * (5 * (sums + heads) + heads) + sums
    assert seconds(StepLoad.prompt(0, 1000, last=True)) == pytest.approx(prompt * 1e-9 / 10, rel=1e-4)
    assert seconds(StepLoad.decode(3, 100)) == pytest.approx(3 * 6 * (sums + heads) * 1e-9 / 10, rel=1e-3)


def test_products_have_the_format_of_their_weights() -> None:
    """int4 keeps the head and the projections to values in int8."""
    work = model_work(read_card(DEMO), torch.bfloat16, Quantization("int4"))
    load = StepLoad.decode(2, 50)
    found: dict[str, Work] = {}
    for name, part in products_of(work, load.rows, load.logits):
        found[name] = found.get(name, Work()) + part
    values = 6 * 256 * 2 * 64
    assert found.keys() == {"int4_a8", "int8"}
    assert found["int8"].int8 == 2 * 2 * (values + HEAD)
    assert found["int4_a8"].int8 == 2 * 2 * (6 * (QKV + REST) - values)
    rest = work.step(load) + (found["int8"] + found["int4_a8"]) * -1
    assert rest.nbytes == pytest.approx(NORMS + 2 * 50 * CACHED)
    assert (rest.bf16, rest.int8) == (2 * 50 * 6 * 8 * 64 * 4, 0)


def test_products_of_experts_have_the_bytes_of_those_that_are_chosen(tmp_path: Path) -> None:
    config = public_config("qwen3-30b-a3b")
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    work = model_work(read_card(tmp_path), torch.bfloat16)
    assert [part.of_experts for part in work.body.products] == [False, True]
    read = sum(part.nbytes for _, part in products_of(work, rows=4, logits=4))
    # Everything but norms, and of the 128 experts of a layer those that 4 tokens with 8 choices each choose.
    expert = 3 * 2048 * 768 * 2
    layer = 2048 * (32 + 2 * 4) * 128 * 2 + 32 * 128 * 2048 * 2 + 128 * 2048 * 2
    chosen = 128 * expert * (1 - (1 - 8 / 128) ** 4)
    assert read == pytest.approx(2 * (layer + chosen) + 151936 * 2048 * 2, rel=1e-3)
    # A token has two additions to the residual, the sum of 8 experts in fp32, and 32 + 4 heads of 128 to rotate, of
    # which 4 are stored with their values. In the last layer, only the heads are computed for all tokens.
    heads = (2 * 36 + 4 * 4) * 128 * 2
    assert work.body.elementwise == 2 * 4 * 2048 * 2 + 2048 * (8 * 4 + 2) + 2 * heads


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"products": {"int8": FULL}}, "shares: expected products of the format bf16, found int8"),
        ({"attention": {"int8": FULL}}, "shares: expected attention with a cache of bfloat16, found int8"),
        ({"products": {"bf16": [(2.0, 1.0), (1.0, 1.0)]}}, "products: bf16: expected points in order of balance"),
    ],
)
def test_shares_that_do_not_suffice(change: dict[str, Any], expected: str) -> None:
    with pytest.raises(LaunchError, match=expected):
        step_of(with_shares(**change), 1)(StepLoad.decode(1, 1))


def test_machines_of_the_package_can_be_read() -> None:
    for name in machine_names():
        machine = read_machine(name)
        shares = shares_of(machine)
        assert machine.source and shares.source and {"bf16", "int8", "fp8"} <= shares.products.keys()
    assert len(machine_names()) >= 3


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"speed": 3}, "unknown field `speed`"),
        ({"nodes": 0}, "nodes"),
        ({"read_gbs": "fast"}, "read_gbs"),
        ({"between_nodes": None}, "expected between_nodes, because there are several of them"),
        ({"hosts": 2}, "expected between_hosts, because there are several of them"),
        ({"shares": "none"}, "expected a table or one of xeon-amx, zen5, found 'none'"),
    ],
)
def test_mistakes_in_the_file_of_a_machine(change: dict[str, Any], expected: str, tmp_path: Path) -> None:
    file = tmp_path / "machine.yaml"
    file.write_text(json.dumps(msgspec.to_builtins(READER) | change))  # JSON is YAML
    with pytest.raises(LaunchError, match=expected):
        shares_of(read_machine(str(file)))
    with pytest.raises(
        LaunchError, match=f"expected a file or one of {', '.join(machine_names())}, found: No such file"
    ):
        read_machine(str(tmp_path / "none"))


def parse(*words: object) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args([str(word) for word in words])


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_machine(tmp_path / "machine.yaml", READER)
    goodput = ("--slo", "ttft=50ms,tpot=50ms", "--mix", tmp_path / "mix.jsonl")
    words = [DEMO, "--machine", tmp_path / "machine.yaml", "--prompt-tokens", 100, "--batch", 1, *goodput]
    (tmp_path / "mix.jsonl").write_text('{"prompt_tokens": 10, "new_tokens": 4}\n')
    assert command.run(parse(*words, "--json")) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["tp"] == 2 and report["prediction"]["source_of_shares"] == "by hand"
    [case] = report["prediction"]["cases"]
    assert case["step_s"] == pytest.approx(step_of(READER, 2)(StepLoad.decode(1, 116.5)))
    # Steps take some milliseconds, whatever is in them, and a request needs four of them; 256 run at a time.
    assert report["prediction"]["goodput_requests_per_s"] > 1000
    assert command.run(parse(*words)) == 0
    page = capsys.readouterr().out
    assert "Prediction for a reader: 2 nodes of 10 cores, 1 GB/s a node. Nothing of this is measured." in page
    assert "mix.jsonl: 10 prompt tokens" in page and "Rates of the machine: by hand." in page


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--dp", 2), "--machine predicts the speed of one replica: expected no --dp with it"),
        (("--nodes", 2, "--node-memory", 8), "--machine describes a whole machine: expected no --nodes with it"),
        (("--cores", "0"), "--cores 0 names cores of this machine, but --machine plans for another one"),
        (("--tp", 3, "--kv-cache-dtype", "int8"), "expected attention with a cache of int8"),
    ],
)
def test_options_that_do_not_go_with_a_machine(options: tuple[object, ...], expected: str, tmp_path: Path) -> None:
    write_machine(tmp_path / "machine.yaml", READER)
    with pytest.raises(LaunchError, match=expected):
        command.run(parse(DEMO, "--machine", tmp_path / "machine.yaml", *options))


def kernel(name: str, format: str, stream: float, compute: float) -> dict[str, Any]:
    shares = {"stream_share": stream, "compute_share": compute, "limit_share": max(stream, compute)}
    return {"kernel": name, "format": format, **shares}


def test_doctor_writes_what_the_benchmarks_measure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two nodes of two cores each. A sum takes 3 us, and 1 ms for each MB."""
    both = {"1": 1.0, "4": 80.0}
    reports: dict[str, Any] = {
        "peaks": {
            "cores": [0, 1, 2, 3],
            "isa": "avx512",
            "stream_read_gbs": both,
            "stream_update_gbs": {"1": 1.0, "4": 60.0},
            "first_touch_gbs": both,
            "core_to_core_ns": {"0-1": 100.0},
            "vector_fp32_tflops": {"4": 1.0},
            "vector_bf16_tflops": {"4": 2.0},
            "vector_int8_tops": {"4": 4.0},
        },
        "kernels": [
            kernel("linear", "int4", 0.1, 0.8),
            kernel("linear", "int4", 0.9, 0.45),
            kernel("linear", "int4-g32", 0.2, 0.2),
            kernel("decode attention", "bfloat16", 0.8, 0.2),
            kernel("decode attention", "int8", 0.7, 0.35),
            kernel("extend attention", "bfloat16", 0.01, 0.5),
            kernel("window attention", "bfloat16", 0.3, 0.3),
            kernel("add_rms_norm", "bfloat16", 0.1, 0.0) | {"bytes": 9e6, "seconds": 1e-3},
            kernel("norm_rotary_", "bfloat16", 0.1, 0.0) | {"bytes": 3e6, "seconds": 2e-3},
            kernel("silu", "bfloat16", 0.1, 0.0) | {"bytes": 1e9, "seconds": 1.0},
        ],
        "comm": [
            {"operation": "all_reduce", "bytes": 1000, "seconds": 4e-6},
            {"operation": "all_reduce", "bytes": 1_001_000, "seconds": 1.004e-3},
            {"operation": "all_gather", "bytes": 1000, "seconds": 1.0},
        ],
    }
    asked: list[str] = []

    def bench(name: str, *_: str) -> Any:
        asked.append(name)
        return reports[name]

    topology = read_topology(sockets(2, 2).write(tmp_path / "sys"))
    monkeypatch.setattr(measuring, "_bench", bench)
    monkeypatch.setattr(doctor, "read_topology", lambda: topology)
    file = tmp_path / "machine.yaml"
    assert doctor.run(argparse.Namespace(machine=file, json=False)) == 0
    assert asked == ["peaks", "kernels", "comm"] and "80.0 GB/s" in capsys.readouterr().out
    found = read_machine(str(file))
    assert (found.nodes, found.cores, found.read_gbs, found.update_gbs) == (2, 2, 40, 30)
    assert (found.fp32_tflops, found.bf16_tflops, found.int8_tops) == (0.5, 1, 2)
    assert found.between_nodes is not None
    assert (found.between_nodes.latency_us, found.between_nodes.gbs) == pytest.approx((3, 1))
    shares = shares_of(found)
    assert shares.products == {"int4": [(0.5, 0.9), (8.0, 0.8)]}
    assert shares.attention == {"bfloat16": [(0.25, 0.8), (50.0, 0.5)], "int8": [(0.5, 0.7), (50.0, 0.5)]}
    assert shares.elementwise_gbs == 1.0  # 12 MB in 3 ms on four cores


def test_doctor_does_not_measure_for_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="--machine: expected a file in a writable directory"):
        doctor.run(argparse.Namespace(machine=tmp_path / "none" / "machine.yaml", json=False))
