"""bench media: the work of a tower by hand, rows of known times, pictures, and a run on a small model."""

import argparse
import io
import json
import math
import wave
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from command import known_peaks, run
from media_files import DEMO_VL
from PIL import Image

from tilerank.kernels import core, ops
from tilerank.kernels.contract import Contract
from tilerank.launch.bench import command
from tilerank.launch.bench.launch_times import launch_times
from tilerank.launch.bench.media import tower_parts
from tilerank.launch.bench.media_inputs import (
    Clip,
    MediaPrompts,
    clips_of,
    random_file,
    random_frames,
    random_jpeg,
    size_of,
    size_text,
    sizes_of,
)
from tilerank.launch.bench.media_report import PARTS, TOWER_PARTS, rows_of, table
from tilerank.launch.bench.peaks import Peaks
from tilerank.launch.bench.public import public_config, public_processor
from tilerank.launch.errors import LaunchError
from tilerank.launch.planning.work import encoder_work
from tilerank.loader.card import read_card
from tilerank.parallel.cost import Work

PEAKS = Peaks(stream_read_gbs=20.0, amx_bf16_tflops=4.0, amx_int8_tops=8.0, core_to_core_ns=100.0, first_touch_gbs=5.0)
DEMO = Path(__file__).parents[3] / "assets" / "demo-lm"


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(words)


