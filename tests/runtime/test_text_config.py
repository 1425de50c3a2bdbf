"""The families' fields of config.json: equal to what transformers reads, in both dialects; every defect is refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from model_configs import ABSENT, LLAMA, MIXTURE, write_config
from mutate import json_mutations
from tiny import make_checkpoint

from tilerank.loader.card import read_card, read_config_fields
from tilerank.loader.errors import ConfigError
from tilerank.loader.rope import Llama3Scaling, RopeConfig
from tilerank.parallel.sharding import Sharding
from tilerank.runtime.models.qwen_moe import ExpertsConfig, read_experts_config
from tilerank.runtime.models.text_config import TextConfig, read_text_config
from tilerank.runtime.rank.registry import build_model, read_supported_card

DEMO = Path(__file__).parents[2] / "assets" / "demo-lm"


def text_config(model_dir: Path) -> TextConfig:
    return read_text_config(read_config_fields(model_dir))


def experts_config(model_dir: Path) -> ExpertsConfig:
    return read_experts_config(read_config_fields(model_dir), text_config(model_dir).num_layers)


def refusal(model_dir: Path, changes: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        build_model(read_card(write_config(model_dir, changes)), Sharding(0, 1, torch.bfloat16, None))
    sentence = str(caught.value)
    assert sentence.startswith(f"{model_dir / 'config.json'}: ")
    assert "\n" not in sentence
    return sentence.removeprefix(f"{model_dir / 'config.json'}: ")


def test_llama_3_1_8b(tmp_path: Path) -> None:
    assert text_config(write_config(tmp_path, {})) == TextConfig(
        hidden_size=4096,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        rotary_dim=128,
        intermediate_size=14336,
        rms_norm_eps=1e-5,
        rope=RopeConfig(500000.0, Llama3Scaling(8.0, 1.0, 4.0, 8192)),
        tie_word_embeddings=False,
    )


@pytest.mark.parametrize("family", ["llama3", "qwen2", "qwen3", "demo"])
def test_both_dialects_equal_transformers(
    family: str, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    """The published file, and the same config re-saved by transformers 5, read alike and as transformers reads them."""
    from transformers import AutoConfig, GenerationConfig

    old = DEMO if family == "demo" else make_checkpoint(family, tmp_path_factory.mktemp("checkpoints"))
    reference = AutoConfig.from_pretrained(old)
    reference.save_pretrained(tmp_path)
    shutil.copy(old / "generation_config.json", tmp_path)
    assert "rope_parameters" in json.loads((tmp_path / "config.json").read_text())
    card, config = read_card(old), text_config(old)
    assert (read_card(tmp_path), text_config(tmp_path)) == (card, config)
    for ours, theirs in [
        ("hidden_size", "hidden_size"),
        ("num_layers", "num_hidden_layers"),
        ("num_heads", "num_attention_heads"),
        ("num_kv_heads", "num_key_value_heads"),
        ("intermediate_size", "intermediate_size"),
        ("rms_norm_eps", "rms_norm_eps"),
        ("tie_word_embeddings", "tie_word_embeddings"),
    ]:
        assert getattr(config, ours) == getattr(reference, theirs), ours
    assert (card.model_type, card.vocab_size) == (reference.model_type, reference.vocab_size)
    assert card.context_length == reference.max_position_embeddings
    default_head_dim = reference.hidden_size // reference.num_attention_heads
    assert config.head_dim == (getattr(reference, "head_dim", None) or default_head_dim)
    assert card.dtype == str(reference.dtype).removeprefix("torch.")
    assert config.rope.theta == reference.rope_parameters["rope_theta"]
    scaling = None
    if reference.rope_parameters["rope_type"] == "llama3":
        scaling = Llama3Scaling(**{k: reference.rope_parameters[k] for k in Llama3Scaling.__dataclass_fields__})
    assert config.rope.scaling == scaling
    eos = GenerationConfig.from_pretrained(old).eos_token_id
    assert card.eos_token_ids == tuple(eos if isinstance(eos, list) else [eos])


@pytest.mark.parametrize(
    ("changes", "rope"),
    [
        ({"rope_scaling": None}, RopeConfig(500000.0)),
        ({"rope_scaling": ABSENT}, RopeConfig(500000.0)),
        ({"rope_scaling": {"type": "default"}}, RopeConfig(500000.0)),
        ({"rope_scaling": None, "rope_parameters": {"rope_theta": 500000}}, RopeConfig(500000.0)),
        (
            {
                "rope_scaling": None,
                "rope_theta": ABSENT,
                "rope_parameters": {"rope_theta": 10000, "rope_type": "default"},
            },
            RopeConfig(1e4),
        ),
        ({"rope_scaling": {**LLAMA["rope_scaling"], "type": "llama3"}}, RopeConfig(5e5, Llama3Scaling(8, 1, 4, 8192))),
        ({"partial_rotary_factor": 1.0}, RopeConfig(5e5, Llama3Scaling(8, 1, 4, 8192))),
    ],
)
def test_spellings_of_the_rotary_embedding(tmp_path: Path, changes: dict[str, Any], rope: RopeConfig) -> None:
    assert text_config(write_config(tmp_path, changes)).rope == rope


@pytest.mark.parametrize(
    "key",
    [
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_hidden_layers",
        "num_key_value_heads",
        "rms_norm_eps",
        "rope_theta",
    ],
)
def test_a_needed_key_is_missing(tmp_path: Path, key: str) -> None:
    sentence = refusal(tmp_path, {key: ABSENT})
    assert sentence.startswith(f"{key}: expected ")
    assert sentence.endswith(", found no such key")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"num_key_value_heads": 5}, "num_key_value_heads: expected a divisor of num_attention_heads (32), found 5"),
        ({"num_key_value_heads": 64}, "num_key_value_heads: expected an integer from 1 to 32, found 64"),
        ({"num_key_value_heads": 0}, "num_key_value_heads: expected an integer from 1 to 32, found 0"),
        (
            {"num_attention_heads": 24, "num_key_value_heads": 8},
            "hidden_size: expected a multiple of num_attention_heads (24), since there is no head_dim, found 4096",
        ),
        ({"head_dim": 63}, "head_dim: expected an even head size (rotary embedding turns pairs), not 63, found 63"),
        ({"head_dim": 0}, "head_dim: expected an integer from 1 to 4096, found 0"),
        ({"hidden_size": True}, "hidden_size: expected an integer from 1 to 1048576, found True"),
        ({"hidden_size": 4096.0}, "hidden_size: expected an integer from 1 to 1048576, found 4096.0"),
        ({"hidden_size": "4096"}, "hidden_size: expected an integer from 1 to 1048576, found '4096'"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers: expected an integer from 1 to 4096, found 1000000000"),
        ({"rms_norm_eps": 0}, "rms_norm_eps: expected a number above 0, at most 1, found 0"),
        ({"rope_theta": 10**400}, f"rope_theta: expected a number above 1, at most 1e+15, found 1{'0' * 76}..."),
        ({"rope_theta": -1.0}, "rope_theta: expected a number above 1, at most 1e+15, found -1.0"),
        (
            {"text_config": LLAMA},
            "text_config: expected no such key (this family has no other parts than text), found {",
        ),
        ({"hidden_act": "gelu"}, "hidden_act: expected 'silu', found 'gelu'"),
        (
            {"use_sliding_window": True},
            "use_sliding_window: expected false (sliding-window attention is not supported), found True",
        ),
        ({"is_causal": False}, "is_causal: expected true (attention to later tokens is not supported), found False"),
        (
            {"layer_types": ["full_attention"] * 31 + ["sliding_attention"]},
            "layer_types: expected a list of 'full_attention' only",
        ),
        ({"layer_types": ["full_attention"]}, "layer_types: expected one entry for each of the 32 layers"),
        (
            {"rope_scaling": {"rope_type": "ntk", "factor": 4}},
            "rope_scaling.rope_type: expected one of default, linear, dynamic, llama3, yarn, longrope, proportional, "
            "found 'ntk'",
        ),
        (
            {"rope_scaling": {"type": "su"}},
            "rope_scaling.type: expected one of default, linear, dynamic, llama3, yarn, longrope, proportional, "
            "found 'su'",
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4, "beta_fast": 0.5}},
            "rope_scaling.beta_slow: expected at most beta_fast (0.5), found no such key",
        ),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor: expected a number above 0, at most 1e+06"),
        (
            {"rope_scaling": {"type": "longrope", "factor": 4, "short_factor": [1.0] * 63}},
            "rope_scaling.short_factor: expected 64 numbers above 0, one for each frequency, found [1.0, ",
        ),
        ({"rope_scaling": {"factor": 4}}, "rope_scaling.rope_type: expected a string, found no such key"),
        ({"rope_scaling": 8}, "rope_scaling: expected an object, found 8"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8}},
            "rope_scaling.low_freq_factor: expected a number above 0",
        ),
        (
            {"rope_scaling": {**LLAMA["rope_scaling"], "low_freq_factor": 4.0}},
            "rope_scaling.high_freq_factor: expected a number above low_freq_factor (4), found 4.0",
        ),
        (
            {"rope_scaling": {**LLAMA["rope_scaling"], "original_max_position_embeddings": 0}},
            "rope_scaling.original_max_position_embeddings: expected an integer",
        ),
        (
            {"rope_parameters": {"rope_theta": 1e4}},
            "rope_scaling: expected no such key beside a different rope_parameters",
        ),
        (
            {"rope_scaling": None, "rope_parameters": {"rope_theta": 1e4}},
            "rope_theta: expected the 10000 of rope_parameters.rope_theta, found 500000.0",
        ),
        (
            {"partial_rotary_factor": 0.5},
            "partial_rotary_factor: expected 1 (partial rotary embedding is not supported)",
        ),
        ({"attention_bias": "yes"}, "attention_bias: expected true or false, found 'yes'"),
    ],
)
def test_what_is_inconsistent_absurd_or_unsupported_is_refused(
    tmp_path: Path, changes: dict[str, Any], sentence: str
) -> None:
    assert refusal(tmp_path, changes).startswith(sentence)


def test_an_unknown_family_is_refused_before_the_keys_that_it_spells_otherwise(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "wave_net", "text_config": {}}')
    with pytest.raises(ConfigError, match=r"model_type: expected one of .*llama, .*qwen3_moe, .*, found 'wave_net'"):
        read_supported_card(tmp_path)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_mutated_config_never_raises_anything_else(tmp_path: Path, data: st.DataObject) -> None:
    (tmp_path / "config.json").write_bytes(data.draw(json_mutations(json.dumps(MIXTURE))))
    try:
        config = text_config(tmp_path)
        experts = experts_config(tmp_path)
    except ConfigError as refused:
        assert str(tmp_path) in str(refused)
    else:
        assert config.num_heads % config.num_kv_heads == 0
        assert config.head_dim % 2 == 0
        assert 1 <= experts.top_k <= experts.count


def test_mixture_of_experts(tmp_path: Path) -> None:
    assert experts_config(write_config(tmp_path, {}, MIXTURE)) == ExpertsConfig(128, 8, 768, True, frozenset())


@pytest.mark.parametrize(
    "changes, dense",
    [
        ({"decoder_sparse_step": ABSENT, "mlp_only_layers": None}, []),
        ({"mlp_only_layers": [0, 5]}, [0, 5]),
        ({"decoder_sparse_step": 2}, [0, 2, 4]),
        ({"decoder_sparse_step": 3, "mlp_only_layers": [2]}, [0, 1, 2, 3, 4]),
    ],
)
def test_dense_layers_of_a_mixture(tmp_path: Path, changes: dict[str, Any], dense: list[int]) -> None:
    """Compare with the numbers, and with what transformers builds."""
    assert experts_config(write_config(tmp_path, changes, MIXTURE)).dense_layers == set(dense)
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeDecoderLayer, Qwen3MoeMLP

    values = {key: value for key, value in changes.items() if value is not ABSENT}
    config = Qwen3MoeConfig(hidden_size=8, num_attention_heads=1, num_experts=2, num_hidden_layers=6, **values)
    built = [isinstance(Qwen3MoeDecoderLayer(config, layer).mlp, Qwen3MoeMLP) for layer in range(6)]
    assert [layer for layer in range(6) if built[layer]] == dense


def test_experts_as_transformers_5_writes_them(tmp_path: Path) -> None:
    from transformers import Qwen3MoeConfig

    config = Qwen3MoeConfig(
        num_experts=12, num_experts_per_tok=3, moe_intermediate_size=40, norm_topk_prob=True, num_hidden_layers=4
    )
    config.dtype = "bfloat16"
    config.save_pretrained(tmp_path)
    assert "num_experts" not in json.loads((tmp_path / "config.json").read_text())
    assert experts_config(tmp_path) == ExpertsConfig(12, 3, 40, True, frozenset())


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({"num_experts": ABSENT}, "num_local_experts: expected an integer from 1 to 16384, found no such key"),
        ({"num_experts": 0}, "num_experts: expected an integer from 1 to 16384, found 0"),
        ({"num_local_experts": 64}, "num_local_experts: expected the 128 of num_experts, found 64"),
        ({"num_experts_per_tok": 129}, "num_experts_per_tok: expected an integer from 1 to 128, found 129"),
        ({"num_experts_per_tok": ABSENT}, "num_experts_per_tok: expected an integer from 1 to 128, found no such key"),
        ({"moe_intermediate_size": ABSENT}, "moe_intermediate_size: expected an integer from 1 to 1048576"),
        ({"norm_topk_prob": 1}, "norm_topk_prob: expected true or false, found 1"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step: expected an integer from 1 to 4096, found 0"),
        ({"mlp_only_layers": [6]}, "mlp_only_layers: expected a list of layers from 0 to 5, found [6]"),
        ({"mlp_only_layers": 3}, "mlp_only_layers: expected a list of layers from 0 to 5, found 3"),
        ({"mlp_only_layers": [True]}, "mlp_only_layers: expected a list of layers from 0 to 5"),
    ],
)
def test_defects_of_a_mixture(tmp_path: Path, changes: dict[str, Any], sentence: str) -> None:
    assert refusal(tmp_path, MIXTURE | changes).startswith(sentence)
