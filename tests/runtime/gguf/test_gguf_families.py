"""GGUF files of all architectures have the logits of the directories from which they are made.

The conformance tests compare directories with transformers.
"""

import json
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from families.record import Dims, delta_nets, experts
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from tiny import make_checkpoint, tool
from torch import Tensor

from tests.loader.gguf_files import TYPES, random_blocks, write_gguf
from tests.runtime.gguf.hub_to_gguf import NoTokenizer, representable, write
from tilerank.loader.card import read_card
from tilerank.loader.checkpoint import Checkpoint
from tilerank.loader.errors import CheckpointError, ConfigError
from tilerank.loader.gguf.blocks import dequantise
from tilerank.loader.gguf.file import open_gguf
from tilerank.loader.weight_formats import weight_formats
from tilerank.loader.weights import load_weights
from tilerank.parallel.join import Team
from tilerank.parallel.parameters import PackedParameter
from tilerank.parallel.sharding import Sharding
from tilerank.runtime.lead.engine import Engine
from tilerank.runtime.protocol.prompt import Prompt
from tilerank.runtime.rank.rank_config import RankConfig
from tilerank.runtime.rank.registry import build_model
from tilerank.runtime.rank.worker import Worker

HIDDEN, VOCAB = 96, 500
KINDS = {"full_attention_interval": 2, "layer_types": ["linear_attention", "full_attention"]}
DELTA: Dims = {"heads": 6, "kv_heads": 3, "head_dim": 32, "config": KINDS}
MIXTURE = experts(5, 3, 96)
MODELS: dict[str, tuple[str, str, Dims]] = {
    "qwen3vl": ("qwen3vl", "qwen3", {"heads": 6, "kv_heads": 3, "head_dim": 32}),
    "mixtral": ("llama", "mixtral", {"heads": 6, "kv_heads": 3, "head_dim": 32, **MIXTURE}),
    "mistral3": ("mistral3", "mistral3", {"heads": 5, "kv_heads": 1, "head_dim": 32}),
    "gemma3": ("gemma3", "gemma3_text", {"heads": 4, "kv_heads": 1, "config": {"query_pre_attn_scalar": 32}}),
    "qwen2moe": ("qwen2moe", "qwen2_moe", {"heads": 6, "kv_heads": 3, **MIXTURE}),
    "glm4moe": ("glm4moe", "glm4_moe", {"heads": 6, "kv_heads": 3, "head_dim": 32, **MIXTURE}),
    "minimax-m2": ("minimax-m2", "minimax_m2", {"heads": 6, "kv_heads": 3, "head_dim": 32, **MIXTURE}),
    "gpt-oss": ("gpt-oss", "gpt_oss", {"heads": 6, "kv_heads": 3, "inter": 96}),
    "deepseek2": ("deepseek2", "deepseek_v3", {"heads": 5, "experts": 8, "topk": 3, "moe_inter": 96}),
    "deepseek2-old": (
        "deepseek2",
        "deepseek_v3",
        {"heads": 5, "experts": 8, "topk": 3, "moe_inter": 96, "config": {"q_lora_rank": None}},
    ),
    "qwen3next": ("qwen3next", "qwen3_next", {**DELTA, **MIXTURE, **delta_nets(3, 6, 32, 64)}),
    # A block of Q4_K (256 columns) spans two value heads of 128, which are not neighbours on the hub.
    "qwen35": ("qwen35", "qwen3_5", {**DELTA, "text_alone": True, "tied": False, **delta_nets(2, 4, 32, 128)}),
    "qwen35moe": ("qwen35moe", "qwen3_5_moe", {**DELTA, "text_alone": True, **MIXTURE, **delta_nets(3, 9, 32, 32)}),
    "gemma4-26b": ("gemma4", "gemma4_text", {"heads": 4, "kv_heads": 2, "layers": 3, **MIXTURE}),
    "gemma4-e2b": ("gemma4", "gemma4_text", {"heads": 4, "kv_heads": 1, "layers": 6, "per_layer": 32}),
}
"""By name: the architecture, the family in make_tiny.py and its dimensions."""
IDS = torch.randint(0, VOCAB, (70,), generator=torch.Generator().manual_seed(0)).tolist()
"""More tokens than sliding windows and the contexts before rope scaling have."""


