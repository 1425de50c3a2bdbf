"""Checkpoints of random weights in the shape of public models."""

import argparse
import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from batching import single_engine
from command import DEMO
from safetensors import safe_open

from tilerank.launch import cli
from tilerank.launch.bench import make_model
from tilerank.launch.bench.media_inputs import Clip, MediaPrompts
from tilerank.launch.bench.public import PUBLIC_MODELS, public_config, public_processor
from tilerank.launch.errors import LaunchError
from tilerank.loader.card import read_card
from tilerank.loader.checkpoint import Checkpoint
from tilerank.loader.random_weights import write_random_weights
from tilerank.loader.tokenizer import Tokenizer
from tilerank.runtime.models import qwen_moe
from tilerank.runtime.protocol.prompt import Prompt


def test_shards_do_not_exceed_shard_bytes(tmp_path: Path) -> None:
    shapes = {"a.weight": (4, 8), "b.weight": (4, 8), "norm.weight": (8,), "c.weight": (40, 8), "c.bias": (40,)}
    assert write_random_weights(tmp_path, shapes, shard_bytes=160) == 2 * sum(map(math.prod, shapes.values()))
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = [index["weight_map"][name].partition("-of-")[0] for name in shapes]
    assert files == ["model-00001", "model-00001", "model-00001", "model-00002", "model-00003"]
    assert {name: info.shape for name, info in Checkpoint(tmp_path).tensors.items()} == shapes
    with safe_open(tmp_path / index["weight_map"]["a.weight"], "pt") as first:
        assert not torch.equal(first.get_tensor("a.weight"), first.get_tensor("b.weight"))
        assert torch.equal(first.get_tensor("norm.weight"), torch.ones(8, dtype=torch.bfloat16))


