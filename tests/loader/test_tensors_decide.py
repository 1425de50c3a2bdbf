"""Where files and flags of config.json differ, the tensors decide: ties, biases, dtypes, unread fields."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from model_configs import LLAMA, write_config
from safetensors.torch import load_file, save_file
from tiny import make_checkpoint
from torch import Tensor

from tilerank.loader.card import read_card
from tilerank.loader.checkpoint import SINGLE, Checkpoint
from tilerank.loader.errors import CheckpointError, ConfigError
from tilerank.loader.tied_head import tied_module
from tilerank.loader.weights import load_weights
from tilerank.parallel.sharding import Sharding
from tilerank.runtime.models.attention import SelfAttention
from tilerank.runtime.models.decoder import Decoder
from tilerank.runtime.rank.registry import build_model, read_supported_card

EMBEDDING, HEAD = "model.embed_tokens", "lm_head"
SMALL = {"hidden": 64, "heads": 4, "kv_heads": 2, "inter": 96, "layers": 2, "vocab": 300, "shards": 1}

Tensors = dict[str, Tensor]
Write = Callable[[dict[str, Any], Callable[[Tensors], object]], tuple[Path, Tensors]]


@pytest.fixture
def write(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> Write:
    """Return what writes a tiny Llama with other settings and other tensors."""

    def write(changes: dict[str, Any], change: Callable[[Tensors], object]) -> tuple[Path, Tensors]:
        made = make_checkpoint("llama3", tmp_path_factory.mktemp("llama"), tied=False, **SMALL)
        out = tmp_path / "model"
        shutil.copytree(made, out, ignore=shutil.ignore_patterns("*.safetensors*"))
        tensors = {name: tensor for path in made.glob("*.safetensors") for name, tensor in load_file(path).items()}
        change(tensors)
        save_file(tensors, out / SINGLE, metadata={"format": "pt"})
        config = json.loads((made / "config.json").read_text())
        (out / "config.json").write_text(json.dumps(config | changes))
        return out, tensors

    return write


def load(model_dir: Path) -> Decoder:
    card = read_card(model_dir)
    model = build_model(card, Sharding(0, 1, torch.float32, None))
    load_weights(model, Checkpoint(model_dir), ignore=model.ignore, progress=True)
    assert isinstance(model, Decoder)
    return model


def logits_and_rows(model: Decoder) -> tuple[Tensor, Tensor]:
    """Return the head's products with unit vectors, which are its weight, and the embedding of every token."""
    head = model.head(torch.eye(64)).T
    return head, model.embedding(torch.arange(head.shape[0]))


def test_a_head_of_other_values_counts(write: Write) -> None:
    def change(tensors: Tensors) -> None:
        tensors[f"{HEAD}.weight"] = torch.randn_like(tensors[f"{EMBEDDING}.weight"])

    model_dir, tensors = write({"tie_word_embeddings": True}, change)
    head, rows = logits_and_rows(load(model_dir))
    torch.testing.assert_close(head, tensors[f"{HEAD}.weight"].float())
    torch.testing.assert_close(rows, tensors[f"{EMBEDDING}.weight"].float())


@pytest.mark.parametrize("stored", ["both", "embedding", "head"])
def test_an_equal_head_is_held_once(write: Write, stored: str) -> None:
    def change(tensors: Tensors) -> None:
        table = tensors.pop(f"{EMBEDDING}.weight")
        del tensors[f"{HEAD}.weight"]
        tensors |= {f"{EMBEDDING}.weight": table} if stored != "head" else {}
        tensors |= {f"{HEAD}.weight": table.clone()} if stored != "embedding" else {}

    model_dir, tensors = write({"tie_word_embeddings": True}, change)
    name = HEAD if stored == "head" else EMBEDDING
    assert tied_module(model_dir, EMBEDDING, HEAD, announced=True) == name
    assert tied_module(model_dir, EMBEDDING, HEAD, announced=False) is None
    head, rows = logits_and_rows(load(model_dir))
    torch.testing.assert_close(head, tensors[f"{name}.weight"].float())
    torch.testing.assert_close(rows, tensors[f"{name}.weight"].float())


def test_the_flag_decides_without_files(tmp_path: Path) -> None:
    assert tied_module(tmp_path, EMBEDDING, HEAD, announced=True) == EMBEDDING
    assert tied_module(tmp_path, EMBEDDING, HEAD, announced=False) is None


def test_biases_that_are_announced_and_missing_are_zeros(write: Write, caplog: pytest.LogCaptureFixture) -> None:
    """As in Llama files that were made from Qwen2, whose q, k and v alone have biases."""

    def change(tensors: Tensors) -> None:
        names = [name for name in tensors if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))]
        biases = {name.replace("weight", "bias"): torch.full((len(tensors[name]),), 0.5) for name in names}
        tensors |= biases

    model_dir, _ = write({"attention_bias": True, "mlp_bias": True}, change)
    with caplog.at_level("INFO", "tilerank.loader.weights"):
        model = load(model_dir)
    assert "in no file, and taken as zeros: model.layers.0.mlp.down_proj.bias (and 7 more)" in caplog.text
    attention = model.layers[0].mixer
    assert isinstance(attention, SelfAttention)
    of_heads, of_output = attention.qkv.stacks[0].bias, attention.out.bias
    assert of_heads is not None and of_heads.data.eq(0.5).all()
    assert of_output is not None and not of_output.data.any()


