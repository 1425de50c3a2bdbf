"""config.json: equal to what transformers reads, in both dialects; every defect is one sentence with file and key."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mutate import json_mutations
from tiny import make_checkpoint

from tilerank.loader.config import (
    ExpertsConfig,
    Llama3Scaling,
    ModelConfig,
    RopeConfig,
    SamplingDefaults,
    load_config,
    read_model_type,
    read_sampling_defaults,
)
from tilerank.loader.errors import ConfigError
from tilerank.runtime.registry import read_config

DEMO = Path(__file__).parents[1] / "assets" / "demo-lm"
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "rms_norm_eps": 1e-05,
    "max_position_embeddings": 131072,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}
ABSENT = object()


def write(model_dir: Path, changes: dict[str, Any], base: dict[str, Any] = LLAMA) -> Path:
    values = {key: value for key, value in {**base, **changes}.items() if value is not ABSENT}
    (model_dir / "config.json").write_text(json.dumps(values))
    return model_dir


def refusal(model_dir: Path, changes: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(write(model_dir, changes))
    sentence = str(caught.value)
    assert sentence.startswith(f"{model_dir / 'config.json'}: ")
    assert "\n" not in sentence
    return sentence.removeprefix(f"{model_dir / 'config.json'}: ")


def test_llama_3_1_8b(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, {})) == ModelConfig(
        model_type="llama",
        architectures=("LlamaForCausalLM",),
        hidden_size=4096,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=14336,
        vocab_size=128256,
        rms_norm_eps=1e-5,
        max_position_embeddings=131072,
        rope=RopeConfig(500000.0, Llama3Scaling(8.0, 1.0, 4.0, 8192)),
        attention_bias=False,
        mlp_bias=False,
        tie_word_embeddings=False,
        dtype="bfloat16",
        eos_token_ids=(128001, 128008, 128009),
        bos_token_id=128000,
        raw={},
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
    config = load_config(old)
    assert load_config(tmp_path) == config
    for ours, theirs in [
        ("model_type", "model_type"),
        ("hidden_size", "hidden_size"),
        ("num_layers", "num_hidden_layers"),
        ("num_heads", "num_attention_heads"),
        ("num_kv_heads", "num_key_value_heads"),
        ("intermediate_size", "intermediate_size"),
        ("vocab_size", "vocab_size"),
        ("rms_norm_eps", "rms_norm_eps"),
        ("max_position_embeddings", "max_position_embeddings"),
        ("tie_word_embeddings", "tie_word_embeddings"),
    ]:
        assert getattr(config, ours) == getattr(reference, theirs), ours
    default_head_dim = reference.hidden_size // reference.num_attention_heads
    assert config.head_dim == (getattr(reference, "head_dim", None) or default_head_dim)
    assert config.dtype == str(reference.dtype).removeprefix("torch.")
    assert config.rope.theta == reference.rope_parameters["rope_theta"]
    scaling = None
    if reference.rope_parameters["rope_type"] == "llama3":
        scaling = Llama3Scaling(**{k: reference.rope_parameters[k] for k in Llama3Scaling.__dataclass_fields__})
    assert config.rope.scaling == scaling
    eos = GenerationConfig.from_pretrained(old).eos_token_id
    assert config.eos_token_ids == tuple(eos if isinstance(eos, list) else [eos])


def test_end_of_sequence_ids_of_generation_config_win(tmp_path: Path) -> None:
    write(tmp_path, {"eos_token_id": 5, "bos_token_id": 3})
    assert load_config(tmp_path).eos_token_ids == (5,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 6, 7], "bos_token_id": null}')
    config = load_config(tmp_path)
    assert (config.eos_token_ids, config.bos_token_id) == ((7, 6), 3)
    (tmp_path / "generation_config.json").write_text("{}")
    assert load_config(tmp_path).eos_token_ids == (5,)


def test_generation_config_that_links_to_a_missing_file_is_not_taken_for_none(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").symlink_to("../blobs/missing")
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, {}))
    assert str(caught.value) == f"{tmp_path / 'generation_config.json'}: a symbolic link to a missing file"


def test_neither_file_names_special_tokens(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, {"eos_token_id": None, "bos_token_id": ABSENT}))
    assert (config.eos_token_ids, config.bos_token_id) == ((), None)


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
    assert load_config(write(tmp_path, changes)).rope == rope


@pytest.mark.parametrize(
    "key",
    [
        "model_type",
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_hidden_layers",
        "num_key_value_heads",
        "vocab_size",
        "rms_norm_eps",
        "max_position_embeddings",
        "rope_theta",
        "torch_dtype",
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
            "hidden_size: expected a multiple of num_attention_heads (24), there being no head_dim, found 4096",
        ),
        ({"head_dim": 63}, "head_dim: expected an even head size (rotary embedding turns pairs), not 63, found 63"),
        ({"head_dim": 0}, "head_dim: expected an integer from 1 to 4096, found 0"),
        ({"hidden_size": True}, "hidden_size: expected an integer from 1 to 1048576, found True"),
        ({"hidden_size": 4096.0}, "hidden_size: expected an integer from 1 to 1048576, found 4096.0"),
        ({"hidden_size": "4096"}, "hidden_size: expected an integer from 1 to 1048576, found '4096'"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers: expected an integer from 1 to 4096, found 1000000000"),
        ({"vocab_size": -1}, "vocab_size: expected an integer from 1 to 16777216, found -1"),
        ({"rms_norm_eps": 0}, "rms_norm_eps: expected a number above 0, at most 1, found 0"),
        ({"rope_theta": 10**400}, f"rope_theta: expected a number above 1, at most 1e+15, found 1{'0' * 76}..."),
        ({"rope_theta": -1.0}, "rope_theta: expected a number above 1, at most 1e+15, found -1.0"),
        ({"text_config": {}}, "text_config: expected no such key (multimodal models are not supported yet), found {}"),
        ({"hidden_act": "gelu"}, "hidden_act: expected 'silu', found 'gelu'"),
        (
            {"use_sliding_window": True},
            "use_sliding_window: expected false (sliding-window attention is not supported), found True",
        ),
        ({"is_causal": False}, "is_causal: expected true (attention to later tokens is not supported), found False"),
        (
            {"quantization_config": {"quant_method": "fp8"}},
            "quantization_config.weight_block_size: expected [rows, columns] of the blocks that share a scale, "
            "multiples of 32, found no such key",
        ),
        (
            {"layer_types": ["full_attention"] * 31 + ["sliding_attention"]},
            "layer_types: expected a list of 'full_attention' only",
        ),
        ({"layer_types": ["full_attention"]}, "layer_types: expected one entry for each of the 32 layers"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4}},
            "rope_scaling.rope_type: expected one of default, llama3, found 'yarn'",
        ),
        ({"rope_scaling": {"type": "su"}}, "rope_scaling.type: expected one of default, llama3, found 'su'"),
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
            {"rope_scaling": {k: v for k, v in LLAMA["rope_scaling"].items() if k[0] != "o"}},
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
        ({"torch_dtype": "int8"}, "torch_dtype: expected one of bfloat16, float16, float32, found 'int8'"),
        ({"dtype": "auto"}, "dtype: expected one of bfloat16, float16, float32, found 'auto'"),
        ({"attention_bias": "yes"}, "attention_bias: expected true or false, found 'yes'"),
        ({"architectures": "LlamaForCausalLM"}, "architectures: expected a list of strings, found 'LlamaForCausalLM'"),
        ({"eos_token_id": 128256}, "eos_token_id: expected token ids from 0 to 128255, found 128256"),
        ({"eos_token_id": [1, "2"]}, "eos_token_id: expected token ids from 0 to 128255, found [1, '2']"),
        ({"bos_token_id": -1}, "bos_token_id: expected an integer from 0 to 128255, found -1"),
    ],
)
def test_what_is_inconsistent_absurd_or_unsupported_is_refused(
    tmp_path: Path, changes: dict[str, Any], sentence: str
) -> None:
    assert refusal(tmp_path, changes).startswith(sentence)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "not valid JSON"),
        (b'{"model_type": "llama",}', "not valid JSON"),
        (b"[" * 100_000, "not valid JSON: nested too deeply"),
        (b'{"rope_theta": NaN}', "not valid JSON: NaN is not a JSON number"),
        (b'{"rope_theta": -Infinity}', "not valid JSON: -Infinity is not a JSON number"),
        (b'{"rope_theta": 1e999}', "not valid JSON: 1e999 is beyond the range of a double"),
        (b'{"rope_theta": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b'{"model_type": "\xff"}', "not UTF-8 at byte 16"),
        (b'"llama"', "expected a JSON object, found 'llama'"),
    ],
)
def test_malformed_json(tmp_path: Path, content: bytes, sentence: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / 'config.json'}: {sentence}")


def test_no_model_directory(tmp_path: Path) -> None:
    for model_dir, sentence in [
        (tmp_path / "none", f"{tmp_path / 'none'}: expected a model directory, found nothing"),
        (Path(__file__), f"{__file__}: expected a model directory, found a file"),
        (tmp_path, f"{tmp_path / 'config.json'}: no such file"),
        (tmp_path / ("x" * 300), f"{tmp_path / ('x' * 300)}: cannot be read: File name too long"),
    ]:
        with pytest.raises(ConfigError) as caught:
            load_config(model_dir)
        assert str(caught.value) == sentence


def test_unknown_family_is_refused_before_the_keys_that_it_spells_otherwise(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "wave_net", "text_config": {}}')
    assert read_model_type(tmp_path) == "wave_net"
    with pytest.raises(ConfigError, match=r"model_type: expected one of llama, .*qwen3_moe, found 'wave_net'"):
        read_config(tmp_path)


def test_generation_config_advises_how_to_choose_tokens(tmp_path: Path) -> None:
    assert read_sampling_defaults(tmp_path) == SamplingDefaults(1.0, 0, 1.0, 0.0, 1.0)
    path = tmp_path / "generation_config.json"
    path.write_text('{"do_sample": true, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": null}')
    assert read_sampling_defaults(tmp_path) == SamplingDefaults(0.6, 20, 0.95, 0.0, 1.0)
    path.write_text('{"temperature": 0, "top_k": -1, "min_p": 0.1, "repetition_penalty": 1.05}')
    assert read_sampling_defaults(tmp_path) == SamplingDefaults(0.0, 0, 1.0, 0.1, 1.05)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('{"top_p": 1.5}', "top_p: expected a number from 0, at most 1, found 1.5"),
        ('{"temperature": "warm"}', "temperature: expected a number from 0, at most 100, found 'warm'"),
        ('{"repetition_penalty": 0}', "repetition_penalty: expected a number from 0.01, at most 100, found 0"),
        ('{"top_k": 2.5}', "top_k: expected an integer from -1 to 2147483647, found 2.5"),
    ],
)
def test_advice_that_cannot_be_followed_is_refused(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "generation_config.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_sampling_defaults(tmp_path)
    assert str(caught.value) == f"{path}: {sentence}"


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_mutated_config_never_raises_anything_else(tmp_path: Path, data: st.DataObject) -> None:
    (tmp_path / "config.json").write_bytes(data.draw(json_mutations(json.dumps(LLAMA))))
    (tmp_path / "generation_config.json").write_bytes(
        data.draw(json_mutations('{"eos_token_id": [1, 2], "bos_token_id": 3, "temperature": 0.6, "top_k": 20}'))
    )
    try:
        sampling = read_sampling_defaults(tmp_path)
        config = load_config(tmp_path)
    except ConfigError as refused:
        assert str(tmp_path) in str(refused)
    else:
        assert config.num_heads % config.num_kv_heads == 0
        assert config.head_dim % 2 == 0
        assert 0 <= sampling.temperature <= 100 and sampling.top_k >= 0


MIXTURE = LLAMA | {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 6,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def test_mixture_of_experts(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, {}, MIXTURE)).experts == ExpertsConfig(128, 8, 768, True, frozenset())
    assert load_config(write(tmp_path, {})).experts is None


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
    """By the numbers, and by what transformers builds."""
    experts = load_config(write(tmp_path, changes, MIXTURE)).experts
    assert experts is not None and experts.dense_layers == set(dense)
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
    assert load_config(tmp_path).experts == ExpertsConfig(12, 3, 40, True, frozenset())


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
