"""bench speech: the work of code2wav by hand, the table, and a run on a small model."""

import json
from pathlib import Path

import pytest
import tiny
import torch
from command import DEMO, known_peaks, run

from tilerank.kernels import core
from tilerank.launch.bench.public import public_config
from tilerank.launch.bench.speech import table
from tilerank.parallel.cost import Work
from tilerank.parallel.sharding import Sharding
from tilerank.runtime.rank.registry import build_model, read_supported_card


def test_work_of_a_frame_by_hand(tmp_path: Path) -> None:
    """Eight layers of 1024 and 3072 with a window of 72; rows double twice; from 1536 channels at 4 rows of a frame to
    96 at 1920."""
    (tmp_path / "config.json").write_text(json.dumps(public_config("qwen3-omni-30b-a3b-instruct")))
    model = build_model(read_supported_card(tmp_path), Sharding(2, 3, torch.bfloat16, None))
    assert model.speaker is not None
    cost = model.speaker.vocoder.cost()
    weights = 8 * (4 * 1024**2 + 3 * 1024 * 3072)
    operations = weights + 8 * 72 * 2 * 1024
    upsample = 2 * 1024**2, 2 * 1024 * 4096
    weights += 2 * sum(upsample)
    operations += (1 + 2) * upsample[0] + (2 + 4) * upsample[1]
    rows, channels = 4, 1536
    weights += 7 * 1024 * channels
    operations += rows * 7 * 1024 * channels
    for rate in (8, 5, 4, 3):
        half = channels // 2
        weights += 2 * rate * channels * half + 3 * 8 * half**2
        operations += rows * 2 * rate * channels * half + 3 * 8 * rate * rows * half**2
        rows, channels = rows * rate, half
    assert cost.token == Work(bf16=2 * (operations + rows * 7 * channels))
    # The rest are vectors, and the outputs of the last convolution padded to 32.
    assert 2 * weights < cost.read < 2 * weights + 1e6
    assert (
        model.nbytes()
        > model.speaker.nbytes()
        > model.speaker.vocoder.nbytes()
        == cost.read + 2 * (16 * 2048 * 1024 + 325 * 64)
    )


def test_table_has_the_ratio_of_the_peer() -> None:
    own = {"system": "tilerank", "frames": 4, "seconds": 0.05, "sound_seconds": 0.32, "real_time_factor": 0.15625}
    own |= {"limit_share": 0.8, "compute_share": 0.75, "peaks": {"isa": "avx512_bf16"}}
    peer = {"system": "transformers", "frames": 4, "seconds": 0.2, "ours_ratio": 4.0}
    header, line = table([own, peer])
    assert header.split()[-2:] == ["ms", "ratio"]
    assert line.split() == ["4", "320", "50.0", "6.40", "0.80", "0.75", "200.0", "4.00"]
    assert "of AVX-512" in header
    assert "of AMX" in table([own | {"peaks": {"isa": "amx"}}])[0]


def test_a_small_model(tmp_path_factory: pytest.TempPathFactory) -> None:
    model = tiny.make_checkpoint("qwen3_omni_moe", tmp_path_factory.mktemp("omni"), seed=4, layers=5)
    done = run("bench", "speech", model, "--frames", "1,2", "--repeat", "1", "--json", env=known_peaks(core.isa()))
    assert (done.status, done.errors) == (0, []), done.err
    rows = json.loads(done.out)
    assert [(row["system"], row["frames"]) for row in rows] == [("tilerank", 1), ("tilerank", 2)]
    for row in rows:
        assert row["sound_seconds"] == pytest.approx(0.08 * row["frames"])
        assert row["real_time_factor"] == pytest.approx(row["seconds"] / row["sound_seconds"])
    refused = run("bench", "speech", DEMO)
    assert refused.status == 1 and "expected a model that speaks" in refused.err
