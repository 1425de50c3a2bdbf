"""config.json of Gemma 3: as transformers reads it, in files with many and with few keys; every defect is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from model_configs import ABSENT, write_config

from tilerank.loader.card import read_card
from tilerank.loader.errors import ConfigError
from tilerank.loader.rope import LinearScaling, RopeConfig
from tilerank.parallel.sharding import Sharding
from tilerank.runtime.models.decoder import Decoder
from tilerank.runtime.rank.registry import build_model
from tilerank.runtime.step.rope import inverse_frequencies

SLIDING, FULL = "sliding_attention", "full_attention"
SMALL: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "torch_dtype": "bfloat16",
    "head_dim": 32,
    "hidden_size": 640,
    "intermediate_size": 2048,
    "num_attention_heads": 4,
    "num_hidden_layers": 12,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32768,
    "rope_local_base_freq": 10000.0,
    "rope_theta": 1000000.0,
    "rope_scaling": None,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "vocab_size": 1000,
}
# All that the file of Gemma-3-4b says of its language model.
FEW = {
    "model_type": "gemma3_text",
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "num_hidden_layers": 34,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "sliding_window": 1024,
}
LISTED = [SLIDING, SLIDING, FULL] * 4
NESTED = {FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5}, SLIDING: {"rope_type": "default"}}


def build(model_dir: Path, changes: dict[str, Any], base: dict[str, Any] = SMALL) -> Decoder:
    card = read_card(write_config(model_dir, changes, base))
    model = build_model(card, Sharding(0, 1, torch.float32, None))
    assert isinstance(model, Decoder)
    return model


def windows(model: Decoder) -> list[int]:
    return [layer.mixer.window for layer in model.layers]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("changes", "base"),
    [
        ({}, SMALL),
        ({"sliding_window_pattern": 5, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}, SMALL),
        ({"layer_types": LISTED, "sliding_window_pattern": ABSENT}, SMALL),
        ({"rope_theta": ABSENT, "rope_local_base_freq": ABSENT, "rope_parameters": NESTED}, SMALL),
        ({"query_pre_attn_scalar": 168}, SMALL),
        ({}, FEW),
    ],
    ids=["pattern", "linear", "listed", "nested", "scale", "few-keys"],
)
def test_a_file_is_read_as_by_transformers(tmp_path: Path, changes: dict[str, Any], base: dict[str, Any]) -> None:
    from transformers import AutoConfig
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding

    model = build(tmp_path, changes, base)
    card, config = read_card(tmp_path), AutoConfig.from_pretrained(tmp_path)
    rotary: Any = Gemma3RotaryEmbedding(config)
    assert card.context_length == config.max_position_embeddings
    assert (card.vocab_size, card.eos_token_ids, card.bos_token_id) == (config.vocab_size, (1,), 2)
    assert windows(model) == [config.sliding_window if kind == SLIDING else 0 for kind in config.layer_types]
    for layer, kind in zip(model.layers, config.layer_types, strict=True):
        mixer = layer.mixer
        assert mixer.rotation is not None and mixer.rotation.dim == config.head_dim
        found = inverse_frequencies(mixer.rotation.rope, config.head_dim, card.context_length)
        assert torch.equal(found, getattr(rotary, f"{kind}_inv_freq"))
        assert mixer.scale == config.query_pre_attn_scalar**-0.5  # type: ignore[attr-defined]
    assert len(model.ropes) == 2


def test_the_embedding_factor_is_rounded_to_the_dtype(tmp_path: Path) -> None:
    card = read_card(write_config(tmp_path, {"hidden_size": 1152}, SMALL))
    factors = [build_model(card, Sharding(0, 1, dtype, None)) for dtype in (torch.float32, torch.bfloat16)]
    found = [model._embedding_factor for model in factors]  # type: ignore[attr-defined]
    assert found == [pytest.approx(1152**0.5, rel=1e-7), 34.0]


def test_layers_without_a_window(tmp_path: Path) -> None:
    """All layers are full: nothing slides, whatever `sliding_window` says."""
    model = build(tmp_path, {"layer_types": [FULL] * 12, "sliding_window_pattern": 1})
    assert windows(model) == [0] * 12 and len(model.ropes) == 1


def test_the_older_key_of_the_pattern_alone(tmp_path: Path) -> None:
    model = build(tmp_path, {"sliding_window_pattern": ABSENT, "_sliding_window_pattern": 4})
    assert windows(model) == [512, 512, 512, 0] * 3


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"_sliding_window_pattern": 4},
            "_sliding_window_pattern: expected the pattern of sliding_window_pattern, found 4",
        ),
        ({"layer_types": LISTED}, "sliding_window_pattern: expected the pattern of layer_types, found 6"),
        ({"layer_types": ["chunked_attention"] * 12}, f"layer_types: expected a list of '{SLIDING}' and '{FULL}' only"),
        ({"sliding_window": None}, "sliding_window: expected an integer from 1 to 1073741824, found None"),
        (
            {"attn_logit_softcapping": 50.0},
            "attn_logit_softcapping: expected null (capped scores and logits are not supported), found 50.0",
        ),
        (
            {"final_logit_softcapping": 30.0},
            "final_logit_softcapping: expected null (capped scores and logits are not supported), found 30.0",
        ),
        (
            {"use_bidirectional_attention": True},
            "use_bidirectional_attention: expected false (a model that generates text cannot attend to later tokens), "
            "found True",
        ),
        ({"hidden_activation": "gelu"}, "hidden_activation: expected 'gelu_pytorch_tanh', found 'gelu'"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_parameters.rope_type: expected no such key beside "),
        ({"rope_parameters": {FULL: {}}}, f"rope_parameters.{SLIDING}: expected an object, found no such key"),
        (
            {"rope_parameters": NESTED, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            "rope_scaling: expected no such key beside a different rope_parameters, found {",
        ),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar: expected a number above 0, at most 1e+06, found 0"),
    ],
)
def test_a_defect_is_refused(tmp_path: Path, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(tmp_path, changes)
    assert str(caught.value).removeprefix(f"{tmp_path / 'config.json'}: ").startswith(sentence)


def test_a_rotation_for_each_kind_is_refused_by_other_families(tmp_path: Path) -> None:
    write_config(tmp_path, {"rope_scaling": None, "rope_parameters": NESTED})
    with pytest.raises(ConfigError, match=r"rope_parameters: expected one rotary embedding for all layers, found"):
        build_model(read_card(tmp_path), Sharding(0, 1, torch.float32, None))


def test_the_rotations_of_both_kinds(tmp_path: Path) -> None:
    """Only the full layers have the scaling, in both dialects."""
    older = {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_theta": 5e5}
    newer = {"rope_theta": ABSENT, "rope_local_base_freq": ABSENT, "rope_parameters": NESTED}
    for changes in (older, newer):
        first, *_, last = build(tmp_path, changes).layers
        assert first.mixer.rotation is not None and first.mixer.rotation.rope == RopeConfig(1e4)
        assert last.mixer.rotation is not None and last.mixer.rotation.rope == RopeConfig(5e5, LinearScaling(8.0))
