"""config.json of Gemma 4: as transformers reads it, in files with older and newer keys; every defect is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from model_configs import ABSENT, write_config

from tilerank.loader.card import read_card
from tilerank.loader.errors import ConfigError
from tilerank.parallel.sharding import Sharding
from tilerank.runtime.models.decoder import Decoder
from tilerank.runtime.rank.registry import build_model, read_supported_card
from tilerank.runtime.step.cache import HeadPlace, PagedKV, SharedKV
from tilerank.runtime.step.rope import inverse_frequencies

SLIDING, FULL = "sliding_attention", "full_attention"
ROPE: dict[str, Any] = {
    FULL: {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
    SLIDING: {"rope_theta": 10000.0, "rope_type": "default"},
}
# The keys of Gemma-4-31B, with fewer layers.
DENSE: dict[str, Any] = {
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "dtype": "bfloat16",
    "attention_k_eq_v": True,
    "enable_moe_block": False,
    "final_logit_softcapping": 30.0,
    "global_head_dim": 512,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 512,
    "hidden_size_per_layer_input": 0,
    "intermediate_size": 640,
    "layer_types": [SLIDING] * 5 + [FULL] + [SLIDING] * 5 + [FULL],
    "max_position_embeddings": 262144,
    "num_attention_heads": 16,
    "num_global_key_value_heads": 2,
    "num_hidden_layers": 12,
    "num_key_value_heads": 8,
    "num_kv_shared_layers": 0,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-06,
    "rope_parameters": ROPE,
    "sliding_window": 1024,
    "tie_word_embeddings": True,
    "use_bidirectional_attention": "vision",
    "vocab_size": 1000,
    "vocab_size_per_layer_input": 1000,
}
# The fields in which Gemma-4-E2B differs.
SHARED = {
    "attention_k_eq_v": False,
    "hidden_size_per_layer_input": 64,
    "num_global_key_value_heads": None,
    "num_key_value_heads": 1,
    "num_kv_shared_layers": 6,
    "sliding_window": 512,
    "use_bidirectional_attention": None,
    "use_double_wide_mlp": True,
}
NEWER = {
    "global_head_dim": ABSENT,
    "num_global_key_value_heads": ABSENT,
    "per_layer_config": {"5": {"head_dim": 128, "num_key_value_heads": 4}, "11": {"head_dim": 512}},
}
# Keys and heads at layer 4 are those of the last full layer as well.
PATTERN = {"layer_types": ABSENT, "num_hidden_layers": 8}


def build(model_dir: Path, changes: dict[str, Any]) -> Decoder:
    model = build_model(read_card(write_config(model_dir, changes, DENSE)), Sharding(0, 1, torch.float32, None))
    assert isinstance(model, Decoder)
    return model


@pytest.mark.parametrize("changes", [{}, SHARED, NEWER, PATTERN], ids=["dense", "shared", "newer", "pattern"])
def test_a_file_is_read_as_by_transformers(tmp_path: Path, changes: dict[str, Any]) -> None:
    from transformers import AutoConfig
    from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRotaryEmbedding

    model, config = build(tmp_path, changes), AutoConfig.from_pretrained(tmp_path)
    rotary: Any = Gemma4TextRotaryEmbedding(config) if changes is not NEWER else None
    specs, first = model.cache_specs(), config.num_hidden_layers - config.num_kv_shared_layers
    for number, (layer, kind, spec) in enumerate(zip(model.layers, config.layer_types, specs, strict=True)):
        of_layer, mixer = config.per_layer_config[number], layer.mixer
        kept = spec.kept if isinstance(spec, SharedKV) else spec
        window = config.sliding_window if kind == SLIDING else 0
        heads = of_layer.num_key_value_heads
        assert kept == PagedKV(heads, of_layer.head_dim, torch.float32, window, HeadPlace(0, 0, heads))
        assert mixer.rotation is not None
        if rotary is not None:
            found = inverse_frequencies(mixer.rotation.rope, mixer.rotation.dim, 1)
            wanted = getattr(rotary, f"{kind}_inv_freq")
            assert torch.equal(found, wanted[: len(found)]) and not wanted[len(found) :].any()
        if isinstance(spec, SharedKV):
            assert spec.layer == max(i for i in range(first) if config.layer_types[i] == kind)
        assert isinstance(spec, SharedKV) == (number >= first)
    assert len(model.ropes) == len({layer.mixer.rotation for layer in model.layers})


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"layer_types": [SLIDING] * 12}, "layer_types: expected 'full_attention' at the end, found "),
        (
            {"num_kv_shared_layers": 11},
            "num_kv_shared_layers: expected a layer before them like layer 5, which has keys and values, found 11",
        ),
        ({"global_head_dim": 1024}, "global_head_dim: expected an integer from 8 to 512, found 1024"),
        (
            {"num_global_key_value_heads": 3},
            "num_global_key_value_heads: expected a divisor of num_attention_heads (16)",
        ),
        (
            {"use_bidirectional_attention": "all"},
            "use_bidirectional_attention: expected null or 'vision' (attention to later tokens of text is not ",
        ),
        ({"hidden_activation": "silu"}, "hidden_activation: expected 'gelu_pytorch_tanh', found 'silu'"),
        (
            {"attention_bias": True},
            "attention_bias: expected false (biases of attention are not supported), found True",
        ),
        (
            {"rope_parameters": {**ROPE, SLIDING: {**ROPE[SLIDING], "partial_rotary_factor": 0.5}}},
            "rope_parameters.sliding_attention.partial_rotary_factor: expected 1 beside this type",
        ),
        (
            {"rope_parameters": {**ROPE, FULL: {**ROPE[FULL], "rope_type": "spiral"}}},
            "rope_parameters.full_attention.rope_type: ",
        ),
    ],
)
def test_a_defect_is_refused(tmp_path: Path, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(tmp_path, changes)
    assert str(caught.value).removeprefix(f"{tmp_path / 'config.json'}: ").startswith(sentence)


@pytest.mark.parametrize("relative", ["gemma4_unified", "gemma4_assistant", "diffusion_gemma", "gemma3n"])
def test_relatives_are_refused_by_name(tmp_path: Path, relative: str) -> None:
    write_config(tmp_path, {"model_type": relative}, DENSE)
    with pytest.raises(ConfigError, match=rf"\({relative} needs .*, not supported yet\)"):
        read_supported_card(tmp_path)