def test_work_of_a_tower_by_hand(tmp_path: Path) -> None:
    """Qwen3-VL-2B: 24 layers of 1024 and 4096, patches of 3 x 2 x 16 x 16, four mergers of 4 x 1024 to 2048."""
    (tmp_path / "config.json").write_text(json.dumps(public_config("qwen3-vl-2b")))
    work = encoder_work(read_card(tmp_path), torch.bfloat16, (2, 6, 10))
    patches, per_patch = 2 * 60, 1536 * 1024 + 24 * (4 * 1024 * 1024 + 2 * 1024 * 4096)
    merger = 4096 * 4096 + 4096 * 2048
    linear = 2 * (patches * per_patch + patches // 4 * 4 * merger)
    # Biases of the layers, and two vectors of each norm.
    vectors = 1024 + 24 * (4 * 1024 + 4096 + 1024 + 4 * 1024) + 4 * (4096 + 2048) + 2 * 1024 + 3 * 2 * 4096
    assert work["linear layers"] == Work(2 * (per_patch + 4 * merger + vectors), bf16=linear)
    # Two frames, in each of which 60 patches see 60 patches; a product and a sum in 16 heads of 64, for Q K^T and P V.
    assert work["attention"] == Work(24 * 4 * patches * 1024 * 2, bf16=24 * 2 * 60 * 60 * 4 * 16 * 64)
    whole = encoder_work(read_card(tmp_path), torch.float32, (2, 6, 10))
    assert whole["linear layers"] == Work(2 * work["linear layers"].nbytes, fp32=linear)


def test_work_of_tiles_by_hand(tmp_path: Path) -> None:
    """Llama-3.2-11B-Vision: 40 layers of 1280 and 5120 over the 4 x 1608 rows of a picture, of which one tile of 1601
    is real: real rows see all, and the others see the real ones. Patches of 3 x 14 x 14, and a projector."""
    (tmp_path / "config.json").write_text(json.dumps(public_config("llama-3.2-11b-vision")))
    work = encoder_work(read_card(tmp_path), torch.bfloat16, (1, 40, 40))
    rows, block = 4 * 1608, 4 * 1280 * 1280 + 2 * 1280 * 5120
    linear = 1600 * 3 * 14 * 14 * 1280 + rows * 40 * block + 4 * 1601 * 6 * 1280 * 4096
    assert work["linear layers"].bf16 == 2 * linear
    pairs = 1601 * rows + (rows - 1601) * 1601
    assert work["attention"] == Work(40 * 4 * rows * 1280 * 2, bf16=40 * pairs * 4 * 1280)


@pytest.fixture(scope="module")
def hears(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_checkpoint("qwen3_omni_moe", tmp_path_factory.mktemp("omni"), seed=3)


def test_work_of_a_tower_of_sound_by_hand(hears: Path) -> None:
    """Qwen3-Omni of 3 layers of 64 and 136 with 24 channels: 10.5 s are 11 chunks, which are convolved whole, and 137
    steps, in windows of 104."""
    work = encoder_work(read_card(hears), torch.bfloat16, (1050, 1, 1))
    convolutions = 11 * (50 * 64 * 9 * 24 + (25 * 32 + 13 * 16) * 9 * 24 * 24 + 13 * 16 * 24 * 64)
    layers = 137 * (3 * (4 * 64 * 64 + 2 * 64 * 136) + 64 * 64 + 64 * 128)
    assert work["linear layers"].bf16 == 2 * (convolutions + layers)
    assert work["attention"].bf16 == 3 * (104**2 + 33**2) * 4 * 64


def test_public_processors_cut_pictures_as_their_configs_say() -> None:
    for like in ("qwen3-vl-2b", "qwen3-vl-8b"):
        vision = public_config(like)["vision_config"]
        for settings in public_processor("qwen3_vl").files.values():
            assert settings["patch_size"] == vision["patch_size"] and settings["merge_size"] == 2


def test_sizes() -> None:
    assert sizes_of("640x480,32x32,640x480") == [(640, 480), (32, 32)]
    for wrong in ("640", "0x5", "5x0", "axb", "-1x5", "16385x1"):
        with pytest.raises(argparse.ArgumentTypeError, match="expected a width and a height"):
            size_of(wrong)


def test_clips() -> None:
    assert clips_of("30,1,30") == [Clip(30), Clip(1)] and size_text(Clip(30)) == "30 s"
    for wrong in ("0", "3601", "1.5", "a"):
        with pytest.raises(argparse.ArgumentTypeError, match="expected seconds up to 3600, found"):
            clips_of(wrong)
    file = random_file(Clip(2), "a")
    with wave.open(io.BytesIO(file)) as sound:
        assert (sound.getframerate(), sound.getnframes(), sound.getnchannels()) == (16000, 32000, 1)
    assert file == random_file(Clip(2), "a") != random_file(Clip(2), "b")


def test_a_random_jpeg_is_a_picture_of_its_size_and_seed() -> None:
    file = random_jpeg((70, 33), "a")
    assert Image.open(io.BytesIO(file)).size == (70, 33)
    assert file == random_jpeg((70, 33), "a") != random_jpeg((70, 33), "b")


def test_a_picture_before_tokens() -> None:
    """Patches of 8, merged to 16: a picture of 128 x 64 has 8 x 4 tokens."""
    prompts = MediaPrompts(DEMO_VL)
    prompt = prompts.before([7, 8, 9], random_frames((128, 64), "a"))
    assert prompts.grid((128, 64)) == prompt.media[0].grid == (1, 8, 16)
    assert len(prompt.token_ids) == prompts.tokens_before((128, 64)) + 3 and prompt.token_ids[-3:] == [7, 8, 9]
    (place,) = prompt.placeholder_ranges
    assert place.count == 32 and prompt.token_ids[place.start : place.start + 32] == [494] * 32
    # The picture takes as many positions as its longer side has tokens.
    last = len(prompt.token_ids) - 1 - 32 + 8
    assert [axis[-3:] for axis in prompt.positions] == [[last - 2, last - 1, last]] * 3
    assert {len(axis) for axis in prompt.positions} == {len(prompt.token_ids)} and prompt.shift == 8 - 32


def test_launches_are_timed() -> None:
    run, x = Contract.run, torch.ones(3, 64)
    with launch_times() as times:
        assert torch.equal(ops.add(x, x), x + x)
    assert Contract.run is run
    if core.isa() == "reference":
        assert times == {}
    else:
        assert list(times) == [core.kernel("add")] and times[core.kernel("add")] > 0


def test_parts_of_a_tower() -> None:
    names = ("patches", "linear_bf16", "attention", "store_kv", "layer_norm", "add", "shm_all_reduce", "rotary_float")
    if core.kernel("patches") < 0:
        pytest.skip("no compiled core")
    parts = tower_parts(300.0, {core.kernel(name): 2.0**i for i, name in enumerate(names)})
    assert parts == {
        "preprocessing": 1.0,
        "tower": 299.0,
        "linear layers": 2.0,
        "attention": 4.0 + 8.0,
        "norms": 16.0,
        "sums": 32.0 + 64.0,
        "other kernels": 128.0,
        "between kernels": 300.0 - 255.0,
    }
    assert tower_parts(3.0, {}) == {"tower": 3.0}


def known_reports() -> dict[str, Any]:
    work = {"linear layers": {"nbytes": 1e9, "bf16": 8e12}, "attention": {"nbytes": 0.0, "bf16": 4e12}}
    parts = {"linear layers": 4.0, "attention": 2.0, "norms": 0.5, "sums": 0.25, "other kernels": 0.5}
    ours = [
        {
            "decode": 1.0,
            "first token": token,
            "next token": token / 10,
            "preprocessing": 0.5,
            "tower": tower,
            "rates": {"stream_read_gbs": rate},
        }
        | parts
        | {"between kernels": tower - 7.25}
        for token, tower, rate in ((30.0, 10.0, 10.0), (20.0, 8.0, 30.0), (40.0, 12.0, 20.0))
    ]
    theirs = [{"decode": 2.0, "first token": 90.0, "next token": 6.0, "preprocessing": 5.0, "tower": 30.0}]
    return {
        "tilerank": {
            "isa": "amx",
            "dtype": "bfloat16",
            "tp": 1,
            "sizes": [{"size": "64x32", "tokens": 2, "work": work, "runs": ours}],
        },
        "transformers": {"version": "5", "dtype": "bfloat16", "tp": None, "sizes": [{"size": "64x32", "runs": theirs}]},
    }


def test_rows_are_of_the_median_run_and_shares_of_the_peaks() -> None:
    rows = {(row["system"], row["part"]): row for row in rows_of(known_reports(), "tiny", PEAKS)}
    assert len(rows) == len(PARTS) + len(TOWER_PARTS) + len(PARTS)
    tower, linear = rows["tilerank", "tower"], rows["tilerank", "linear layers"]
    assert tower["seconds"] == 10.0 and tower["flops"] == 12e12 and tower["compute_share"] == pytest.approx(0.3)
    assert linear["tower_share"] == 0.4 and linear["limit_share"] == linear["compute_share"] == pytest.approx(0.5)
    assert linear["peaks"]["stream_read_gbs"] == 10.0 and rows["tilerank", "norms"]["flops"] is None
    assert rows["tilerank", "between kernels"]["seconds"] == 2.75
    assert rows["tilerank", "first token"]["seconds"] == 30.0
    peer = rows["transformers", "tower"]
    assert (peer["ours_ratio"], peer["tokens"], peer["peaks"]["stream_read_gbs"]) == (3.0, 2, 20.0)
    printed = table(list(rows.values()))
    assert len(printed) == 1 + len(PARTS) + len(TOWER_PARTS)
    assert printed[0].endswith("transformers ms  speedup")
    assert printed[-2].endswith("90000.0    3.00x") and printed[-1].endswith("6000.0    2.00x")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("media", str(DEMO)), "demo-lm takes text only; expected a model that takes pictures"),
        (("media", str(DEMO_VL), "--json", "/nowhere/x"), "expected a file in a writable directory"),
        (("media", str(DEMO_VL), "--audio", "3"), "demo-vl takes image and video, not audio"),
        (("media", str(DEMO_VL), "--size", "300x1"), r"a medium of size \(1, 1, 300\): image 1: "),
        (("model", str(DEMO), "--image", "64x64"), "demo-lm takes text only; expected a model that takes pictures"),
        (("model", str(DEMO_VL), "--image", "64x64", "--prompt-tokens", "4090"), "the model's context has"),
    ],
)
def test_refusals_come_before_any_work(words: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(LaunchError, match=sentence):
        command.run(parse(*words))


def test_bench_media_from_end_to_end(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    options = ("--tp", 2, "--size", "128x96,64x64", "--repeat", 1)
    result = run("bench", "media", DEMO_VL, *options, "--json", file, env=known_peaks(core.isa()))
    assert (result.status, result.errors) == (0, []), result.err
    rows = json.loads(file.read_text())
    found = {(row["size"], row["part"]): row for row in rows}
    assert {size for size, _ in found} == {"128x96", "64x64"} and all(row["system"] == "tilerank" for row in rows)
    for size, tokens in (("128x96", 48), ("64x64", 16)):
        parts = {part: row for (of, part), row in found.items() if of == size}
        assert all(row["tokens"] == tokens and row["tp"] == 2 and row["seconds"] >= 0 for row in parts.values())
        assert 0 < parts["decode"]["seconds"] < parts["first token"]["seconds"]
        assert parts["next token"]["seconds"] > 0
        if parts["tower"]["peaks"]["isa"] == "reference":
            assert set(parts) == {"decode", "tower", "first token", "next token"}
            continue
        assert set(parts) == {*PARTS, *TOWER_PARTS}
        whole = sum(parts[part]["seconds"] for part in TOWER_PARTS)
        assert math.isclose(whole, parts["tower"]["seconds"])
        work = parts["linear layers"]["flops"] + parts["attention"]["flops"]
        assert parts["tower"]["flops"] == work and parts["norms"]["flops"] is None
    assert "demo-vl: bfloat16 on 2 ranks" in result.out and result.out.count("128x96") == len(rows) // 2


def test_bench_media_with_sound(hears: Path, tmp_path: Path) -> None:
    """A clip of 2 s has 26 tokens, and pictures are measured as well if a size is given."""
    file = tmp_path / "rows.json"
    options = ("--tp", 1, "--audio", 2, "--size", "64x64", "--repeat", 1)
    result = run("bench", "media", hears, *options, "--json", file, env=known_peaks(core.isa()))
    assert (result.status, result.errors) == (0, []), result.err
    rows = {(row["size"], row["part"]): row for row in json.loads(file.read_text())}
    assert {(size, row["tokens"]) for (size, _), row in rows.items()} == {("2 s", 26), ("64x64", 4)}
    assert 0 < rows["2 s", "decode"]["seconds"] < rows["2 s", "first token"]["seconds"]
    if rows["2 s", "tower"]["peaks"]["isa"] != "reference":
        assert rows["2 s", "preprocessing"]["seconds"] > 0


def test_bench_model_with_pictures(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    options = ("--tp", 1, "--prompt-tokens", "8", "--batch", "1,2", "--new-tokens", 3, "--repeat", 1)
    result = run("bench", "model", DEMO_VL, *options, "--image", "128x96", "--json", file, env=known_peaks(core.isa()))
    assert (result.status, result.errors) == (0, []), result.err
    rows = json.loads(file.read_text())
    before = MediaPrompts(DEMO_VL).tokens_before((128, 96))
    assert [(row["phase"], row["batch"]) for row in rows] == [
        (phase, batch) for batch in (1, 2) for phase in ("prefill", "decode")
    ]
    assert {(row["prompt_tokens"], row["image"], row["image_tokens"]) for row in rows} == {
        (8 + before, "128x96", before)
    }
    one, two = (row["flops"] for row in rows if row["phase"] == "prefill")
    tower = sum(work.bf16 for work in encoder_work(read_card(DEMO_VL), torch.bfloat16, (1, 12, 16)).values())
    assert two == 2 * one and one > tower
