"""Rotary position embeddings of all types: frequencies, tables, logits and contexts, against transformers."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from batching import single_engine
from model_configs import LLAMA, write_config
from tiny import make_checkpoint

from tilerank.loader.card import read_card
from tilerank.loader.rope import long_factors_note, read_rope
from tilerank.runtime.lead.engine import Request
from tilerank.runtime.lead.sampling import SamplingParams
from tilerank.runtime.protocol.prompt import Prompt
from tilerank.runtime.step.rope import RopeTable, inverse_frequencies

SHORT, LONG = [1.0 + 0.01 * i for i in range(64)], [1.0 + 0.5 * i for i in range(64)]
KIMI = {"type": "yarn", "factor": 32.0, "beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
TYPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.5},
    "llama3": LLAMA["rope_scaling"],
    "llama3-of-the-whole-context": {k: v for k, v in LLAMA["rope_scaling"].items() if k[0] != "o"},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    "yarn-of-the-whole-context": {"rope_type": "yarn", "factor": 2.0},
    "kimi-k2": KIMI | {"original_max_position_embeddings": 4096},
    "longrope": {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG, "factor": 32.0},
    "longrope-by-lengths": {
        "type": "longrope",
        "short_factor": SHORT,
        "long_factor": LONG,
        "original_max_position_embeddings": 4096,
    },
}


def changes_of(scaling: dict[str, Any], dialect: str) -> dict[str, Any]:
    """Return what config.json has in the dialect of transformers 4 or 5."""
    if dialect == "rope_scaling":
        return {"rope_scaling": scaling}
    return {"rope_scaling": None, "rope_theta": None, "rope_parameters": scaling | {"rope_theta": 5e5}}


@pytest.mark.parametrize(
    ("dialect", "dtype"), [("rope_scaling", torch.float32), ("rope_parameters", torch.bfloat16)], ids=["4", "5"]
)
@pytest.mark.parametrize("name", TYPES)
def test_frequencies_and_tables_are_those_of_transformers(
    tmp_path: Path, name: str, dialect: str, dtype: torch.dtype
) -> None:
    """At the scale of a public model. LongRoPE has its long factors where the context is longer than the original."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    write_config(tmp_path, changes_of(TYPES[name], dialect))
    theirs = LlamaRotaryEmbedding(LlamaConfig.from_pretrained(tmp_path))
    rope, positions = read_rope(read_card(tmp_path).fields, 128), 131072
    some = torch.cat([torch.arange(0, 1000), torch.arange(positions - 1000, positions)])
    cos, sin = theirs(torch.zeros(1, dtype=dtype), some[None])  # chooses the factors of LongRoPE
    assert torch.equal(inverse_frequencies(rope, 128, positions), theirs.inv_freq)
    assert rope.amplitude == pytest.approx(theirs.attention_scaling, rel=1e-15)
    table = RopeTable(rope, 128, positions, dtype)
    assert table.nbytes() == positions * 128 * dtype.itemsize
    table.allocate()
    assert torch.equal(table.table[some, 0], cos[0, :, :64])
    assert torch.equal(table.table[some, 1], sin[0, :, :64])


def test_longrope_has_its_short_factors_in_a_short_context(tmp_path: Path) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    write_config(tmp_path, {"rope_scaling": TYPES["longrope-by-lengths"]})
    theirs = LlamaRotaryEmbedding(LlamaConfig.from_pretrained(tmp_path))
    fields = read_card(tmp_path).fields
    rope = read_rope(fields, 128)
    assert torch.equal(inverse_frequencies(rope, 128, 4096), theirs.original_inv_freq)
    theirs(torch.zeros(1), torch.tensor([[4096]]))
    assert torch.equal(inverse_frequencies(rope, 128, 4097), theirs.inv_freq)
    assert long_factors_note(fields, 4096) == (
        "positions are scaled by short_factor of longrope, because the context of 4,096 tokens is not longer than the "
        "original 4,096"
    )
    note = long_factors_note(fields, 131072)
    assert note is not None and "long_factor of longrope, because the context of 131,072 tokens is longer" in note
    assert long_factors_note(read_card(write_config(tmp_path, {})).fields, 131072) is None


@pytest.mark.parametrize(
    ("scaling", "stated", "context"),
    [
        (None, 32768, 32768),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 32768, 131072),  # Qwen2.5's card
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 40960, 131072),  # Qwen3's
        ({"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}, 163840, 163840),  # DeepSeek-V3
        ({"type": "yarn", "factor": 3.0, "original_max_position_embeddings": 262144}, 1000000, 1000000),  # Qwen3-VL's
        ({"type": "yarn", "factor": 2.0}, 32768, 65536),
        ({"type": "linear", "factor": 4.0}, 4096, 16384),  # Vicuna 16k
        ({"type": "dynamic", "factor": 4.0}, 4096, 4096),
        (LLAMA["rope_scaling"], 131072, 131072),
        (TYPES["longrope-by-lengths"], 131072, 131072),  # Phi-3.5
    ],
)
def test_scaling_extends_the_context(tmp_path: Path, scaling: dict[str, Any] | None, stated: int, context: int) -> None:
    card = read_card(write_config(tmp_path, {"rope_scaling": scaling, "max_position_embeddings": stated}))
    assert card.context_length == context


