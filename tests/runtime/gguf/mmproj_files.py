"""Writes the tensors of vision towers as mmproj files, with the names and metadata of llama.cpp's converter; and the
smallest files of models that take pictures."""

import re
from pathlib import Path
from typing import Any

from torch import Tensor

from tests.loader.gguf_files import Tensors as Stored
from tests.loader.gguf_files import write_gguf
from tests.runtime.gguf.hub_to_gguf import stored

_QWEN = {
    r"patch_embed\.proj": "v.patch_embd",
    r"pos_embed": "v.position_embd",
    r"blocks\.(\d+)\.attn\.qkv": r"v.blk.\1.attn_qkv",
    r"blocks\.(\d+)\.attn\.proj": r"v.blk.\1.attn_out",
    r"blocks\.(\d+)\.mlp\.linear_fc1": r"v.blk.\1.ffn_up",
    r"blocks\.(\d+)\.mlp\.linear_fc2": r"v.blk.\1.ffn_down",
    r"blocks\.(\d+)\.norm([12])": r"v.blk.\1.ln\2",
    r"merger\.norm": "v.post_ln",
    r"merger\.linear_fc1": "mm.0",
    r"merger\.linear_fc2": "mm.2",
    r"deepstack_merger_list\.(\d+)\.(?:linear_)?(norm|fc1|fc2)": r"v.deepstack.\1.\2",
}
_GEMMA = {
    r"embeddings\.patch_embedding": "v.patch_embd",
    r"embeddings\.position_embedding": "v.position_embd",
    r"encoder\.layers\.(\d+)\.self_attn\.([qkv])_proj": r"v.blk.\1.attn_\2",
    r"encoder\.layers\.(\d+)\.self_attn\.out_proj": r"v.blk.\1.attn_out",
    r"encoder\.layers\.(\d+)\.mlp\.fc1": r"v.blk.\1.ffn_up",
    r"encoder\.layers\.(\d+)\.mlp\.fc2": r"v.blk.\1.ffn_down",
    r"encoder\.layers\.(\d+)\.layer_norm([12])": r"v.blk.\1.ln\2",
    r"post_layernorm": "v.post_ln",
}


_PIXTRAL = {
    r"vision_tower\.patch_conv": "v.patch_embd",
    r"vision_tower\.ln_pre": "v.pre_ln",
    r"vision_tower\.transformer\.layers\.(\d+)\.attention\.([qkv])_proj": r"v.blk.\1.attn_\2",
    r"vision_tower\.transformer\.layers\.(\d+)\.attention\.o_proj": r"v.blk.\1.attn_out",
    r"vision_tower\.transformer\.layers\.(\d+)\.feed_forward\.(gate|up|down)_proj": r"v.blk.\1.ffn_\2",
    r"vision_tower\.transformer\.layers\.(\d+)\.attention_norm": r"v.blk.\1.ln1",
    r"vision_tower\.transformer\.layers\.(\d+)\.ffn_norm": r"v.blk.\1.ln2",
    r"multi_modal_projector\.norm": "mm.input_norm",
    r"multi_modal_projector\.patch_merger\.merging_layer": "mm.patch_merger",
    r"multi_modal_projector\.linear_([12])": r"mm.\1",
}
_SWAPPED = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}


def _renamed(name: str, patterns: dict[str, str]) -> str:
    module, _, end = name.rpartition(".")
    (found,) = {re.sub(pattern, new, module) for pattern, new in patterns.items() if re.fullmatch(pattern, module)}
    return f"{found}.{end}"


