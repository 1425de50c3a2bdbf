"""The fields of gpt-oss's config.json: what the released ones mean, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from model_configs import ABSENT, GPT_OSS, write_config

from tilerank.loader.card import read_card
from tilerank.loader.errors import ConfigError
from tilerank.parallel.sharding import Sharding
from tilerank.runtime.models.decoder import Decoder
from tilerank.runtime.models.text_config import read_text_config
from tilerank.runtime.rank.registry import build_model


def model(model_dir: Path, **changes: Any) -> Decoder:
    card = read_card(write_config(model_dir, changes, GPT_OSS))
    decoder = build_model(card, Sharding(0, 1, torch.bfloat16, None))
    assert isinstance(decoder, Decoder)
    return decoder


def windows(decoder: Decoder) -> list[int]:
    return [layer.mixer.cache_spec.window for layer in decoder.layers]  # type: ignore[union-attr]


def test_released_fields(tmp_path: Path) -> None:
    assert windows(model(tmp_path)) == [128, 0] * 12
    assert windows(model(tmp_path, layer_types=ABSENT)) == [128, 0] * 12
    assert windows(model(tmp_path, layer_types=["full_attention"] * 24, sliding_window=None)) == [0] * 24
    card = read_card(tmp_path)
    assert (card.dtype, card.context_length) == ("bfloat16", 131072)
    rope = read_text_config(card.fields, dense=False, layer_kinds=("full_attention",)).rope
    assert rope.amplitude == pytest.approx(1.3465736, abs=1e-7)  # 0.1 ln 32 + 1


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({"swiglu_limit": 6.0}, "swiglu_limit: expected 7, found 6.0"),
        ({"swiglu_alpha": 1.5}, "swiglu_alpha: expected 1.702, found 1.5"),
        ({"experts_per_token": 3}, "experts_per_token: expected the 4 of num_experts_per_tok, found 3"),
        ({"num_experts": 16}, "num_local_experts: expected the 16 of num_experts, found 32"),
        ({"sliding_window": None}, "sliding_window: expected an integer from 1 to 131072, found None"),
        ({"layer_types": ["sliding"] * 24}, "layer_types: expected a list of"),
        ({"hidden_act": "gelu"}, "hidden_act: expected 'silu', found"),
    ],
)
def test_refused_fields(tmp_path: Path, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        model(tmp_path, **changes)
    assert str(caught.value).startswith(f"{tmp_path / 'config.json'}: {sentence}")
