"""Quantised checkpoints of every layout against references with the dequantised weights, over uneven cuts."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import conformance
import pytest
import torch
from made_once import made_once
from quantized.cases import kept, make
from ranks import run_ranks
from references import run_reference
from safetensors.torch import load_file, save_file

from tilerank.loader.card import read_card
from tilerank.loader.weight_formats import weight_formats
from tilerank.parallel.join import Team
from tilerank.parallel.latent import AbsorbedHeads
from tilerank.parallel.shard import Strategy
from tilerank.parallel.sharding import Sharding
from tilerank.runtime.rank.registry import build_model

NEW_TOKENS = 6
TP = [1, 3, 6]
IDS = random.Random(1).choices(range(500), k=42)

BLOCKS = ["awq-32", "awq-128", "awq-keeps-attention", "gptq-32", "gptq-all-columns", "moe-awq", "fp8", "moe-fp8"]
BLOCKS += ["moe-block-int8", "delta-net-fp8", "delta-net-awq", "deepseek-fp8", "deepseek-block-int8"]
BLOCKS += ["gptq-8", "packed-32", "packed-128-zeros", "moe-packed", "fp8-tensor", "fp8-channel", "moe-fp8-channel"]
BLOCKS += ["delta-net-packed", "deepseek-awq", "moe-mxfp4", "nvfp4", "moe-nvfp4"]
INT8 = ["w8a8", "compressed", "moe-w8a8", "deepseek-w8a8", "deepseek-compressed"]
INT4 = ["awq-32", "awq-128", "awq-keeps-attention", "gptq-32", "gptq-all-columns", "moe-awq", "delta-net-awq"]
INT4 += ["packed-32", "packed-128-zeros", "moe-packed", "delta-net-packed", "deepseek-awq", "vl-awq", "vl-gptq"]
ROUNDED: dict[str, dict[str, Any]] = {case: {"but": kept(case), "group": 0} for case in INT8}
ROUNDED["moe-mxfp4"] = {"but": ["self_attn"], "group": 32}
"""By case: how its inputs are rounded to 8 bits (reference_text.Int8Inputs)."""
ACT_ORDER = ["gptq-act-order", "gptq-act-order-symmetric"]
VISION = ["vl-fp8", "vl-awq", "vl-gptq"]
CASES = [*BLOCKS, *INT8, *ACT_ORDER, *VISION]
DEEPSEEK = [case for case in CASES if case.startswith("deepseek")]
SIX = [*DEEPSEEK, "awq-32", "gptq-32", "fp8", "gptq-8", "packed-32", "fp8-channel"]
"""The cases that run on six ranks too."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of checkpoints; for each case, `case` and `case-plain` of the dequantised weights, with what
    tools/reference.py makes of the latter. For ROUNDED, its logits in bf16 have inputs of 8 bits."""
    return made_once(tmp_path_factory, "quantized", make_all)


def make_all(out: Path) -> None:
    models = {}
    for case in CASES:
        make(case, out)
        models[f"{case}-plain"] = {"by": "reference_text", "seed": 0, "prompts": [IDS, IDS[:5]]}
        if case in ROUNDED:
            models[f"{case}-plain"]["int8_inputs"] = ROUNDED[case]
        if case in VISION:
            models[f"{case}-plain"] = {"by": "reference_vl", "seed": 5}
    run_reference(out, models, NEW_TOKENS)
    for case in CASES:
        wanted = load_file(out / f"{case}-plain.safetensors")
        if case in ROUNDED:
            wanted |= {f"{p}.bfloat16": wanted.pop(f"{p}.int8") for p in range(2)}
        save_file(wanted, out / f"{case}.safetensors")
    # A public AWQ file has its settings beside those of the language model.
    change_config(out / "vl-awq", lambda raw: raw["text_config"].update(quantization_config=raw.pop(SETTINGS)))
    # Published files of int8 come without settings, or with those of the fp8 model that they were made from.
    stale = json.loads((out / "deepseek-fp8" / "config.json").read_text())[SETTINGS]
    for name in ("none", "stale"):
        shutil.copytree(out / "deepseek-w8a8", out / name)
        shutil.copy(out / "deepseek-w8a8.safetensors", out / f"{name}.safetensors")
    change_config(out / "none", lambda raw: raw.pop(SETTINGS))
    change_config(out / "stale", lambda raw: raw.update({SETTINGS: stale}))


SETTINGS = "quantization_config"


def change_config(model_dir: Path, change: Callable[[dict[str, Any]], object]) -> None:
    raw = json.loads((model_dir / "config.json").read_text())
    change(raw)
    (model_dir / "config.json").write_text(json.dumps(raw))


def run_cuts(team: Team, *, cuts: dict[Strategy, list[str]], **job: Any) -> list[dict[str, Any]]:
    """Run every model in one cut (conformance.py)."""
    return [case for cut, models in cuts.items() for case in conformance.run(team, models=models, cuts=[cut], **job)]


@pytest.fixture(scope="module", params=TP)
def found(request: pytest.FixtureRequest, base: Path) -> dict[str, dict[str, Any]]:
    """What rank 0 of so many ranks found, by model, in bf16."""
    cuts: dict[str, list[str]] = {"pad": [], "split": [], "auto": ["none", "stale"]}
    for i, case in enumerate(SIX if request.param == 6 else CASES):
        cuts["auto" if case in (*DEEPSEEK, *VISION) else ("pad", "split", "auto")[i % 3]] += [case, f"{case}-plain"]
    job = {"out": str(base), "cuts": cuts, "new_tokens": NEW_TOKENS, "dtypes": ["bfloat16"], "decode": True}
    results = run_ranks(request.param, "tests.runtime.test_quantized:run_cuts", kwargs=job, timeout=300)[0]
    return {case["model"]: case for case in results}


def test_logits(found: dict[str, dict[str, Any]]) -> None:
    """The error is that of bf16 activations alone, which the dequantised weights in bf16 have as well. Int4 also
    rounds activations to 8 bits, which makes the error a few times larger. So do the cases of ROUNDED, whose error is
    that of transformers in bf16 with inputs of 8 bits. The bf16 of transformers has a mean error of up to 0.03 in delta
    nets of this depth. Mixtures are judged by their median, as in test_conformance.py:
    where two experts are almost equally probable, bf16 chooses either, with weights of any format (in moe-block-int8
    the mean was 0.46 to 1.8 times that of the plain weights, the median 0.84 to 0.92 times).
    """
    for case in set(CASES) & found.keys():
        average = "median" if case.startswith("moe-") else "mean"
        coded, plain = found[case]["logits"], found[f"{case}-plain"]["logits"]
        if case in (*DEEPSEEK, *VISION):
            assert plain["mean"] <= 1.1 * plain["hf_mean"], case
        else:
            assert plain[average] < (0.035 if case.startswith("delta-net") else 0.02), case
        if case in ROUNDED:
            assert coded[average] <= 1.1 * coded[f"hf_{average}"], case
        else:
            assert coded[average] <= (3.5 if case in INT4 else 1.25) * plain[average], case


def test_greedy_tokens(found: dict[str, dict[str, Any]]) -> None:
    """Each token decoded from a recording is the reference's most likely token, or almost as likely. A choice between
    two tokens is off by the errors of both logits: where inputs are rounded to 8 bits, those of transformers with such
    inputs, of which the median row has up to 0.05.
    """
    for name, case in found.items():
        rounds_inputs = name in (*ROUNDED, "none", "stale")
        assert case["lost"] < (2 * case["logits"]["hf_median"] if rounds_inputs else 0.04), name


def test_what_has_the_bits_of_something_else(found: dict[str, dict[str, Any]]) -> None:
    """Columns in another order are held as floats: the logits are those of the dequantised weights. The tower of a
    vision model is not quantised. The settings of a file of int8 decide nothing."""
    for case in set(ACT_ORDER) & found.keys():
        assert found[case]["bits"] == found[f"{case}-plain"]["bits"]
    for case in set(VISION) & found.keys():
        assert found[case]["encodings"] == found[f"{case}-plain"]["encodings"]
    assert found["none"]["bits"] == found["stale"]["bits"] == found["deepseek-w8a8"]["bits"]


def test_absorbed_weights_stay_in_the_codes_of_the_checkpoint(base: Path) -> None:
    """Two of the 8 heads map queries of 32 to latents of 128, and latents to values of 32: 2 * 32 * 128 weights of keys
    and as many of values, and a few scales. Keys that have 4 bits are held in bf16."""
    for case in DEEPSEEK:
        codes = 8192 * 2 + 4096 if case == "deepseek-awq" else 8192 + 8192
        card = read_card(base / case)
        formats = weight_formats(card.quantization, torch.bfloat16, None)
        model = build_model(card, Sharding(1, 4, torch.bfloat16, None, formats=formats))
        (absorbed,) = {layer.nbytes() for layer in model.walk() if isinstance(layer, AbsorbedHeads)}
        assert codes < absorbed < 1.1 * codes, case
