"""bench quality: likelihoods and divergences by hand, the perplexity of the demo model, and what is refused before any
work."""

import argparse
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from command import DEMO, run

from tilerank.launch.bench import command, quality
from tilerank.launch.bench.scoring.likelihood import Likelihood
from tilerank.launch.bench.scoring.text import DEFAULT_TEXT, read_text
from tilerank.launch.errors import LaunchError
from tilerank.loader.card import read_card
from tilerank.loader.tokenizer import Tokenizer


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(words)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("model", str(DEMO), "--chart", "/nowhere/x.svg"), "--chart: expected a .svg file"),
        (("quality", str(DEMO), "--dtype", "float32"), "takes lists: --formats and --ranks"),
        (("quality", str(DEMO), "--tp", "2"), "takes lists: --formats and --ranks"),
        (("quality", str(DEMO), "--kv-cache-dtype", "int8"), "takes lists: --formats bfloat16\\+int8-kv"),
        (("quality", str(DEMO), "--tokens", "/nowhere"), "/nowhere cannot be read"),
        (("quality", str(DEMO), "--text", "/nowhere"), "/nowhere cannot be read"),
        (("quality", str(DEMO), "--text", str(DEMO / "model.safetensors")), "expected a text in UTF-8"),
    ],
)
def test_refusals_come_before_any_work(words: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(LaunchError, match=sentence):
        command.run(parse(*words))


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("{}", "missing required field `sequences`"),
        ("[", "tokens.json: "),
        ('{"sequences": []}', "expected at least one"),
        ('{"sequences": [[1, 2], [3]]}', "sequence 1: expected 2 to 4096 tokens, found 1"),
        ('{"sequences": [[1, 4096]]}', "sequence 0: expected token ids from 0 to 4095, found 4096"),
    ],
)
def test_invalid_token_files_are_refused(content: str, sentence: str, tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    file.write_text(content)
    with pytest.raises(LaunchError, match=sentence):
        command.run(parse("quality", str(DEMO), "--tokens", str(file)))


def test_a_baseline_of_another_vocabulary_is_refused() -> None:
    with pytest.raises(LaunchError, match="--baseline: expected a vocabulary of 4096, found"):
        command.run(parse("quality", str(DEMO), "--baseline", str(DEMO.parent / "demo-vl")))


def test_windows_are_consecutive_tokens_of_the_text() -> None:
    """The demo model's tokenizer puts nothing before a text, so that the first token of each window is one of it."""
    ids = Tokenizer(DEMO).encode(DEFAULT_TEXT.read_text())
    text = read_text(DEFAULT_TEXT, read_card(DEMO), DEMO, 1000, None)
    assert [id for window in text.windows for id in window] == ids
    assert {len(window) for window in text.windows[:-1]} == {1000}
    assert text.counted == len(ids) - len(text.windows)
    few = read_text(DEFAULT_TEXT, read_card(DEMO), DEMO, 1 << 20, 2)
    assert few.windows == [ids[:4096], ids[4096:8192]], "windows are at most as long as the context"


def test_a_token_that_begins_every_text_begins_every_window(tmp_path: Path) -> None:
    shutil.copy(DEMO / "config.json", tmp_path)
    tokenizer = json.loads((DEMO / "tokenizer.json").read_text())
    content = "<|im_end|>"
    begin = {"SpecialToken": {"id": content, "type_id": 0}}
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [begin, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {content: {"id": content, "ids": [4095], "tokens": [content]}},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    ids = Tokenizer(DEMO).encode(DEFAULT_TEXT.read_text())
    text = read_text(DEFAULT_TEXT, read_card(tmp_path), tmp_path, 1000, None)
    assert text.windows[:2] == [[4095, *ids[:999]], [4095, *ids[999:1998]]]
    assert text.counted == len(ids), "what stands before a text is given, and its own tokens all count"


def test_sums_by_hand(tmp_path: Path) -> None:
    """p = 3/4, 1/4 and then 1/2, 1/2 of the baseline; q = 1/4, 3/4 and then 1/2, 1/2. No token follows the last row."""
    logits = torch.tensor([[math.log(3.0), 0.0], [0.0, 0.0], [9.0, 0.0]])
    baseline, other = Likelihood(tmp_path / "file", writes=True), Likelihood(tmp_path / "file")
    with baseline:
        baseline.add_logits(logits, [1, 0, 1])
    with other:
        other.add_logits(torch.tensor([[0.0, math.log(3.0)], [0.0, 0.0], [9.0, 0.0]]), [1, 0, 1])
    assert (tmp_path / "file").stat().st_size == 2 * 2 * 4
    found, found_other = baseline.sums(), other.sums()
    assert found["loss"] == pytest.approx(-math.log(3 / 8), rel=1e-6)
    assert found_other["loss"] == pytest.approx(-math.log(1 / 8), rel=1e-6)
    assert found_other["kl"] == pytest.approx(0.5 * math.log(3.0), rel=1e-6)  # 3/4 log 3 - 1/4 log 3
    assert (found_other["tokens"], found_other["same_top_1"]) == (2, 1)
    sums = found_other | {"isa": "amx", "bits_per_weight": 8.0, "load_s": 1.0}
    row = quality.row_of("int8", 2, sums, 2.0)
    assert row["perplexity"] == pytest.approx(8**0.5) and row["perplexity_increase"] == pytest.approx(2**0.5 - 1)
    assert row["mean_kl"] == pytest.approx(0.25 * math.log(3.0)) and row["same_top_1"] == 0.5
    assert quality.row_of("int8", 2, sums, None)["mean_kl"] is None


def rows_of(tmp_path: Path, *options: object) -> list[dict[str, Any]]:
    """Return the rows of `bench quality` on the texts of the demo model."""
    file = tmp_path / "rows.json"
    result = run("bench", "quality", DEMO, "--tokens", DEMO / "eval_tokens.json", *options, "--json", file)
    assert (result.status, result.errors) == (0, []), result.err
    found: list[dict[str, Any]] = json.loads(file.read_text())
    return found


def test_bench_quality_finds_the_perplexity_of_transformers(tmp_path: Path) -> None:
    (row,) = rows_of(tmp_path, "--formats", "float32", "--ranks", 1)
    known = json.loads((DEMO / "eval_tokens.json").read_text())
    assert row["perplexity"] == pytest.approx(known["fp32_perplexity"], rel=1e-4) and row["mean_kl"] is None
    assert row["tokens"] == sum(len(ids) - 1 for ids in known["sequences"])


def test_bench_quality_compares_formats_and_caches_with_fp32(tmp_path: Path) -> None:
    single, int8 = rows_of(tmp_path, "--formats", "int8+int8-kv", "--ranks", 1, "--limit", 4)
    assert [row["format"] for row in (single, int8)] == ["float32", "int8+int8-kv"]
    assert single["mean_kl"] is None and single["tokens"] == int8["tokens"] == 4 * 255
    assert int8["perplexity_increase"] == int8["perplexity"] / single["perplexity"] - 1
    assert 0 < int8["mean_kl"] < 0.1 and 0.9 < int8["same_top_1"] < 1
    # Projections and the tied table of 8 bits, a scale of each row, and padding.
    assert 8 < int8["bits_per_weight"] < 9.5
