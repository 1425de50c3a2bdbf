"""The comparisons with other systems: which peers can be measured, what they get, and each script on a small model."""

import argparse
import json
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import tiny
from command import DEMO, Result, known_peaks, run
from media_files import DEMO_VL

from benchmarks import compare, compare_media
from benchmarks.peer import Peer, peers_of
from benchmarks.script import parse
from tilerank.kernels import core
from tilerank.launch.errors import LaunchError

ROOT = Path(__file__).parents[2]


def script(name: str, *arguments: object) -> Result:
    """Run a script of benchmarks/ as from a clone, without the measurement of peaks."""
    command = (sys.executable, "-m", f"benchmarks.{name}")
    return run(*arguments, command=command, cwd=ROOT, env=known_peaks(core.isa()))


def test_why_a_peer_cannot_be_measured(tmp_path: Path) -> None:
    assert compare.obstacle(Peer("transformers", sys.executable), DEMO) is None
    assert compare.obstacle(Peer("transformers", str(tmp_path / "python")), DEMO) == (
        f"{tmp_path / 'python'} cannot be run: No such file or directory"
    )
    without = tmp_path / "without"
    without.write_text(f'#!/bin/sh\nexec {sys.executable} -S -I "$@"\n')
    without.chmod(0o755)
    assert (
        compare.obstacle(Peer("transformers", str(without)), DEMO)
        == f"not installed: {without} has no module transformers"
    )
    assert compare.obstacle(Peer("vllm", sys.executable), DEMO) is not None
    for name, quantization in (("transformers", "int8"), ("llama.cpp", "fp8")):
        expected = f"its program does not support --quantization {quantization}"
        assert compare.obstacle(Peer(name, sys.executable), DEMO, quantization) == expected
    file = tmp_path / "model.gguf"
    assert compare.obstacle(Peer("transformers", sys.executable), file) == "its program reads directories alone"
    built = Peer("ik_llama.cpp", str(tmp_path / "bin" / "python"))
    header = tmp_path / "include" / "llama.h"
    assert compare.obstacle(built, DEMO) == "its program reads GGUF files alone"
    assert compare.obstacle(built, file) == f"not installed: there is no {header}"
    header.parent.mkdir()
    header.touch()
    assert compare.obstacle(built, file) is None


def test_peers_have_interpreters() -> None:
    parse_peers = peers_of(compare_media.PEERS)
    assert parse_peers("openvino=/a/python,transformers") == [
        Peer("openvino", "/a/python"),
        Peer("transformers", sys.executable),
    ]
    assert parse_peers("llama.cpp") == [Peer("llama.cpp", sys.executable)]
    with pytest.raises(argparse.ArgumentTypeError, match=r"openvino, llama\.cpp, found 'vllm'"):
        parse_peers("transformers,vllm")


