"""bench quality: likelihoods by hand, the perplexity of the demo model, and what is refused before any work."""

import argparse
import json
import math
from pathlib import Path

import pytest
import torch
from command import DEMO, run

from tilerank.launch.bench import command, quality
from tilerank.launch.errors import LaunchError


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(words)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("model", str(DEMO), "--chart", "/nowhere/x.svg"), "--chart: expected a .svg file"),
        (("quality", str(DEMO), "--dtype", "float32"), "takes lists: --dtypes and --ranks"),
        (("quality", str(DEMO), "--tp", "2"), "takes lists: --dtypes and --ranks"),
        (("quality", str(DEMO), "--kv-cache-dtype", "int8"), "takes lists: --dtypes bfloat16\\+int8-kv"),
        (("quality", str(DEMO), "--tokens", "/nowhere"), "/nowhere cannot be read"),
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


def test_likelihood_by_hand() -> None:
    logits = torch.tensor([[math.log(3.0), 0.0], [0.0, 0.0], [9.0, 0.0]])
    # p = 3/4 for token 0, then 1/2 for token 1; no token follows the last row.
    assert quality.negative_log_likelihood(logits, [1, 0, 1]) == pytest.approx(-math.log(3 / 8), rel=1e-6)
    row = quality.row_of("float32", 2, {"loss": 2 * math.log(5.0), "tokens": 2, "isa": "amx"}, 4.0, 10.0)
    assert row["perplexity"] == pytest.approx(5.0) and row["reference_ratio"] == pytest.approx(1.25)
    assert row["first_ratio"] == pytest.approx(0.5)


def test_bench_quality_finds_the_perplexity_of_transformers(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    result = run("bench", "quality", DEMO, "--ranks", 2, "--dtypes", "float32,bfloat16", "--json", file)
    assert (result.status, result.errors) == (0, []), result.err
    known = json.loads((DEMO / "eval_tokens.json").read_text())
    single, half = json.loads(file.read_text())
    assert single["perplexity"] == pytest.approx(known["fp32_perplexity"], rel=1e-4)
    assert half["perplexity"] == pytest.approx(known["bf16_perplexity"], rel=2e-3)
    assert single["reference_ratio"] == pytest.approx(1, rel=1e-4) and half["first_ratio"] != 1.0
    assert single["tokens"] == sum(len(ids) - 1 for ids in known["sequences"])


def test_bench_quality_of_an_int8_cache_is_close_to_that_of_bf16(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    options = ("--ranks", 1, "--limit", 4, "--dtypes", "bfloat16,bfloat16+int8-kv", "--json", file)
    result = run("bench", "quality", DEMO, *options)
    assert (result.status, result.errors) == (0, []), result.err
    bf16, int8 = json.loads(file.read_text())
    assert (bf16["dtype"], int8["dtype"]) == ("bfloat16", "bfloat16+int8-kv")
    assert 0 < abs(int8["perplexity"] / bf16["perplexity"] - 1) < 2e-3