def make(out: Path, tmp: Path, name: str) -> tuple[Path, Path]:
    """Return a directory and a GGUF file of the same values."""
    architecture, family, dims = MODELS[name]
    usual: Dims = {"hidden": HIDDEN, "inter": 192, "vocab": VOCAB, "layers": 2}
    with mock.patch.object(tool(), "make_tokenizer", lambda *_: NoTokenizer()):
        made = make_checkpoint(family, tmp, seed=len(name), **(usual | dims))
    directory = out / name
    shutil.copytree(made, directory, ignore=shutil.ignore_patterns("*.safetensors*"))
    tensors = {n: t for file in sorted(made.glob("*.safetensors")) for n, t in load_file(file).items()}
    # gpt-oss has weights [experts, in, out], and blocks run along `in`.
    transposed = {n for n in tensors if architecture == "gpt-oss" and n.endswith(("gate_up_proj", "down_proj"))}
    tensors = {
        n: representable(n, t.transpose(1, 2)).transpose(1, 2).contiguous() if n in transposed else representable(n, t)
        for n, t in tensors.items()
    }
    others: dict[str, Any] = {}
    if name == "qwen35":
        others, tensors["model.layers.0.linear_attn.out_proj.weight"] = q4_k_output(2, 2, 128)
    save_file(tensors, directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    return directory, write(out / f"{name}.gguf", architecture, config.get("text_config", config), tensors, others)


def q4_k_output(key_heads: int, each: int, dim: int) -> tuple[dict[str, Any], Tensor]:
    """Return an output projection in Q4_K, with its columns tiled by value heads, and its values on the hub."""
    columns = key_heads * each * dim
    data = random_blocks("Q4_K", HIDDEN, columns, np.random.default_rng(0), scale=0.002)
    blocks = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(HIDDEN, -1, TYPES["Q4_K"][2])
    values = dequantise("Q4_K", blocks).view(HIDDEN, each, key_heads, dim).transpose(1, 2).reshape(HIDDEN, columns)
    return {"blk.0.ssm_out.weight": ("Q4_K", (HIDDEN, columns), data)}, values.contiguous()


def score(team: Team, *, models: list[str], out: str, ids: list[int]) -> None:
    """Write the fp32 logits of each model, from rank 0."""
    for model in models:
        worker = Worker(Path(model), team, RankConfig(dtype=torch.float32, max_total_tokens=256))
        if team.group.rank:
            worker.follow()
            continue
        np.save(f"{out}/{Path(model).name}-{team.group.size}.npy", Engine(worker).score(Prompt(ids)).numpy())
        worker.stop()


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the directory and the file of each model, and the logits of both."""
    out = tmp_path_factory.mktemp("families")
    made = [make(out, tmp_path_factory.mktemp("made"), name) for name in MODELS]
    files = [str(file) for _, file in made]
    for tp, models in ((1, [*(str(directory) for directory, _ in made), *files]), (3, files)):
        run_ranks(
            tp, "tests.runtime.gguf.test_gguf_families:score", kwargs={"models": models, "out": str(out), "ids": IDS}
        )
    return out


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_the_directory(scored: Path, name: str) -> None:
    exact = np.load(scored / f"{name}-1.npy")
    for tp in (1, 3):
        found = np.load(scored / f"{name}.gguf-{tp}.npy")
        assert np.abs(found - exact).max() <= 1e-4, tp
    kinds = [tensor.type.name for tensor in open_gguf(scored / f"{name}.gguf").tensors.values()]
    assert kinds.count("Q8_0") >= 8 and "F16" in kinds and "F32" in kinds


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize("name", ["qwen35", "deepseek2", "deepseek2-old"])
def test_blocks_are_held_as_they_are(scored: Path, name: str) -> None:
    """The second of two ranks holds exactly the values of its rows and columns, in the order of the hub."""
    card, wanted = read_card(scored / f"{name}.gguf"), load_file(scored / name / "model.safetensors")
    formats = weight_formats(card.quantization, torch.bfloat16, None)
    model = build_model(card, Sharding(1, 2, torch.bfloat16, None, formats=formats))
    checkpoint = Checkpoint(scored / f"{name}.gguf")
    load_weights(model, checkpoint, ignore=model.ignore, progress=False, quantization=card.quantization)
    held = set()
    for rectangle in model.rectangles():
        parameter = rectangle.parameter
        if type(parameter) is PackedParameter and parameter.is_quantised and rectangle.elements:
            values = parameter.packed.unpack()
            rows, columns = rectangle.index
            part = values[rectangle.row : rectangle.row + rows.stop - rows.start, : columns.stop - columns.start]
            assert torch.equal(part, wanted[rectangle.name][rectangle.index]), rectangle.name
            held.add(rectangle.name.split(".", 3)[-1])
    assert held >= {"mlp.down_proj.weight"} | ({"linear_attn.out_proj.weight"} if name == "qwen35" else set())


def test_unsupported_routers_drafts_and_missing_pieces_are_refused(scored: Path, tmp_path: Path) -> None:
    file = open_gguf(scored / "deepseek2.gguf")
    metadata: dict[str, Any] = {
        key: value for key, value in file.metadata.items() if isinstance(value, str | int | float)
    }
    tokens = {"tokenizer.ggml.tokens": ["a"] * VOCAB}
    stored = {n: (t.type.name, t.shape, t.header.data(t.description)) for n, t in file.tensors.items()}

    def card(changes: dict[str, Any], tensors: dict[str, Any]) -> Path:
        path = tmp_path / "m.gguf"
        write_gguf(path, metadata | changes | tokens, tensors)
        read_card(path)
        return path

    with pytest.raises(ConfigError, match=r"deepseek2\.expert_gating_func: expected 2 \(sigmoid\) .* found 1"):
        card({"deepseek2.expert_gating_func": 1}, stored)
    with pytest.raises(ConfigError, match=r"nextn_predict_layers: expected fewer than the 2 blocks, found 2"):
        card({"deepseek2.nextn_predict_layers": 2}, stored)
    path = card({}, {name: one for name, one in stored.items() if "attn_k_b" not in name})
    model = build_model(read_card(path), Sharding(0, 1, torch.float32, None))
    with pytest.raises(CheckpointError, match=r"the model needs tensor model\.layers\.0\.self_attn\.kv_b_proj\.weight"):
        load_weights(model, Checkpoint(path), ignore=model.ignore, progress=False)
