"""The vision towers of Qwen3-VL, Qwen3.5 and Gemma 3 in mmproj files. No torch."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import ConfigError
from .architecture import Keys, Tower
from .file import GGUFFile

_VISION = "clip.vision."
_NUMBER = re.compile(r"(?<=\.)\d{1,4}(?=\.)")

_WITH_PICTURES = {
    "qwen3": "qwen3_vl",
    "qwen3_moe": "qwen3_vl_moe",
    "qwen3_5_text": "qwen3_5",
    "qwen3_5_moe_text": "qwen3_5_moe",
}
"""By the model_type of the text model alone: that of the model with pictures."""
_QWEN_TOKENS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
_FRAMES = 2
"""The frames of a patch of Qwen, each with a kernel of its own."""
_EPS = 1e-6
"""What the towers of Qwen add to variances; their config.json has no field for it."""
_PICTURE_AREA = {"shortest_edge": 65536, "longest_edge": 16777216}
_VIDEO_AREA = {"shortest_edge": 4096, "longest_edge": 25165824}
"""Bounds of the pixels of a picture and of a video, as all published models of Qwen have them. mmproj files do not."""
_QWEN_KERNELS = {
    "v.patch_embd.weight": "model.visual.patch_embed.proj.kernel.0",
    "v.patch_embd.weight.1": "model.visual.patch_embed.proj.kernel.1",
}
_QWEN_MODULES = {
    "v.patch_embd": "model.visual.patch_embed.proj",
    "v.position_embd": "model.visual.pos_embed",
    "v.blk.{}.attn_qkv": "model.visual.blocks.{}.attn.qkv",
    "v.blk.{}.attn_out": "model.visual.blocks.{}.attn.proj",
    "v.blk.{}.ffn_up": "model.visual.blocks.{}.mlp.linear_fc1",
    "v.blk.{}.ffn_down": "model.visual.blocks.{}.mlp.linear_fc2",
    "v.blk.{}.ln1": "model.visual.blocks.{}.norm1",
    "v.blk.{}.ln2": "model.visual.blocks.{}.norm2",
    "v.post_ln": "model.visual.merger.norm",
    "mm.0": "model.visual.merger.linear_fc1",
    "mm.2": "model.visual.merger.linear_fc2",
}
_QWEN_MERGER = {"norm": "norm", "fc1": "linear_fc1", "fc2": "linear_fc2"}

_GEMMA_TOKENS = {
    "image_token_index": "<image_soft_token>",
    "boi_token_index": "<start_of_image>",
    "eoi_token_index": "<end_of_image>",
}
_GEMMA_LAYER = "vision_tower.vision_model.encoder.layers.{}"
_GEMMA_MODULES = {
    "v.patch_embd": "vision_tower.vision_model.embeddings.patch_embedding",
    "v.position_embd": "vision_tower.vision_model.embeddings.position_embedding",
    "v.blk.{}.attn_q": f"{_GEMMA_LAYER}.self_attn.q_proj",
    "v.blk.{}.attn_k": f"{_GEMMA_LAYER}.self_attn.k_proj",
    "v.blk.{}.attn_v": f"{_GEMMA_LAYER}.self_attn.v_proj",
    "v.blk.{}.attn_out": f"{_GEMMA_LAYER}.self_attn.out_proj",
    "v.blk.{}.ffn_up": f"{_GEMMA_LAYER}.mlp.fc1",
    "v.blk.{}.ffn_down": f"{_GEMMA_LAYER}.mlp.fc2",
    "v.blk.{}.ln1": f"{_GEMMA_LAYER}.layer_norm1",
    "v.blk.{}.ln2": f"{_GEMMA_LAYER}.layer_norm2",
    "v.post_ln": "vision_tower.vision_model.post_layernorm",
    "mm.soft_emb_norm": "multi_modal_projector.mm_soft_emb_norm",
}
_GEMMA_PROJECTION = "mm.input_projection.weight"
"""A matrix [inputs, outputs], as on the hub."""


def _token_ids(gguf: GGUFFile, tokens: Mapping[str, str]) -> dict[str, int]:
    """Return the ids of tokens that the vocabulary has (`mismatch` of architectures.py), by the keys of config.json."""
    ids = {token: id for id, token in enumerate(gguf.texts("tokenizer.ggml.tokens"))}
    return {key: ids[token] for key, token in tokens.items()}


def _check_gelu(mmproj: GGUFFile) -> None:
    keys = Keys(mmproj, "clip.")
    if not keys.flag("use_gelu"):
        raise keys.fail("use_gelu", "true")


def _names_of(mmproj: GGUFFile, modules: Mapping[str, str]) -> dict[str, str]:
    """Return the names on the hub. modules: by module in the file, with {} for the number of a block."""
    found = {}
    for name in mmproj.tensors:
        module, _, end = name.rpartition(".")
        number = _NUMBER.search(module)
        own = modules.get(module if number is None else _NUMBER.sub("{}", module, 1))
        if own is not None:
            found[name] = f"{own.format(number[0] if number else '')}.{end}"
    return found


def _qwen_config(gguf: GGUFFile, mmproj: GGUFFile, text: Mapping[str, Any]) -> dict[str, Any]:
    keys, levels = Keys(gguf), _levels(mmproj)
    if keys.integer("n_deepstack_layers", 0) != len(levels):
        raise keys.fail("n_deepstack_layers", f"{len(levels)}, the levels of DeepStack of {mmproj.path}")
    rope = text.get("rope_scaling", {"rope_type": "default"})
    sections = {"mrope_section": keys.integers("rope.dimension_sections")[:3], "mrope_interleaved": True}
    return {
        "model_type": _WITH_PICTURES[text["model_type"]],
        "text_config": {**text, "rope_scaling": rope | sections},
        "vision_config": _qwen_vision_config(mmproj, levels),
        **_token_ids(gguf, _QWEN_TOKENS),
    }


def _qwen_vision_config(mmproj: GGUFFile, levels: Sequence[int]) -> dict[str, Any]:
    _check_gelu(mmproj)
    vision, epsilon, positions = Keys(mmproj, _VISION), "attention.layer_norm_epsilon", "v.position_embd.weight"
    if abs((found := vision.number(epsilon)) / _EPS - 1) > 1e-6:  # files round numbers to fp32
        raise vision.fail(epsilon, f"{_EPS:g}, found {found:g}")
    if positions not in mmproj.tensors:
        raise ConfigError(f"{mmproj.path}: expected a tensor {positions}, found none")
    return {
        "depth": vision.integer("block_count"),
        "hidden_size": vision.integer("embedding_length"),
        "intermediate_size": vision.integer("feed_forward_length"),
        "num_heads": vision.integer("attention.head_count"),
        "out_hidden_size": mmproj.tensors[QWEN_TOWER.output].shape[-1],
        "patch_size": vision.integer("patch_size"),
        "spatial_merge_size": _merge_size(vision),
        "temporal_patch_size": _FRAMES,
        "num_position_embeddings": mmproj.tensors[positions].shape[0],
        "deepstack_visual_indexes": levels,
    }


def _merge_size(vision: Keys) -> int:
    return vision.integer("spatial_merge_size", 2)


def _levels(mmproj: GGUFFile) -> list[int]:
    """Return the blocks after which DeepStack takes a level."""
    vision, key = Keys(mmproj, _VISION), "is_deepstack_layers"
    flags = vision.integers(key) if vision.has(key) else []
    return [block for block, is_one in enumerate(flags) if is_one]


def _qwen_processor(mmproj: GGUFFile) -> dict[str, Any]:
    vision = Keys(mmproj, _VISION)
    patches = {
        "patch_size": vision.integer("patch_size"),
        "merge_size": _merge_size(vision),
        "temporal_patch_size": _FRAMES,
        "image_mean": vision.numbers("image_mean"),
        "image_std": vision.numbers("image_std"),
    }
    return {"image_processor": patches | {"size": _PICTURE_AREA}, "video_processor": patches | {"size": _VIDEO_AREA}}


def _qwen_names(mmproj: GGUFFile) -> dict[str, str]:
    names = _names_of(mmproj, _QWEN_MODULES)
    for level, block in enumerate(_levels(mmproj)):
        for part, own in _QWEN_MERGER.items():
            for end in ("weight", "bias"):
                names[f"v.deepstack.{block}.{part}.{end}"] = f"model.visual.deepstack_merger_list.{level}.{own}.{end}"
    return names | _QWEN_KERNELS


def _gemma_config(gguf: GGUFFile, mmproj: GGUFFile, text: Mapping[str, Any]) -> dict[str, Any]:
    _check_gelu(mmproj)
    vision = Keys(mmproj, _VISION)
    image, patch, pooled = (
        vision.integer(key, default)
        for key, default in (("image_size", None), ("patch_size", None), ("projector.scale_factor", 4))
    )
    return {
        "model_type": "gemma3",
        "text_config": dict(text),
        "vision_config": {
            "num_hidden_layers": vision.integer("block_count"),
            "hidden_size": vision.integer("embedding_length"),
            "intermediate_size": vision.integer("feed_forward_length"),
            "num_attention_heads": vision.integer("attention.head_count"),
            "layer_norm_eps": vision.number("attention.layer_norm_epsilon"),
            "image_size": image,
            "patch_size": patch,
        },
        "mm_tokens_per_image": (image // max(patch, 1) // max(pooled, 1)) ** 2,
        **_token_ids(gguf, _GEMMA_TOKENS),
    }


def _gemma_processor(mmproj: GGUFFile) -> dict[str, Any]:
    vision = Keys(mmproj, _VISION)
    side = vision.integer("image_size")
    found = {key: vision.numbers(key) for key in ("image_mean", "image_std")}
    return {"image_processor": {"size": {"height": side, "width": side}, **found}}


def _gemma_names(mmproj: GGUFFile) -> dict[str, str]:
    """Return the names on the hub. Older files call the first projection of an MLP ffn_down and the second ffn_up."""
    modules, down = dict(_GEMMA_MODULES), mmproj.tensors.get("v.blk.0.ffn_down.weight")
    if down is not None and down.shape[-1] == Keys(mmproj, _VISION).integer("embedding_length"):
        first, second = "v.blk.{}.ffn_up", "v.blk.{}.ffn_down"
        modules[first], modules[second] = modules[second], modules[first]
    return _names_of(mmproj, modules) | {_GEMMA_PROJECTION: "multi_modal_projector.mm_input_projection_weight"}


QWEN_TOWER = Tower(
    projector="qwen3vl_merger",
    output="mm.2.bias",
    tokens=tuple(_QWEN_TOKENS.values()),
    config=_qwen_config,
    processor=_qwen_processor,
    text="model.language_model.",
    names=_qwen_names,
)
GEMMA3_TOWER = Tower(
    projector="gemma3",
    output=_GEMMA_PROJECTION,
    tokens=tuple(_GEMMA_TOKENS.values()),
    config=_gemma_config,
    processor=_gemma_processor,
    text="language_model.model.",
    names=_gemma_names,
    changes={"mm.soft_emb_norm": "plus_one"},
)
