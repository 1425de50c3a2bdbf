"""What the families of relatives of Llama read of config.json, and what they refuse."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from model_configs import LLAMA

from tilerank.loader.card import read_card
from tilerank.loader.errors import ConfigError
from tilerank.loader.rope import LongScaling
from tilerank.parallel.sharding import Sharding
from tilerank.runtime.models.attention import SelfAttention, Temperature
from tilerank.runtime.rank.registry import build_model

NOT_SCALED = {key: value for key, value in LLAMA.items() if key != "rope_scaling"}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "llama_4_scaling_beta": 0.1,
}


def mixers(model_dir: Path, fields: dict[str, Any]) -> list[SelfAttention]:
    """Return the attention layers of the model that these fields describe."""
    (model_dir / "config.json").write_text(json.dumps(fields))
    model = build_model(read_card(model_dir), Sharding(0, 1, torch.bfloat16, None))
    return [layer for layer in model.walk() if isinstance(layer, SelfAttention)]


@pytest.mark.parametrize(
    ("fields", "window"),
    [
        ({}, 4096),
        ({"sliding_window": None}, 0),
        ({"sliding_window": 32768}, 32768),
        ({"sliding_window": 131072}, 0),
        ({"model_type": "phi3"}, 0),
        ({"model_type": "phi3", "sliding_window": 2047}, 2047),
    ],
)
def test_a_window_holds_for_all_layers(tmp_path: Path, fields: dict[str, Any], window: int) -> None:
    """transformers: an absent key is 4096 for Mistral alone, and null is no window. The context has 131,072 tokens."""
    found = mixers(tmp_path, NOT_SCALED | {"model_type": "mistral", "max_position_embeddings": 131072} | fields)
    assert {mixer.window for mixer in found} == {window}


@pytest.mark.parametrize(("beta", "expected"), [(0.1, Temperature(0.1, 16384)), (0.0, None), (None, None)])
def test_the_language_model_of_mistral3(tmp_path: Path, beta: float | None, expected: Temperature | None) -> None:
    """The placeholder of pictures has one of the first ids; the vocabulary still has all ids after it."""
    text = NOT_SCALED | {"model_type": "ministral3", "rope_parameters": YARN | {"llama_4_scaling_beta": beta}}
    del text["rope_theta"]
    found = mixers(tmp_path, {"model_type": "mistral3", "image_token_index": 10, "text_config": text})
    assert {mixer.temperature for mixer in found} == {expected} and {mixer.window for mixer in found} == {0}
    assert read_card(tmp_path).vocab_size == LLAMA["vocab_size"]


def test_a_language_model_of_another_kind_is_refused(tmp_path: Path) -> None:
    fields = {"model_type": "mistral3", "text_config": NOT_SCALED | {"model_type": "mistral4"}}
    with pytest.raises(ConfigError, match=r"model_type: expected mistral or ministral3 \(mistral4 needs the latent"):
        mixers(tmp_path, fields)


@pytest.mark.parametrize("kind", ["su", "yarn", "longrope"])
def test_the_types_of_longrope(tmp_path: Path, kind: str) -> None:
    factors = [1.0 + i for i in range(48)]
    rope = {"type": kind, "short_factor": factors, "long_factor": factors}
    fields = NOT_SCALED | {"model_type": "phi3", "rope_scaling": rope, "partial_rotary_factor": 0.75}
    (mixer, *_) = mixers(tmp_path, fields | {"original_max_position_embeddings": 4096})
    assert mixer.rotation is not None and mixer.rotation.dim == 96
    assert mixer.rotation.rope.scaling == LongScaling(tuple(factors), tuple(factors), 4096)


def test_layers_without_rotation(tmp_path: Path) -> None:
    fields = NOT_SCALED | {"model_type": "smollm3", "num_hidden_layers": 5}
    assert [mixer.rotated for mixer in mixers(tmp_path, fields)] == [True, True, True, False, True]
    kept = [mixer.rotated for mixer in mixers(tmp_path, fields | {"no_rope_layers": [0, 1, 1, 1, 0]})]
    assert kept == [False, True, True, True, False]
    for wrong in ([0, 1], [0, 1, 1, 2, 0], 3):
        with pytest.raises(ConfigError, match="no_rope_layers: expected 0 or 1 for each of the 5 layers"):
            mixers(tmp_path, fields | {"no_rope_layers": wrong})
