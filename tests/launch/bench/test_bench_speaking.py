"""`tilerank bench speaking` on a small model: rows, and what it refuses."""

import json
from pathlib import Path

import pytest
from command import DEMO, run
from tiny import make_checkpoint


def test_rows_have_what_each_number_of_requests_made(tmp_path: Path) -> None:
    model = make_checkpoint("qwen3_omni_moe", tmp_path, seed=3)
    result = run("bench", "speaking", model, "--tp", 1, "--requests", "1,2", "--frames", 25, "--json")
    assert result.status == 0, result.err
    rows = json.loads(result.out)
    assert [row["requests"] for row in rows] == [1, 2]
    for row in rows:
        assert row.keys() == {"requests", "real_time", "first_sound_s", "frame_s", "sound_s", "text_s"}
        # Frames are a part of the time in which they were made.
        assert row["frame_s"] * row["real_time"] / row["requests"] <= 0.08


@pytest.mark.parametrize("options", [(), ("--no-talker",)])
def test_a_model_that_does_not_speak_is_refused(options: tuple[str, ...]) -> None:
    result = run("bench", "speaking", DEMO, "--tp", 1, *options)
    assert result.status == 1 and "expected a model that speaks, found one without a talker" in result.err
