"""Tiny models that embed texts or score pairs, in the layout of the released ones, and what is right for them.

The right vectors come from the hidden states of transformers, pooled in plain torch as sentence-transformers does.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny import make_checkpoint

MODES = ("cls", "max", "mean", "mean_sqrt_len", "weightedmean", "lasttoken")
KINDS = "sentence_transformers.models."


def write_modules(model_dir: Path, *modules: tuple[str, str, dict[str, Any]]) -> None:
    """Write modules.json and the settings of each module after the transformer: its class, its folder, its config."""
    listed = [{"idx": 0, "name": "0", "path": "", "type": f"{KINDS}Transformer"}]
    for index, (kind, folder, config) in enumerate(modules, 1):
        listed.append({"idx": index, "name": str(index), "path": folder, "type": f"{KINDS}{kind}"})
        if config:
            (model_dir / folder).mkdir(exist_ok=True)
            (model_dir / folder / "config.json").write_text(json.dumps(config))
    (model_dir / "modules.json").write_text(json.dumps(listed))


def convert(made: Path, out: Path, *, base: bool, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Copy a checkpoint, with other fields of config.json. base: with the layers alone, without their prefix. Returns
    its tensors."""
    shutil.copytree(made, out, ignore=shutil.ignore_patterns("*.safetensors*"))
    tensors: dict[str, torch.Tensor] = {}
    for file in made.glob("*.safetensors"):
        tensors |= load_file(file)
    if base:
        tensors = {name.removeprefix("model."): x for name, x in tensors.items() if name.startswith("model.")}
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    (out / "config.json").write_text(json.dumps(json.loads((out / "config.json").read_text()) | config))
    return tensors


def make_models(out: Path) -> None:
    """Write the models: `last` as Qwen3-Embedding, `both-sides` as EmbeddingGemma, `all-modes` with a head that is not
    used, and rerankers that are `labelled` or `scored` by tokens."""
    torch.manual_seed(0)
    dims = {"heads": 6, "kv_heads": 3, "head_dim": 24, "hidden": 96, "inter": 200, "vocab": 777, "layers": 3}
    qwen = make_checkpoint("qwen3", out, 1, **dims)
    convert(qwen, out / "last", base=True, config={})
    pooling = {"word_embedding_dimension": 96, "pooling_mode_lasttoken": True, "include_prompt": True}
    write_modules(out / "last", ("Pooling", "1_Pooling", pooling), ("Normalize", "2_Normalize", {}))

    gemma = make_checkpoint("gemma3_text", out, 2, hidden=96, vocab=700)
    config = {"architectures": ["Gemma3TextModel"], "use_bidirectional_attention": True, "sliding_window": 12}
    convert(gemma, out / "both-sides", base=True, config=config)
    wide: dict[str, Any] = {"in_features": 96, "out_features": 130, "bias": False}
    narrow: dict[str, Any] = {"in_features": 130, "out_features": 96}
    write_modules(
        out / "both-sides",
        ("Pooling", "1_Pooling", {"word_embedding_dimension": 96, "pooling_mode_mean_tokens": True}),
        ("Dense", "2_Dense", wide | {"activation_function": "torch.nn.modules.linear.Identity"}),
        ("Dense", "3_Dense", narrow),
        ("Normalize", "4_Normalize", {}),
    )
    weights = {"linear.weight": torch.randn(130, 96) / 10}
    save_file(weights, out / "both-sides" / "2_Dense" / "model.safetensors")
    weights = {"linear.weight": torch.randn(96, 130) / 10, "linear.bias": torch.randn(96)}
    save_file(weights, out / "both-sides" / "3_Dense" / "model.safetensors")

    llama = make_checkpoint("llama3", out, 3, heads=4, kv_heads=2, head_dim=16, hidden=64, vocab=500, layers=2)
    convert(llama, out / "all-modes", base=False, config={})
    write_modules(out / "all-modes", ("Pooling", "1_Pooling", {"embedding_dimension": 64, "pooling_mode": list(MODES)}))

    tensors = convert(qwen, out / "labelled", base=False, config={"architectures": ["Qwen3ForSequenceClassification"]})
    tensors["score.weight"] = torch.randn(1, 96).bfloat16()
    save_file(tensors, out / "labelled" / "model.safetensors", {"format": "pt"})
    convert(qwen, out / "scored", base=False, config={})
    write_modules(out / "scored", ("LogitScore", "1_LogitScore", {"true_token_id": 41, "false_token_id": 600}))


@torch.inference_mode()
def right_values(model_dir: Path, texts: list[list[int]]) -> list[torch.Tensor]:
    """Return the vector or score of each text, in fp32."""
    from transformers import AutoModel, AutoModelForCausalLM

    kind = model_dir.name
    if kind == "scored":
        whole: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        logits = [whole(torch.tensor([ids])).logits[0, -1] for ids in texts]
        return [(row[41] - row[600])[None] for row in logits]
    model: Any = AutoModel.from_pretrained(model_dir, dtype=torch.float32)
    states = [model(torch.tensor([ids])).last_hidden_state[0] for ids in texts]
    normalize: Callable[..., torch.Tensor] = torch.nn.functional.normalize
    if kind == "last":
        return [normalize(rows[-1], dim=0) for rows in states]
    if kind == "labelled":
        score = load_file(model_dir / "model.safetensors")["score.weight"].float()
        return [score @ rows[-1] for rows in states]
    if kind == "both-sides":
        wide, narrow = (load_file(model_dir / name / "model.safetensors") for name in ("2_Dense", "3_Dense"))
        means = [wide["linear.weight"] @ rows.mean(0) for rows in states]
        dense = [torch.tanh(narrow["linear.weight"] @ mean + narrow["linear.bias"]) for mean in means]
        return [normalize(vector, dim=0) for vector in dense]
    return [torch.cat([_pooled(rows, mode) for mode in MODES]) for rows in states]


def _pooled(rows: torch.Tensor, mode: str) -> torch.Tensor:
    count = len(rows)
    weights = torch.arange(1.0, count + 1)
    found: dict[str, torch.Tensor] = {
        "cls": rows[0],
        "max": rows.max(0).values,
        "mean": rows.sum(0) / count,
        "mean_sqrt_len": rows.sum(0) / count**0.5,
        "weightedmean": (rows * weights[:, None]).sum(0) / weights.sum(),
        "lasttoken": rows[-1],
    }
    return found[mode]
