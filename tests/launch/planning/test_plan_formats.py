"""Plans of mixtures and of quantised models, against arithmetic by hand."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
from fake_sysfs import SNC3, Machine, sockets
from planning import DEMO, NORMS, PARAMETERS, ROPE, by_name, config_of, plan_on

from tilerank.launch.commands import plan as command
from tilerank.launch.errors import LaunchError
from tilerank.launch.planning.plan_text import render
from tilerank.loader.errors import ConfigError
from tilerank.loader.quantization_config import Quantization


def test_experts_are_cut_by_their_width(tmp_path: Path) -> None:
    """Qwen3-30B-A3B: 24 units of 32 columns. Router and norms are whole on every rank, the experts cut."""
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True}
    config = config_of(tmp_path, model_type="qwen3_moe", **experts)
    cuts = by_name(plan_on(Machine(SNC3), tmp_path, config, 5))
    assert list(cuts) == ["query heads", "KV heads", "expert width", "vocabulary"]
    assert [span.size for span in cuts["expert width"].spans] == [160, 160, 160, 160, 128]
    assert cuts["expert width"].waste == pytest.approx(5 * 160 / 768 - 1)
    plan = plan_on(sockets(1, 8), tmp_path, config, 1)
    attention = 2048 * 128 * (2 * 32 + 2 * 4) + 2 * 2048 + 2 * 128
    assert plan.parameters == 48 * (attention + 128 * (2048 + 3 * 2048 * 768)) + 2 * 151936 * 2048 + 2048
    assert plan.memory.weights == 2 * (plan.parameters + ROPE)
    assert "expert width" in render(plan)
    cuts = by_name(plan_on(Machine(SNC3), tmp_path, config, 25, cores="none"))
    assert [span.size for span in cuts["expert width"].spans] == [32] * 24 + [0]


def test_a_mixture_with_dense_layers_shows_both_widths(tmp_path: Path) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "mlp_only_layers": [0, 47]}
    cuts = by_name(plan_on(sockets(1, 8), tmp_path, config_of(tmp_path, model_type="qwen3_moe", **experts), 3))
    assert [span.size for span in cuts["MLP width"].spans] == [2048] * 3
    assert [span.size for span in cuts["expert width"].spans] == [32] * 3


def test_int8_is_a_byte_a_weight_and_a_scale_a_row(tmp_path: Path) -> None:
    """Projections and head; the embedding table and norms stay bf16."""
    plan = plan_on(sockets(1, 8), tmp_path, config_of(tmp_path), 1, quantization=Quantization("int8"))
    rows = 48 * ((32 + 2 * 4) * 128 + 2048 + 2 * 6144 + 2048) + 151936
    table = 151936 * 2048
    assert plan.parameters == PARAMETERS
    assert plan.memory.weights == (PARAMETERS - NORMS - table) + 4 * rows + 2 * (NORMS + table + ROPE)
    assert (plan.dtype, plan.quantization) == ("bfloat16", "int8")
    assert plan.bits_per_weight == 8 * plan.memory.weights / PARAMETERS
    assert "3.34 billion parameters, int8 with 8-bit activations, 8.78 bits a weight, 1 rank" in render(plan)


def test_an_int8_cache_is_a_byte_a_value_and_a_scale_a_token(tmp_path: Path) -> None:
    """4 heads of 128: a rank of two has 2; scales are float32, one for keys and one for values."""
    plans = [
        plan_on(sockets(1, 8), tmp_path, config_of(tmp_path), 2, kv_cache_dtype=name, cached_tokens=1000)
        for name in ("auto", "int8")
    ]
    assert [plan.ranks[0].cache_per_token for plan in plans] == [48 * 2 * 2 * 128 * 2, 48 * 2 * 2 * (128 + 4)]
    assert plans[0].need - plans[1].need == 1000 * 2 * 48 * 2 * 2 * (256 - 132)
    assert "int8 KV cache" in render(plans[1]) and "KV cache, " not in render(plans[0])
    with pytest.raises(LaunchError, match="--kv-cache-dtype bf16 needs --dtype bfloat16, found float32"):
        plan_on(sockets(1, 8), tmp_path, config_of(tmp_path), 1, kv_cache_dtype="bf16", dtype="float32")


def test_a_quantised_checkpoint_is_planned_as_it_is(tmp_path: Path) -> None:
    """Groups of 128 columns: an MLP of 6144 is 48 units; heads of 128 are whole groups."""
    awq = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
    plan = plan_on(Machine(SNC3), tmp_path, config_of(tmp_path, quantization_config=awq), 6)
    assert (plan.dtype, plan.quantization) == ("bfloat16", "int4")
    cuts = by_name(plan)
    assert (cuts["MLP width"].unit, cuts["MLP width"].units) == (128, 48)
    cuts = by_name(plan_on(Machine(SNC3), tmp_path, config_of(tmp_path, quantization_config=awq), 49, cores="none"))
    assert [span.size for span in cuts["MLP width"].spans] == [128] * 48 + [0]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"dtype": "float32", "quantization": Quantization("int8")},
            "dtype: expected bfloat16 with quantised weights, ",
        ),
        ({"stored": True, "dtype": "float32"}, "dtype: expected bfloat16 with quantised weights, found float32"),
        (
            {"stored": True, "quantization": Quantization("int8")},
            r"quantization: expected none, or int4 \(awq\) as the checkpoint is quantised already, found int8",
        ),
        (
            {"stored": True, "quantization": Quantization("int4", 32)},
            r"quantization: expected none, or int4 \(awq\) .*, found int4 in groups of 32",
        ),
    ],
)
def test_contradictions_are_refused(tmp_path: Path, options: dict[str, Any], sentence: str) -> None:
    awq = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
    config = config_of(tmp_path, **({"quantization_config": awq} if options.pop("stored", False) else {}))
    with pytest.raises(ConfigError, match=f"^{sentence}"):
        plan_on(sockets(1, 8), tmp_path, config, 1, **options)


def test_the_same_quantisation_may_be_asked_for(tmp_path: Path) -> None:
    awq = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
    config = config_of(tmp_path, quantization_config=awq)
    asked = (None, Quantization("int4"), Quantization("int4", 128))
    plans = [plan_on(sockets(1, 8), tmp_path / f"{i}", config, 1, quantization=one) for i, one in enumerate(asked)]
    assert len({plan.memory.weights for plan in plans}) == 1


def test_int4_weights_may_keep_activations_of_16_bits(tmp_path: Path) -> None:
    awq = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
    stored = config_of(tmp_path, quantization_config=awq)
    plans = [plan_on(sockets(1, 8), tmp_path / f"{bits}", stored, 1, activation_bits=bits) for bits in (8, 16)]
    assert plans[0].memory == plans[1].memory
    assert [plan.activation_bits for plan in plans] == [8, 16]
    assert "int4 with 16-bit activations, " in render(plans[1])
    with pytest.raises(ConfigError, match=r"^activation_bits: expected 8 with int8 weights, found 16$"):
        asked = Quantization("int8")
        plan_on(sockets(1, 8), tmp_path, config_of(tmp_path), 1, quantization=asked, activation_bits=16)


def test_options_of_quantisation(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    words = [str(DEMO), "--tp", "2", "--json", "--quantization"]
    weights = {}
    for asked in (["int8"], ["int4", "--quantization-group", "32"], ["int4", "--quantization-group", "128"]):
        assert command.run(parser.parse_args([*words, *asked])) == 0
        weights[asked[-1]] = json.loads(capsys.readouterr().out)["weights"]
    assert weights["int8"] > weights["32"] > weights["128"]
    assert (
        command.run(parser.parse_args([*words, "int4", "--quantization-group", "32", "--quantization-zero-points"]))
        == 0
    )
    bits = json.loads(capsys.readouterr().out)["weights"]
    assert bits > weights["32"], "a byte more for each group"
    for option in (["--quantization-group", "32"], ["--no-quantization-zero-points"]):
        name = option[0].replace("--no-", "--")
        with pytest.raises(LaunchError, match=rf"^{name} needs --quantization int4$"):
            command.run(parser.parse_args([*words, "int8", *option]))