@pytest.mark.parametrize("rotated", [1.0, 0.25])
def test_yarn_scales_the_frequencies_of_all_axes(tmp_path: Path, rotated: float) -> None:
    """Qwen3-VL's card, and Qwen3.5's, which rotates a quarter of a head, with other positions on every axis."""
    from transformers import Qwen3_5TextConfig, Qwen3VLTextConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

    sections = (24, 20, 20) if rotated == 1 else (11, 11, 10)
    head_dim = 128 if rotated == 1 else 256
    scaling: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    scaling |= {"rope_theta": 5e6, "mrope_section": list(sections), "mrope_interleaved": True}
    scaling |= {"partial_rotary_factor": rotated}
    changes = {"rope_scaling": None, "rope_theta": None, "rope_parameters": scaling, "max_position_embeddings": 4096}
    config: dict[str, Any] = {"head_dim": head_dim, "max_position_embeddings": 4096, "rope_parameters": dict(scaling)}
    embedding: Any = Qwen3VLTextRotaryEmbedding(Qwen3VLTextConfig(**config))
    if rotated != 1:
        embedding = Qwen3_5TextRotaryEmbedding(Qwen3_5TextConfig(**config))
    card = read_card(write_config(tmp_path, changes))
    assert card.context_length == 16384
    dim = int(head_dim * rotated)
    rope = read_rope(card.fields, dim, (1, 1, 1))  # the sections of the file count
    assert rope.sections == sections
    assert rope.amplitude == pytest.approx(embedding.attention_scaling, rel=1e-15)
    table = RopeTable(rope, dim, 16384, torch.float32)
    table.allocate()
    positions = torch.randint(0, 16384, (3, 50), generator=torch.Generator().manual_seed(1))
    cos, sin = embedding(torch.zeros(1), positions[:, None])
    rows = table.rows(positions)
    assert torch.equal(rows[:, 0], cos[0, :, : dim // 2])
    assert torch.equal(rows[:, 1], sin[0, :, : dim // 2])


def with_rope(source: Path, target: Path, context: int, scaling: dict[str, Any]) -> Path:
    shutil.copytree(source, target)
    config = json.loads((target / "config.json").read_text())
    text = config.get("text_config", config)
    theta = text.get("rope_theta") or text["rope_parameters"]["rope_theta"]
    text |= {"rope_scaling": None, "rope_parameters": scaling | {"rope_theta": theta}}
    text["max_position_embeddings"] = context
    (target / "config.json").write_text(json.dumps(config))
    return target


FACTORS = {"short_factor": [1.0 + 0.1 * i for i in range(8)], "long_factor": [1.0 + i for i in range(8)]}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("family", "context", "scaling"),
    [
        ("qwen3", 32, YARN),
        ("qwen3", 128, YARN),
        ("qwen3", 32, {"rope_type": "linear", "factor": 4.0}),
        ("qwen3", 128, {"rope_type": "dynamic", "factor": 4.0}),
        ("qwen3", 128, {"rope_type": "longrope", "original_max_position_embeddings": 16, "factor": 8.0, **FACTORS}),
        ("qwen3", 128, {"rope_type": "longrope", "original_max_position_embeddings": 128, "factor": 8.0, **FACTORS}),
        ("qwen3_vl", 32, YARN | {"mrope_section": [4, 2, 2], "mrope_interleaved": True}),
    ],
    ids=["yarn-by-card", "yarn", "linear", "dynamic", "longrope-long", "longrope-short", "yarn-of-axes"],
)
def test_logits_are_those_of_transformers(
    tmp_path: Path, restored: None, family: str, context: int, scaling: dict[str, Any]
) -> None:
    """Prompts of 100 tokens, and 5 greedy tokens, in fp32, in a context of 128 tokens."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    dims = {"hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "inter": 96, "layers": 4, "vocab": 300}
    model_dir = with_rope(make_checkpoint(family, tmp_path, 3, **dims), tmp_path / "scaled", context, scaling)
    load: Any = (AutoModelForCausalLM if family == "qwen3" else AutoModelForImageTextToText).from_pretrained
    theirs = load(model_dir, dtype=torch.float32).eval()
    ids = torch.randint(0, 300, (105,), generator=torch.Generator().manual_seed(5)).tolist()[:100]
    with torch.inference_mode():
        for _ in range(5):
            ids.append(int(theirs(torch.tensor([ids])).logits[0, -1].argmax()))
        wanted = theirs(torch.tensor([ids])).logits[0]
    engine = single_engine(model_dir, dtype=torch.float32, max_total_tokens=256)
    assert engine.card.context_length == 128
    found = engine.score(Prompt(ids))
    assert ((found - wanted).abs().amax(-1) / wanted.abs().amax(-1)).max() <= 1e-4
    params = SamplingParams(max_new_tokens=5, ignore_eos=True)
    assert [event.token_id for event in engine.generate([Request(Prompt(ids[:100]), params)])] == ids[100:]