def with_biases(value: float, *modules: str) -> Callable[[Tensors], object]:
    """Return what adds biases of one value to the modules with these names."""

    def change(tensors: Tensors) -> None:
        ends = tuple(f"{module}.weight" for module in modules)
        names = [name for name in tensors if name.endswith(ends) and "layers.1" in name]
        tensors |= {name.replace("weight", "bias"): torch.full((len(tensors[name]),), value) for name in names}

    return change


def test_biases_that_config_denies_are_used(write: Write) -> None:
    """Where the checkpoint has some of them, the others are zeros, as where they are announced."""
    model_dir, _ = write({"attention_bias": False, "mlp_bias": False}, with_biases(0.5, "q_proj", "down_proj"))
    card = read_card(model_dir)
    assert [note.partition(": ")[2] for note in card.overruled] == [
        "attention_bias is false, but the checkpoint has model.layers.1.self_attn.q_proj.bias; its biases are used",
        "mlp_bias is false, but the checkpoint has model.layers.1.mlp.down_proj.bias; its biases are used",
    ]
    first, second = (layer for layer in load(model_dir).layers)
    assert isinstance(first.mixer, SelfAttention) and isinstance(second.mixer, SelfAttention)
    biases = [layer.qkv.stacks[0].bias for layer in (first.mixer, second.mixer)]
    assert biases[0] is not None and not biases[0].data.any()
    assert biases[1] is not None and second.mixer.out.bias is not None
    queries = 64  # the rows of q
    assert biases[1].data.flatten()[:queries].eq(0.5).all() and not second.mixer.out.bias.data.any()


def test_biases_of_zeros_have_no_effect(write: Write) -> None:
    model_dir, _ = write({"attention_bias": False}, with_biases(0.0, "q_proj", "down_proj"))
    assert read_card(model_dir).overruled == ()
    attention = load(model_dir).layers[1].mixer
    assert isinstance(attention, SelfAttention) and attention.qkv.stacks[0].bias is None


def test_other_biases_without_a_place_are_refused(write: Write) -> None:
    """No family has them, so that no flag does either."""
    model_dir, _ = write({}, with_biases(0.5, "input_layernorm"))
    with pytest.raises(CheckpointError, match=r"no place for tensor model\.layers\.1\.input_layernorm\.bias"):
        load(model_dir)


@pytest.mark.parametrize("flag", [False, None])
def test_without_a_head_the_embedding_is_the_head(write: Write, flag: bool | None) -> None:
    model_dir, tensors = write({"tie_word_embeddings": flag}, lambda tensors: tensors.pop(f"{HEAD}.weight"))
    (note,) = read_card(model_dir).overruled
    assert note.endswith("tie_word_embeddings is not true, but no file has lm_head; the embedding is the head")
    head, rows = logits_and_rows(load(model_dir))
    torch.testing.assert_close(head, tensors[f"{EMBEDDING}.weight"].float())
    torch.testing.assert_close(rows, tensors[f"{EMBEDDING}.weight"].float())


def test_any_other_missing_tensor_is_refused(write: Write) -> None:
    name = "model.layers.1.self_attn.q_proj.weight"
    model_dir, _ = write({"attention_bias": True}, lambda tensors: tensors.pop(name))
    with pytest.raises(CheckpointError, match=f"the model needs tensor {name}"):
        load(model_dir)


def test_the_dtype_of_most_tensors_counts_where_config_has_none(tmp_path: Path) -> None:
    silent = {key: value for key, value in LLAMA.items() if key not in ("dtype", "torch_dtype")}
    (tmp_path / "config.json").write_text(json.dumps(silent))
    assert read_card(tmp_path).dtype == "bfloat16"
    tensors = {"a": torch.ones(2).half(), "b": torch.ones(2).half(), "c": torch.ones(2)}
    save_file(tensors, tmp_path / SINGLE)
    assert read_card(tmp_path).dtype == "float16"


def test_infinity_is_refused_only_where_it_counts(tmp_path: Path) -> None:
    write_config(tmp_path, {"time_step_limit": [0.0, float("inf")], "unused": float("nan")})
    assert read_card(tmp_path).vocab_size == LLAMA["vocab_size"]
    write_config(tmp_path, {"time_step_limit": [0.0, float("inf")], "model_type": "mamba2"})
    with pytest.raises(ConfigError, match=r"model_type: expected one of .*, found 'mamba2'"):
        read_supported_card(tmp_path)
    for value in (float("inf"), float("nan")):
        write_config(tmp_path, {"rms_norm_eps": value})
        with pytest.raises(ConfigError, match="rms_norm_eps: expected a number above 0, at most 1, found"):
            build_model(read_supported_card(tmp_path), Sharding(0, 1, torch.float32, None))
