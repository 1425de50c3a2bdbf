"""`tilerank bench speaking`: rows of a small model, the work of the predictor by hand, and what it refuses."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from command import DEMO, run
from safetensors.torch import load_file, save_file
from tiny import make_checkpoint

from tilerank.launch.bench.public import public_config
from tilerank.launch.bench.speaking import table
from tilerank.launch.planning.work import predictor_cost
from tilerank.loader.quantization_config import Quantization
from tilerank.parallel.cost import Work
from tilerank.runtime.rank.registry import read_supported_card


def endless(tmp_path: Path) -> Path:
    """Return a model whose speech does not end: the logit of the end is 0, which is not among the 50 largest."""
    model = Path(shutil.copytree(make_checkpoint("qwen3_omni_moe", tmp_path, seed=3), tmp_path / "endless"))
    end = json.loads((model / "config.json").read_text())["talker_config"]["codec_eos_token_id"]
    name = "talker.codec_head.weight"
    file = model / json.loads((model / "model.safetensors.index.json").read_text())["weight_map"][name]
    tensors = load_file(file)
    tensors[name][end] = 0
    save_file(tensors, file, {"format": "pt"})
    return model


def test_rows_have_what_each_number_of_requests_made(tmp_path: Path) -> None:
    result = run("bench", "speaking", endless(tmp_path), "--tp", 1, "--requests", "1,2", "--frames", 25, "--json")
    assert result.status == 0, result.err
    rows = json.loads(result.out)
    assert [row["requests"] for row in rows] == [1, 2]
    for row in rows:
        shares = {"predictor_stream_share", "predictor_limit_share"}
        seconds = {f"{name}_s" for name in ("first_sound", "frame", "predictor", "talker", "sound", "text")}
        assert row.keys() == {"requests", "real_time", "peaks"} | seconds | shares
        assert 0 < row["predictor_s"] < row["frame_s"] == pytest.approx(row["predictor_s"] + row["talker_s"])
        # Frames are a part of the time in which they were made.
        assert row["frame_s"] * row["real_time"] / row["requests"] <= 0.08


def test_table_divides_a_frame() -> None:
    row = {"requests": 4, "real_time": 2.0, "first_sound_s": 1.25, "frame_s": 0.06, "predictor_s": 0.045}
    row |= {"predictor_stream_share": 0.8, "predictor_limit_share": 0.9, "talker_s": 0.015, "sound_s": 0.014}
    header, line = table([row | {"text_s": 0.009}])
    assert header.endswith("predictor ms  of read  of limit  talker ms  sound ms  text ms")
    assert line.split() == ["4", "2.00", "0.50", "1.25", "60.0", "45.0", "0.80", "0.90", "15.0", "14.0", "9.0"]
    assert len(header) == len(line)


@pytest.mark.parametrize("quantized", [False, True])
def test_work_of_the_predictor_by_hand(tmp_path: Path, quantized: bool) -> None:
    """Five layers of 1024 and 3072 with 16 heads and 8 KV heads of 128, read 15 times a frame, and 15 heads of 2048."""
    (tmp_path / "config.json").write_text(json.dumps(public_config("qwen3-omni-30b-a3b-instruct")))
    card = read_supported_card(tmp_path)
    cost = predictor_cost(card, torch.bfloat16, Quantization("int8") if quantized else None)
    layers = 5 * 1024 * ((16 + 8 + 8 + 16) * 128 + 3 * 3072)
    heads = 15 * 2048 * 1024
    norms = 15 * 2 * (5 * (2 * 1024 + 2 * 128) + 1024)
    scales = 15 * 4 * (5 * ((16 + 8 + 8) * 128 + 2 * 3072 + 2 * 1024) + 2048)
    operations = 2 * (16 * layers + heads)  # the first pass has two rows
    if quantized:
        assert cost.token == Work(int8=operations)
        assert cost.read == 15 * layers + heads + norms + scales
    else:
        assert cost.token == Work(bf16=operations)
        assert cost.read == 2 * (15 * layers + heads) + norms


@pytest.mark.parametrize("options", [(), ("--no-talker",)])
def test_a_model_that_does_not_speak_is_refused(options: tuple[str, ...]) -> None:
    result = run("bench", "speaking", DEMO, "--tp", 1, *options)
    assert result.status == 1 and "expected a model that speaks, found one without a talker" in result.err