def test_tokens_of_a_random_moe_model_choose_different_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every layer, 24 tokens choose about as many of 64 experts as random choices would. If attention outweighed the
    token embeddings, all tokens would choose the same experts."""
    like = "qwen3-30b-a3b"
    sizes = {"hidden_size": 512, "moe_intermediate_size": 32, "num_experts": 64, "num_experts_per_tok": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    imitate(monkeypatch, like, public_config(like) | {"vocab_size": 4200} | sizes)
    out = tmp_path / "made"
    assert cli.main(["bench", "make-model", str(out), "--like", like, "--layers", "3"]) == 0
    experts_per_layer = []

    def spy(logits: torch.Tensor, top_k: int, *, renormalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids = logits.float().softmax(-1).topk(top_k)
        experts_per_layer.append(len(set(ids.flatten().tolist())))
        return ids.int(), weights / weights.sum(-1, keepdim=True)

    monkeypatch.setattr(qwen_moe, "softmax_top_k", spy)
    ids = torch.randperm(4200, generator=torch.Generator().manual_seed(0))[:24].tolist()
    single_engine(out, dtype=torch.float32, max_total_tokens=64, eager=True).score(Prompt(ids))
    assert len(experts_per_layer) == 3 and min(experts_per_layer) >= 26  # expected by chance: 64 (1 - (62/64)^24) = 34


def imitate(monkeypatch: pytest.MonkeyPatch, like: str, config: dict[str, Any]) -> None:
    """Let `make-model --like` take `config` for that of the public model `like`."""
    monkeypatch.setattr(
        make_model, "public_config", lambda name: copy.deepcopy(config) if name == like else public_config(name)
    )


def score(model_dir: Path, ids: list[int]) -> torch.Tensor:
    return single_engine(model_dir, dtype=torch.float32, max_total_tokens=64).score(Prompt(ids))


def transformers_score(model_dir: Path, ids: list[int]) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([ids]), use_cache=False).logits[0]
    return logits


def load_whole(model_class: Any, model_dir: Path) -> Any:
    """Return the model of transformers, which finds each of its tensors in the checkpoint and no others."""
    model, loading = model_class.from_pretrained(model_dir, dtype=torch.float32, output_loading_info=True)
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model


SMALL: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "num_experts": 12,
    "num_hidden_layers": 2,
    "vocab_size": 4200,
    "kv_lora_rank": 64,
    "q_lora_rank": 48,
}


COMPARED = [name for name in PUBLIC_MODELS if not public_config(name).keys() & {"vision_config", "thinker_config"}]


@pytest.mark.parametrize("like", COMPARED)
def test_transformers_gives_a_random_model_the_same_logits(
    like: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = public_config(like)
    imitate(monkeypatch, like, config | {name: size for name, size in SMALL.items() if name in config})
    out = tmp_path / "made"
    experts = ["--experts", "16"] if "n_routed_experts" in public_config(like) else []
    assert cli.main(["bench", "make-model", str(out), "--like", like, "--layers", "1", *experts]) == 0
    assert "1 layers" in capsys.readouterr().out and list(tmp_path.iterdir()) == [out]
    assert read_card(out).eos_token_ids == read_card(DEMO).eos_token_ids
    ids = [5, 4199, 0, 77]
    assert torch.allclose(score(out, ids), transformers_score(out, ids), atol=1e-4)


def test_a_mixture_may_have_fewer_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """The 8 experts of a token are from 4 of 8 groups, so that 16 is the least. Layers of both kinds are kept."""
    imitate(monkeypatch, "deepseek-v3.1", public_config("deepseek-v3.1") | SMALL)
    make = ["bench", "make-model", str(tmp_path / "made"), "--like", "deepseek-v3.1", "--layers", "2", "--experts"]
    for experts in ("8", "20", "257"):
        assert cli.main([*make, experts]) == 1
        assert f"--experts: expected 16 to 256 in multiples of 8 for deepseek-v3.1, found {experts}" in (
            capsys.readouterr().err
        )
    assert cli.main([*make, "16"]) == 0
    config = json.loads((tmp_path / "made" / "config.json").read_text())
    assert (config["n_routed_experts"], config["first_k_dense_replace"]) == (16, 1)
    ids = [5, 4199, 0, 77]
    assert torch.allclose(score(tmp_path / "made", ids), transformers_score(tmp_path / "made", ids), atol=1e-4)
    assert cli.main(["bench", "make-model", str(tmp_path / "b"), "--like", "qwen3-8b", "--experts", "8"]) == 1
    assert "--experts: expected a mixture of experts, found qwen3-8b" in capsys.readouterr().err


def tiny_vision_config(like: str) -> dict[str, Any]:
    config = public_config(like)
    config["text_config"] |= {"hidden_size": 96, "intermediate_size": 128, "vocab_size": 600}
    config["text_config"] |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 5}
    config["vision_config"] |= {"hidden_size": 64, "num_heads": 4, "intermediate_size": 72, "out_hidden_size": 96}
    return config


@pytest.mark.parametrize("like", ["qwen3-vl-2b", "qwen3-vl-8b"])
def test_transformers_reads_a_random_vision_model(
    like: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import Qwen3VLForConditionalGeneration

    imitate(monkeypatch, like, tiny_vision_config(like))
    out = tmp_path / "made"
    assert cli.main(["bench", "make-model", str(out), "--like", like, "--layers", "4", "--vision-layers", "6"]) == 0
    assert "4 layers and 6 of the vision tower" in capsys.readouterr().out
    # The public towers have levels after layers 6, 12 and 18 of 24, or 9, 17 and 25 of 27.
    config = json.loads((out / "config.json").read_text())
    assert config["vision_config"]["deepstack_visual_indexes"] == {"2b": [0, 2, 3], "8b": [1, 2, 4]}[like[-2:]]
    model = load_whole(Qwen3VLForConditionalGeneration, out)
    ids = [5, 480, 0, 77]
    with torch.inference_mode():
        theirs = model(torch.tensor([ids])).logits[0]
    assert torch.allclose(score(out, ids), theirs, atol=1e-4)
    assert read_card(out).eos_token_ids == (486,)


@pytest.mark.parametrize("like", ["qwen3.5-2b", "qwen3.5-35b-a3b"])
def test_transformers_reads_a_random_model_of_delta_nets(
    like: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForImageTextToText

    config = tiny_vision_config(like)
    config["text_config"] |= {"head_dim": 64, "linear_num_key_heads": 4, "linear_num_value_heads": 8}
    config["text_config"]["rope_parameters"] |= {"mrope_section": [4, 2, 2]}
    config["text_config"] |= {"moe_intermediate_size": 64, "num_experts": 12, "shared_expert_intermediate_size": 64}
    imitate(monkeypatch, like, config)
    out = tmp_path / "made"
    assert cli.main(["bench", "make-model", str(out), "--like", like, "--layers", "4", "--vision-layers", "2"]) == 0
    model = load_whole(AutoModelForImageTextToText, out)
    ids = [5, 480, 0, 77]
    with torch.inference_mode():
        theirs = model(torch.tensor([ids])).logits[0]
    assert torch.allclose(score(out, ids), theirs, atol=1e-4)


def test_transformers_reads_a_random_model_that_hears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import Qwen3OmniMoeForConditionalGeneration

    like = "qwen3-omni-30b-a3b"
    config = public_config(like)
    thinker = config["thinker_config"]
    thinker["text_config"] |= {"hidden_size": 96, "moe_intermediate_size": 64, "vocab_size": 600, "head_dim": 32}
    thinker["text_config"] |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    thinker["text_config"]["rope_scaling"]["mrope_section"] = [6, 5, 5]
    thinker["vision_config"] |= {"hidden_size": 64, "num_heads": 4, "intermediate_size": 72, "out_hidden_size": 96}
    thinker["audio_config"] |= {"d_model": 64, "encoder_attention_heads": 4, "encoder_ffn_dim": 96, "output_dim": 96}
    thinker["audio_config"] |= {"encoder_layers": 2, "downsample_hidden_size": 24}
    imitate(monkeypatch, like, config)
    out = tmp_path / "made"
    layers = ("--layers", "2", "--vision-layers", "2", "--experts", "8")
    assert cli.main(["bench", "make-model", str(out), "--like", like, *layers]) == 0
    model = load_whole(Qwen3OmniMoeForConditionalGeneration, out)
    ids = [5, 480, 0, 77]
    with torch.inference_mode():
        theirs = model.thinker(torch.tensor([ids])).logits[0]
    assert torch.allclose(score(out, ids), theirs, atol=1e-4)
    assert read_card(out).eos_token_ids == (486,)
    prompts = MediaPrompts(out)
    assert prompts.grid(Clip(2)) == (200, 1, 1) and prompts.tokens_before(Clip(2)) > 26


def test_a_talker_has_layers_that_go_with_those_of_the_text(tmp_path: Path) -> None:
    """With tensors of the talker and of code2wav, by the headers of the public release."""
    args = argparse.Namespace(like="qwen3-omni-30b-a3b-instruct", layers=4, vision_layers=None, experts=None)
    config = public_config(args.like)
    make_model._set_layers(config, args)
    talker = config["talker_config"]
    assert (talker["accept_hidden_layer"], talker["text_config"]["num_hidden_layers"]) == (3, 4)
    assert config["thinker_config"]["vision_config"]["deepstack_visual_indexes"] == [8, 16]
    make_model._copy_tokenizer(tmp_path, config, public_processor(config["model_type"]))
    (tmp_path / "config.json").write_text(json.dumps(config))
    turn = Tokenizer(tmp_path).encode("<|im_start|>user\n")
    assert [config["im_start_token_id"], config["user_token_id"]] == turn[:2]
    assert talker["audio_token_id"] == config["thinker_config"]["audio_token_id"] < 500
    shapes = make_model._shapes(tmp_path)
    assert shapes["talker.model.layers.3.mlp.shared_expert.gate_proj.weight"] == (768, 1024)
    assert shapes["talker.code_predictor.lm_head.14.weight"] == (2048, 1024)
    assert shapes["code2wav.code_embedding.weight"] == (16 * 2048, 1024)
    assert shapes["code2wav.decoder.1.block.1.conv.weight"] == (1536, 768, 16)
    assert shapes["code2wav.decoder.4.block.4.conv1.conv.weight"] == (96, 96, 7)
    assert shapes["code2wav.decoder.6.conv.weight"] == (1, 96, 7)
    args.layers = 1
    with pytest.raises(LaunchError, match="--layers: expected at least 2"):
        make_model._set_layers(public_config(args.like), args)


def test_a_text_of_few_layers_has_fewer_levels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    imitate(monkeypatch, "qwen3-vl-2b", tiny_vision_config("qwen3-vl-2b"))
    assert cli.main(["bench", "make-model", str(tmp_path / "made"), "--like", "qwen3-vl-2b", "--layers", "2"]) == 0
    config = json.loads((tmp_path / "made" / "config.json").read_text())
    assert config["vision_config"]["deepstack_visual_indexes"] == [5]


def test_a_tokenizer_larger_than_the_vocabulary_is_not_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = public_config("qwen3-0.6b") | SMALL | {"vocab_size": 4095, "bos_token_id": 1, "eos_token_id": 2}
    imitate(monkeypatch, "qwen3-0.6b", tiny)
    assert cli.main(["bench", "make-model", str(tmp_path / "made"), "--like", "qwen3-0.6b"]) == 0
    assert "no tokenizer" in capsys.readouterr().out and not (tmp_path / "made" / "tokenizer.json").exists()


def test_a_failed_checkpoint_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    imitate(monkeypatch, "qwen3-0.6b", {"model_type": "unheard-of", "num_hidden_layers": 1, "vocab_size": 1})
    assert cli.main(["bench", "make-model", str(tmp_path / "made"), "--like", "qwen3-0.6b"]) == 1
    assert list(tmp_path.iterdir()) == []