def test_ranks_get_the_options_of_the_benchmark_alone() -> None:
    argv = ["x", "--with", "vllm=/a/python", "--tp", "2", "--scratch=/b", "--batch", "1"]
    args = parse("model", compare.add_own_arguments, argv)
    assert (args.tp, args.peers, args.scratch) == (2, [Peer("vllm", "/a/python")], Path("/b"))
    assert args.argv == ["bench", "model", "x", "--tp", "2", "--batch", "1"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--chart", "x.png"), "--chart: expected a .svg file"),
        (("--image", "64x64"), "--image: peers are compared with text only"),
    ],
)
def test_refusals_come_before_any_work(words: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(LaunchError, match=sentence):
        compare.compare(parse("model", compare.add_own_arguments, [str(DEMO), *words]))


def test_a_comparison_from_end_to_end(tmp_path: Path) -> None:
    file, chart = tmp_path / "rows.json", tmp_path / "chart.svg"
    sizes = ("--prompt-tokens", 8, "--batch", 2, "--new-tokens", 2, "--repeat", 1, "--tp", 2)
    outputs = ("--json", file, "--chart", chart, "--scratch", tmp_path / "scratch")
    result = script("compare", DEMO, "--with", "transformers,sglang", *sizes, *outputs)
    assert (result.status, result.errors) == (0, []), result.err
    rows = json.loads(file.read_text())
    assert [(row["system"], row["phase"]) for row in rows] == [
        (system, phase) for system in ("tilerank", "transformers") for phase in ("prefill", "decode")
    ]
    assert all(row["tokens_per_s"] > 0 and row["load_s"] > 0 for row in rows)
    assert "sglang: skipped" in result.out and result.out.count("transformers") == 2
    assert ElementTree.parse(chart).getroot().tag.endswith("svg")
    assert (tmp_path / "scratch" / "transformers" / "result.json").exists()


def test_peers_get_the_quantization(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import json, sys, time\n"
        "workload = json.load(open(sys.argv[1]))\n"
        "events = [[[0, 0.1 * (i + 1)] for i in range(case['new_tokens'] + 1)] for case in workload['cases']]\n"
        "json.dump({'load_s': 0, 'ready_at': time.monotonic(), 'events': events}, open(sys.argv[2], 'w'))\n"
    )
    measured_by = compare.Program(str(program), ("json",), quantizations=("int8", "int4"))
    monkeypatch.setitem(compare.PEERS, "llama.cpp", measured_by)
    peer = Peer("llama.cpp", sys.executable)
    received: list[tuple[str | None, int]] = []
    for words in ((), ("--quantization", "int8"), ("--quantization", "int4", "--quantization-group", "32")):
        args = parse("model", compare.add_own_arguments, [str(DEMO), "--prompt-tokens", "4", "--batch", "1", *words])
        assert compare.obstacle(peer, args.model, args.quantization) is None
        compare._measure_peer(args, peer, [0], "bfloat16", 0, tmp_path)
        workload = json.loads((tmp_path / "llama.cpp" / "workload.json").read_text())
        received.append((workload["quantization"], workload["group"]))
    assert received == [(None, 64), ("int8", 64), ("int4", 32)]


def test_a_comparison_of_pictures(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    result = script("compare_media", DEMO_VL, "--tp", 1, "--size", "64x64", "--repeat", 1, "--json", file)
    assert (result.status, result.errors) == (0, []), result.err
    rows = {(row["system"], row["part"]): row for row in json.loads(file.read_text())}
    if "transformers: skipped" in result.out:  # it needs torchvision
        assert {system for system, _ in rows} == {"tilerank"}
    else:
        for part in ("decode", "preprocessing", "tower", "first token", "next token"):
            assert rows["transformers", part]["seconds"] > 0 and rows["transformers", part]["tokens"] == 16
    refused = script("compare_media", DEMO_VL, "--audio", 2, "--with", "openvino")
    assert refused.status == 1 and "demo-vl takes image and video, not audio" in refused.err


def test_the_peer_of_sound_is_transformers(tmp_path: Path) -> None:
    hears = tiny.make_checkpoint("qwen3_omni_moe", tmp_path, seed=3)
    refused = script("compare_media", hears, "--audio", 2, "--with", "openvino")
    assert refused.status == 1 and "--audio: the only peer is transformers" in refused.err


def test_a_comparison_of_speech(tmp_path: Path) -> None:
    model = tiny.make_checkpoint("qwen3_omni_moe", tmp_path, seed=4, layers=5)
    done = script("compare_speech", model, "--frames", "1,2", "--repeat", 1, "--json")
    assert (done.status, done.errors) == (0, []), done.err
    rows = json.loads(done.out)
    systems = ("tilerank", "transformers")
    assert [(row["system"], row["frames"]) for row in rows] == [(s, n) for s in systems for n in (1, 2)]
    for row in rows:
        assert row["sound_seconds"] == pytest.approx(0.08 * row["frames"])
        assert row["real_time_factor"] == pytest.approx(row["seconds"] / row["sound_seconds"])
