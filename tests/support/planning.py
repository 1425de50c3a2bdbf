"""Plans of a known model on invented machines."""

import json
from pathlib import Path
from typing import Any

from fake_sysfs import Machine

from tilerank.launch.host.placement import place
from tilerank.launch.host.topology import read_topology
from tilerank.launch.options.model import ModelOptions
from tilerank.launch.planning.plan import plan_model
from tilerank.launch.planning.plan_types import Plan
from tilerank.loader.card import ModelCard, read_card

DEMO = Path(__file__).parents[2] / "assets" / "demo-lm"
# Weights that every rank has whole: the norms, and the cosines and sines of 40960 positions.
NORMS = 48 * (2 * 2048 + 2 * 128) + 2048
ROPE = 40960 * 128
LAYER = 2048 * 128 * (2 * 32 + 2 * 4) + 3 * 2048 * 6144 + 2 * 2048 + 2 * 128
PARAMETERS = 48 * LAYER + 2 * 151936 * 2048 + 2048
HEADS_32_4 = {  # the attention of Qwen3-30B-A3B with a dense MLP
    "model_type": "qwen3",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 40960,
    "rope_theta": 1e6,
    "torch_dtype": "bfloat16",
    "eos_token_id": 151645,
}


def config_of(tmp_path: Path, **changes: Any) -> ModelCard:
    (tmp_path / "config.json").write_text(json.dumps(HEADS_32_4 | changes))
    return read_card(tmp_path)


def plan_on(machine: Machine, root: Path, config: ModelCard, tp: int, cores: str = "auto", **options: Any) -> Plan:
    topology = read_topology(machine.write(root / "machine"))
    placement = place(topology, tp, cores)
    options.setdefault("cached_tokens", 0)
    return plan_model(config, tp, ModelOptions(**options), model="models/it", topology=topology, placement=placement)


def by_name(plan: Plan) -> dict[str, Any]:
    return {dimension.name: dimension for dimension in plan.dimensions}