def write_qwen(path: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    """Write the tower of Qwen. config: config.json. tensors: of the whole model, by their names on the hub."""
    vision, found = config["vision_config"], dict[str, Tensor]()
    levels = vision["deepstack_visual_indexes"]
    for whole, tensor in tensors.items():
        if not whole.startswith("model.visual."):
            continue
        name = _renamed(whole.removeprefix("model.visual."), _QWEN)
        if name == "v.patch_embd.weight":  # a kernel for each of two frames
            found[name], found[f"{name}.1"] = tensor[:, :, 0], tensor[:, :, 1]
        else:  # DeepStack counts the blocks of the tower
            found[re.sub(r"(?<=deepstack\.)\d+", lambda n: str(levels[int(n[0])]), name)] = tensor
    more = {
        "block_count": vision["depth"],
        "attention.head_count": vision["num_heads"],
        "spatial_merge_size": vision["spatial_merge_size"],
        "is_deepstack_layers": [block in levels for block in range(vision["depth"])],
    }
    metadata = _metadata("qwen3vl_merger", vision, vision["out_hidden_size"], more)
    return write_gguf(path, metadata, {name: stored(tensor) for name, tensor in found.items()})


def write_gemma(path: Path, config: dict[str, Any], tensors: dict[str, Tensor], *, swapped: bool) -> Path:
    """Write the tower of Gemma 3. swapped: the projections of MLPs have each other's names, as in older files."""
    vision, found = config["vision_config"], dict[str, Tensor]()
    for name, tensor in tensors.items():
        if name.startswith("vision_tower."):
            own = _renamed(name.removeprefix("vision_tower.vision_model."), _GEMMA)
            found[re.sub("ffn_(up|down)", lambda part: _SWAPPED[part[0]], own) if swapped else own] = tensor
    found["mm.soft_emb_norm.weight"] = tensors["multi_modal_projector.mm_soft_emb_norm.weight"] + 1
    found["mm.input_projection.weight"] = tensors["multi_modal_projector.mm_input_projection_weight"]
    side = vision["image_size"] // vision["patch_size"]
    more = {
        "block_count": vision["num_hidden_layers"],
        "attention.head_count": vision["num_attention_heads"],
        "projector.scale_factor": side // int(config["mm_tokens_per_image"] ** 0.5),
    }
    metadata = _metadata("gemma3", vision, config["text_config"]["hidden_size"], more)
    return write_gguf(path, metadata, {name: stored(tensor) for name, tensor in found.items()})


def write_pixtral(path: Path, config: dict[str, Any], tensors: dict[str, Tensor], pictures: dict[str, Any]) -> Path:
    """Write the tower of Mistral Small 3.1. pictures: preprocessor_config.json."""
    vision, found = config["vision_config"], dict[str, Tensor]()
    half = vision["hidden_size"] // vision["num_attention_heads"] // 2
    for whole, tensor in tensors.items():
        if not whole.startswith("language_model."):
            is_paired = whole.endswith((".q_proj.weight", ".k_proj.weight"))
            rows = tensor.view(-1, 2, half, tensor.shape[1]).transpose(1, 2).flatten(0, 2) if is_paired else tensor
            found[_renamed(whole, _PIXTRAL)] = rows
    found["v.token_embd.img_break"] = tensors["language_model.model.embed_tokens.weight"][-2]
    more = {
        "block_count": vision["num_hidden_layers"],
        "attention.head_count": vision["num_attention_heads"],
        "attention.layer_norm_epsilon": 1e-5,
        "spatial_merge_size": config["spatial_merge_size"],
        **{key: pictures[key] for key in ("image_mean", "image_std")},
    }
    metadata = _metadata("pixtral", vision, config["text_config"]["hidden_size"], more, activation="silu")
    return write_gguf(path, metadata, {name: stored(tensor) for name, tensor in found.items()})


def _metadata(
    projector: str, vision: dict[str, Any], width: int, more: dict[str, Any], activation: str = "gelu"
) -> dict[str, Any]:
    fields = {
        "image_size": vision.get("image_size", 128),
        "patch_size": vision["patch_size"],
        "embedding_length": vision["hidden_size"],
        "feed_forward_length": vision["intermediate_size"],
        "projection_dim": width,
        "attention.layer_norm_epsilon": 1e-6,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        **more,
    }
    return {
        "general.architecture": "clip",
        "general.type": "mmproj",
        "clip.has_vision_encoder": True,
        "clip.projector_type": projector,
        f"clip.use_{activation}": True,
    } | {f"clip.vision.{key}": value for key, value in fields.items()}


WIDTH = 64
TOKENS = ["a", "b", "c", "ab", "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
_TEXT = {
    "vocab_size": 8,
    "block_count": 2,
    "context_length": 4096,
    "embedding_length": WIDTH,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.layer_norm_rms_epsilon": 1e-6,
}
QWEN: dict[str, Any] = {
    "general.architecture": "qwen3vl",
    **{f"qwen3vl.{key}": value for key, value in _TEXT.items()},
    "qwen3vl.rope.dimension_sections": [4, 2, 2, 0],
    "qwen3vl.n_deepstack_layers": 1,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "qwen2",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [1] * 4 + [3] * 4,
    "tokenizer.ggml.merges": ["a b"],
}
GEMMA: dict[str, Any] = {
    "general.architecture": "gemma3",
    **{f"gemma3.{key}": value for key, value in _TEXT.items()},
    "gemma3.attention.sliding_window": 512,
    "tokenizer.ggml.tokens": ["a", "b", "c", "<start_of_image>", "<end_of_image>", "<image_soft_token>", "d", "e"],
}
MISTRAL: dict[str, Any] = {
    "general.architecture": "mistral3",
    **{f"mistral3.{key}": value for key, value in _TEXT.items()},
    "tokenizer.ggml.tokens": ["a", "b", "c", "[IMG]", "[IMG_BREAK]", "[IMG_END]", "d", "e"],
}
_VISION = {"patch_size": 16, "hidden_size": 32, "intermediate_size": 48}
_QWEN_OWN = {
    "block_count": 4,
    "attention.head_count": 4,
    "spatial_merge_size": 2,
    "is_deepstack_layers": [False, True, False, False],
}
QWEN_MMPROJ = _metadata("qwen3vl_merger", _VISION, WIDTH, _QWEN_OWN)
QWEN_TOWER: Stored = {
    "mm.2.bias": ("F32", (WIDTH,), bytes(4 * WIDTH)),
    "v.position_embd.weight": ("F32", (64, 32), bytes(4 * 64 * 32)),
}
_GEMMA_OWN = {"block_count": 4, "attention.head_count": 4, "projector.scale_factor": 2}
GEMMA_MMPROJ = _metadata("gemma3", _VISION, WIDTH, _GEMMA_OWN)
GEMMA_TOWER: Stored = {"mm.input_projection.weight": ("F32", (32, WIDTH), bytes(4 * 32 * WIDTH))}
_PIXTRAL_OWN = {
    "block_count": 4,
    "attention.head_count": 4,
    "attention.layer_norm_epsilon": 1e-5,
    "spatial_merge_size": 2,
}
PIXTRAL_MMPROJ = _metadata("pixtral", _VISION, WIDTH, _PIXTRAL_OWN, activation="silu")
PIXTRAL_TOWER: Stored = {
    "mm.patch_merger.weight": ("F32", (32, 4 * 32), bytes(4 * 32 * 4 * 32)),
    "mm.2.weight": ("F32", (WIDTH, WIDTH), bytes(4 * WIDTH * WIDTH)),
}


def write_pair(
    folder: Path, model: dict[str, Any], mmproj: dict[str, Any], tower: Stored, name: str = "m"
) -> tuple[Path, Path]:
    """Write the two files of a model that takes pictures. Its text model has no tensors."""
    return write_gguf(folder / f"{name}.gguf", model, {}), write_gguf(folder / f"mmproj-{name}.gguf", mmproj, tower)
