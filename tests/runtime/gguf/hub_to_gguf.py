"""Writes checkpoints of the hub as GGUF files, with the names, orders and metadata of llama.cpp's converter."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tests.loader.gguf_files import write_gguf
from tests.runtime.gguf.hub_fields import Fields, metadata_of

Tensors = dict[str, Tensor]

_COMMON = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_EXPERTS = {
    "mlp.gate": "ffn_gate_inp",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    **{f"mlp.experts.{name}_proj": f"ffn_{name}_exps" for name in ("gate", "up", "down")},
    **{f"mlp.shared_experts.{name}_proj": f"ffn_{name}_shexp" for name in ("gate", "up", "down")},
    **{f"mlp.shared_expert.{name}_proj": f"ffn_{name}_shexp" for name in ("gate", "up", "down")},
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}
_POST_NORM = {"post_attention_layernorm": "post_attention_norm"}
_GEMMA = _POST_NORM | {"pre_feedforward_layernorm": "ffn_norm", "post_feedforward_layernorm": "post_ffw_norm"}
_DELTA = _POST_NORM | {
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
}
_NAMES: dict[str, dict[str, str]] = {
    "qwen3vl": {"self_attn.qkv": "attn_qkv"},
    "qwen3vlmoe": _EXPERTS,
    "llama": _EXPERTS,
    "mistral3": {},
    "gemma3": _GEMMA,
    "qwen2moe": _EXPERTS,
    "glm4moe": _POST_NORM
    | _EXPERTS
    | {"eh_proj": "nextn.eh_proj", "enorm": "nextn.enorm", "hnorm": "nextn.hnorm"}
    | {"shared_head.norm": "nextn.shared_head_norm"},
    "minimax-m2": _EXPERTS,
    "gpt-oss": _POST_NORM
    | _EXPERTS
    | {"mlp.router": "ffn_gate_inp", "self_attn.sinks": "attn_sinks.weight"}
    | {f"mlp.experts.{name}_proj_bias": f"ffn_{name}_exps.bias" for name in ("gate", "up", "down")},
    "deepseek2": _EXPERTS
    | {
        "self_attn.q_a_proj": "attn_q_a",
        "self_attn.q_a_layernorm": "attn_q_a_norm",
        "self_attn.q_b_proj": "attn_q_b",
        "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
        "self_attn.kv_a_layernorm": "attn_kv_a_norm",
        "self_attn.kv_b_proj": "attn_kv_b",
        "self_attn.k_b_proj": "attn_k_b",
        "self_attn.v_b_proj": "attn_v_b",
    },
    "qwen3next": _EXPERTS | _DELTA,
    "qwen35": _DELTA,
    "qwen35moe": _EXPERTS | _DELTA,
    "gemma4": _GEMMA
    | {
        "layer_scalar": "layer_output_scale.weight",
        "per_layer_input_gate": "inp_gate",
        "per_layer_projection": "proj",
        "post_per_layer_input_norm": "post_norm",
        "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
        "post_feedforward_layernorm_1": "post_ffw_norm_1",
        "post_feedforward_layernorm_2": "post_ffw_norm_2",
        "router.proj": "ffn_gate_inp",
        "router.scale": "ffn_gate_inp.scale",
        "router.per_expert_scale": "ffn_down_exps.scale",
        "experts.gate_up_proj": "ffn_gate_up_exps.weight",
        "experts.down_proj": "ffn_down_exps.weight",
    },
}
_TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "model.embed_tokens_per_layer.weight": "per_layer_token_embd.weight",
    "model.per_layer_model_projection.weight": "per_layer_model_proj.weight",
    "model.per_layer_projection_norm.weight": "per_layer_proj_norm.weight",
}


def _stacked(tensors: Tensors) -> Tensors:
    """Return all tensors, with those of single experts stacked to [experts, out, in]."""
    found, experts = Tensors(), dict[str, dict[int, Tensor]]()
    for name, tensor in tensors.items():
        part = re.fullmatch(r"(.*\.experts\.)(\d+)\.(.*)", name)
        if part is None:
            found[name] = tensor
        else:
            experts.setdefault(part[1] + part[3], {})[int(part[2])] = tensor
    return found | {name: torch.stack([each[i] for i in range(len(each))]) for name, each in experts.items()}


def _split_gate_up(tensors: Tensors) -> Tensors:
    """Return all tensors, with gate_up_proj [experts, gate then up, in] split into gate_proj and up_proj."""
    found = Tensors()
    for name, tensor in tensors.items():
        if name.endswith("experts.gate_up_proj"):
            for part, half in zip(("gate_proj", "up_proj"), tensor.chunk(2, 1), strict=True):
                found[name.replace("gate_up_proj", part) + ".weight"] = half
        elif name.endswith("experts.down_proj"):
            found[f"{name}.weight"] = tensor
        else:
            found[name] = tensor
    return found


def _split_interleaved(tensors: Tensors) -> Tensors:
    """Return all tensors, with the experts of gpt-oss as the file has them.

    gate_up_proj interleaves gate and up and is split; weights [experts, in, out] are transposed.
    """
    found = Tensors()
    for name, tensor in tensors.items():
        before, is_bias = name.removesuffix("_bias").removesuffix("_proj"), name.endswith("_bias")
        if "experts." not in name:
            found[name] = tensor
            continue
        whole = tensor if is_bias else tensor.transpose(1, 2)
        parts = {"down": whole} if before.endswith("down") else {"gate": whole[:, 0::2], "up": whole[:, 1::2]}
        for part, rows in parts.items():
            found[f"{before.rpartition('.')[0]}.{part}_proj{'_bias' if is_bias else '.weight'}"] = rows
    return found


def _pair_rows(tensors: Tensors, fields: Fields) -> Tensors:
    """Return all tensors, with the two halves of each query and key head interleaved."""
    half = fields["head_dim"] // 2

    def paired(tensor: Tensor) -> Tensor:
        return tensor.view(-1, 2, half, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)

    return {n: paired(t) if re.search(r"\.[qk]_proj\.weight", n) else t for n, t in tensors.items()}


def _fuse_qkv(tensors: Tensors) -> Tensors:
    """Return all tensors, with q_proj, k_proj and v_proj concatenated, an option of the converter."""
    found = Tensors()
    for name, tensor in tensors.items():
        if name.endswith("q_proj.weight"):
            parts = [tensors[name.replace("q_proj", part)] for part in ("q_proj", "k_proj", "v_proj")]
            found[name.replace("q_proj", "qkv")] = torch.cat(parts)
        elif not name.endswith(("k_proj.weight", "v_proj.weight")):
            found[name] = tensor
    return found


def _split_kv_b(tensors: Tensors, fields: Fields) -> Tensors:
    """Return all tensors, with kv_b_proj split into keys [heads, latent, dim] and values [heads, dim, latent]."""
    heads, nope = fields["num_attention_heads"], fields["qk_nope_head_dim"]
    found = Tensors()
    for name, tensor in tensors.items():
        if name.endswith("kv_b_proj.weight"):
            both = tensor.view(heads, -1, tensor.shape[1])
            found[name.replace("kv_b", "k_b")] = both[:, :nope].transpose(1, 2)
            found[name.replace("kv_b", "v_b")] = both[:, nope:]
        else:
            found[name] = tensor
    return found


def _plus_one(tensors: Tensors, *, except_in: str = "-") -> Tensors:
    """Return all tensors, with 1 added to the weights of norms. except_in: part of the names of other norms."""
    return {n: t + 1 if n.endswith("norm.weight") and except_in not in n else t for n, t in tensors.items()}


def _delta_net(tensors: Tensors, fields: Fields, *, tiled: bool) -> Tensors:
    """Return all tensors, with those of delta nets as the file has them.

    tiled: value head k * r + j of the hub, the j-th of key head k, is head j * key_heads + k of the file.
    """
    key_heads, value_heads, key_dim, dim = (
        fields[f"linear_{part}"] for part in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
    )
    r, keys = value_heads // key_heads, 2 * key_heads * key_dim

    def tile(rows: Tensor, width: int) -> Tensor:
        shape = (key_heads, r, width, *rows.shape[1:])
        return rows.reshape(shape).transpose(0, 1).reshape(rows.shape) if tiled else rows

    found = Tensors()
    for name, tensor in _plus_one(_split_gate_up(tensors), except_in="linear_attn").items():
        match name.rpartition("linear_attn.")[2]:
            case "in_proj_qkvz.weight":
                sizes = [key_dim, key_dim, r * dim, r * dim]
                *qkv, z = (
                    part.flatten(0, 1) for part in torch.split(tensor.view(key_heads, -1, tensor.shape[1]), sizes, 1)
                )
                found[name.replace("qkvz", "qkv")], found[name.replace("qkvz", "z")] = torch.cat(qkv), z
                continue
            case "in_proj_qkv.weight":
                tensor = torch.cat([tensor[:keys], tile(tensor[keys:], dim)])
            case "conv1d.weight":
                tensor = torch.cat([tensor[:keys], tile(tensor[keys:], dim)])[:, 0]
            case "in_proj_z.weight":
                tensor = tile(tensor, dim)
            case "in_proj_a.weight" | "in_proj_b.weight" | "dt_bias":
                tensor = tile(tensor, 1)
            case "A_log":
                tensor = -tile(tensor, 1).exp()
            case "out_proj.weight":
                tensor = tile(tensor.T.contiguous(), dim).T
        found[name] = tensor[0] if name.endswith("shared_expert_gate.weight") else tensor
    return found


def _mixtral(tensors: Tensors) -> Tensors:
    """Return all tensors, with the names of other mixtures."""
    renamed = {
        "w1": "gate_proj",
        "w3": "up_proj",
        "w2": "down_proj",
        "e_score_correction_bias": "gate.e_score_correction_bias",
    }

    def name_of(name: str) -> str:
        name = name.replace("block_sparse_moe", "mlp")
        return re.sub(r"(?<=\.)(w[123]|e_score_correction_bias)\b", lambda part: renamed[part[1]], name)

    return {name_of(name): tensor for name, tensor in tensors.items()}


_TRANSFORMS: dict[str, Callable[[Tensors, Fields], Tensors]] = {
    "qwen3vl": lambda t, _: _fuse_qkv(t),
    "qwen3vlmoe": lambda t, _: _split_gate_up(
        {n: one.transpose(1, 2) if ".experts." in n else one for n, one in t.items()}
    ),
    "llama": lambda t, c: _pair_rows(_mixtral(t), c),
    "mistral3": lambda t, c: _pair_rows({n.removeprefix("language_model."): one for n, one in t.items()}, c),
    "gemma3": lambda t, _: _plus_one(t),
    "qwen2moe": lambda t, _: {n: one[0] if n.endswith("shared_expert_gate.weight") else one for n, one in t.items()},
    "minimax-m2": lambda t, _: _mixtral(t),
    "gpt-oss": lambda t, _: _split_interleaved(t),
    "deepseek2": lambda t, c: t if c["q_lora_rank"] is None else _split_kv_b(t, c),  # old files and new ones
    "qwen3next": lambda t, c: _delta_net(t, c, tiled=False),
    "qwen35": lambda t, c: _delta_net(t, c, tiled=True),
    "qwen35moe": lambda t, c: _delta_net(t, c, tiled=True),
}


def _name(architecture: str, name: str) -> str:
    """Return the name in a file."""
    if name in _TOP:
        return _TOP[name]
    layer = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", name)
    assert layer is not None, name
    names, rest = _COMMON | _NAMES[architecture], layer[2]
    module, _, end = rest.rpartition(".")
    return f"blk.{layer[1]}.{names[rest] if rest in names else f'{names[module]}.{end}'}"


def q8_0(values: Tensor) -> tuple[bytes, Tensor]:
    """Return the Q8_0 blocks of rows, of 32 values and a scale max |x| / 127 each, and the values they decode to."""
    blocks = values.float().reshape(-1, 32)
    d = (blocks.abs().amax(1, keepdim=True) / 127).half()
    codes = torch.where(d == 0, 0, (blocks / d.float()).round()).clamp(-127, 127)
    data = np.concatenate([d.numpy().view(np.uint8), codes.to(torch.int8).numpy().view(np.uint8)], 1)
    return data.tobytes(), (codes * d.float()).reshape(values.shape)


class NoTokenizer:
    """Replaces the tokenizer of a checkpoint, as these tests encode no text and training one takes seconds."""

    def token_to_id(self, token: str) -> int:
        return 1


def representable(name: str, tensor: Tensor) -> Tensor:
    """Return a tensor rounded to values that the file can store exactly: in Q8_0, in F16 or as they are."""
    tensor = tensor.float()
    if name.endswith((".o_proj.weight", ".kv_b_proj.weight")):
        return tensor.half().float()
    is_projection = re.search(r"(_proj|\.in_proj_\w+|\.w[123])(\.weight)?$", name) and tensor.ndim > 1
    return q8_0(tensor)[1] if is_projection and tensor.shape[-1] % 32 == 0 else tensor


def stored(values: Tensor) -> tuple[str, tuple[int, ...], bytes]:
    """Return a tensor in the smallest of Q8_0, F16 and F32 that keeps its values exact; vectors always in F32."""
    values, shape = values.contiguous().float(), tuple(values.shape)
    if values.ndim > 1 and shape[-1] % 32 == 0:
        data, found = q8_0(values)
        if torch.equal(found, values):
            return "Q8_0", shape, data
    if values.ndim > 1 and torch.equal(values.half().float(), values):
        return "F16", shape, values.half().numpy().tobytes()
    return "F32", shape, values.numpy().tobytes()


def write(
    path: Path,
    architecture: str,
    fields: Fields,
    tensors: Tensors,
    others: Mapping[str, tuple[str, tuple[int, ...], bytes]] | None = None,
) -> Path:
    """Write a file. fields: of the language model in config.json. others: tensors that replace those of their names."""
    renamed = _stacked(tensors)
    if architecture in _TRANSFORMS:
        renamed = _TRANSFORMS[architecture](renamed, fields)
    last = fields["num_hidden_layers"] + (architecture == "glm4moe")
    found = {}
    for name, tensor in renamed.items():
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        if name in _TOP or (layer is not None and int(layer[1]) < last):  # no vision tower, no further draft layers
            found[_name(architecture, name)] = stored(tensor)
    if architecture == "gemma4":
        half, part = fields["global_head_dim"] // 2, 0.25
        found["rope_freqs.weight"] = stored(torch.tensor([1.0] * int(half * part) + [1e30] * (half - int(half * part))))
    return write_gguf(path, metadata_of(architecture, fields), found | dict(others or {}))
