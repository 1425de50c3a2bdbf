"""Multi-token-prediction heads in the decoder layers of transformers, which runs those of Qwen in no other way."""

import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers.modeling_layers import MtpLayer

RENAMED = {
    "pre_fc_norm_embedding": "enorm",
    "pre_fc_norm_hidden": "hnorm",
    "fc": "eh_proj",
    "norm": "post_norm",
    "shared_head.norm": "post_norm",
}
"""The modules of Qwen's heads, and one of DeepSeek's, as transformers names them."""
PASSES = 3
"""How often the head goes on by itself."""


def drafts(model: Any, model_dir: Path, ids: Tensor) -> dict[str, Tensor]:
    """Return "draft" [tokens - 1, n], the logits of the head after each token but the first, of the n tokens that it
    drafts; "likeliest" [tokens - 1], the token of each row; and "drafts" [PASSES], the tokens that it drafts after the
    last one. Nothing for a checkpoint without a head.

    Row p comes from the model's last norm of token p and the embedding of token p + 1.
    """
    tensors = head_tensors(model, model_dir)
    if not tensors or model.config.model_type == "minimax_m2":  # whose heads are not used
        return {}
    head, (weight, tokens), decoder = load_head(model, tensors), output_head(model, tensors), model.get_decoder()
    following = ids[1:]
    hidden = model(ids[None], output_hidden_states=True).hidden_states[-1][0, :-1]
    logits, drafted = [], list[Tensor]()
    for _ in range(PASSES):
        embedded = model.get_input_embeddings()(following)[None]
        positions = torch.arange(len(following))[None]
        last = head(embedded, hidden[None], decoder.rotary_emb(embedded, positions), None, positions, None)[0]
        logits.append(last @ weight.T)
        drafted.append(tokens[logits[-1][-1].argmax()])
        following, hidden = torch.cat([following, drafted[-1][None]]), torch.cat([hidden, last[-1:]])
    return {"draft": logits[0], "likeliest": tokens[logits[0].argmax(-1)], "drafts": torch.stack(drafted)}


def head_tensors(model: Any, model_dir: Path) -> dict[str, Tensor]:
    """Return the tensors of the head, by their names in it."""
    last = f"model.layers.{len(model.get_decoder().layers)}."
    stored = {name: x for file in model_dir.glob("*.safetensors") for name, x in load_file(file).items()}
    tensors = {name.removeprefix("mtp."): x for name, x in stored.items() if name.startswith("mtp.")}
    tensors = {name.removeprefix("layers.0."): x for name, x in tensors.items()}
    return tensors | {name.removeprefix(last): x for name, x in stored.items() if name.startswith(last)}


def output_head(model: Any, tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the weight [n, hidden] that gives the logits of drafts, and the token [n] of each row."""
    if "d2t" not in tensors:
        return model.lm_head.weight, torch.arange(len(model.lm_head.weight))
    return tensors["shared_head.head.weight"].float(), torch.arange(len(tensors["d2t"])) + tensors["d2t"]


def load_head(model: Any, tensors: dict[str, Tensor]) -> MtpLayer:
    """Return the head with its weights."""
    decoder = model.get_decoder()
    number, layer = next(
        (i, one) for i, one in reversed(list(enumerate(decoder.layers))) if hasattr(one, "self_attn")
    )
    head = MtpLayer(decoder.config, type(layer), type(layer.input_layernorm), number).eval()
    own = {name.partition(".")[0] for name, _ in head.named_parameters()} - {"mtp_block"}
    renamed = {}
    for name, x in fused(tensors).items():
        module, _, parameter = name.rpartition(".")
        module = RENAMED.get(module, module)
        if module not in ("embed_tokens", "shared_head.head") and name != "d2t":
            renamed[f"{module}.{parameter}" if module in own else f"mtp_block.{module}.{parameter}"] = x.float()
    head.load_state_dict(renamed)
    return head


def fused(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors with those of single experts in one, as transformers 5 has them."""
    parts: dict[str, dict[int, Tensor]] = {}
    whole = {}
    for name, x in tensors.items():
        if found := re.fullmatch(r"mlp\.experts\.(\d+)\.(\w+)\.weight", name):
            parts.setdefault(found[2], {})[int(found[1])] = x
        else:
            whole[name] = x
    if parts:
        gate, up, down = (
            torch.stack([x for _, x in sorted(parts[name].items())]) for name in ("gate_proj", "up_proj", "down_proj")
        )
        whole |= {"mlp.experts.gate_up_proj": torch.cat([gate, up], 1), "mlp.experts.down_proj": down}
    return whole
