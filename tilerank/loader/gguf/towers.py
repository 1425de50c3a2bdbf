"""The vision towers of Qwen3-VL, Qwen3.5, Gemma 3 and Mistral Small 3.1 in mmproj files. No torch."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import ConfigError
from .architecture import Keys, Order, Tower, order_of_pairs
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
_QWEN_EPS, _PIXTRAL_EPS = 1e-6, 1e-5
"""What these towers add to variances; their config.json has no field for it."""
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

_PIXTRAL_TOKENS = {"image_token_index": "[IMG]"}
_PIXTRAL_MARKS = ("[IMG_BREAK]", "[IMG_END]")
_PIXTRAL_LAYER = "vision_tower.transformer.layers.{}"
_PIXTRAL_MODULES = {
    "v.patch_embd": "vision_tower.patch_conv",
    "v.pre_ln": "vision_tower.ln_pre",
    "v.blk.{}.attn_q": f"{_PIXTRAL_LAYER}.attention.q_proj",
    "v.blk.{}.attn_k": f"{_PIXTRAL_LAYER}.attention.k_proj",
    "v.blk.{}.attn_v": f"{_PIXTRAL_LAYER}.attention.v_proj",
    "v.blk.{}.attn_out": f"{_PIXTRAL_LAYER}.attention.o_proj",
    "v.blk.{}.ffn_gate": f"{_PIXTRAL_LAYER}.feed_forward.gate_proj",
    "v.blk.{}.ffn_up": f"{_PIXTRAL_LAYER}.feed_forward.up_proj",
    "v.blk.{}.ffn_down": f"{_PIXTRAL_LAYER}.feed_forward.down_proj",
    "v.blk.{}.ln1": f"{_PIXTRAL_LAYER}.attention_norm",
    "v.blk.{}.ln2": f"{_PIXTRAL_LAYER}.ffn_norm",
    "mm.input_norm": "multi_modal_projector.norm",
    "mm.patch_merger": "multi_modal_projector.patch_merger.merging_layer",
    "mm.1": "multi_modal_projector.linear_1",
    "mm.2": "multi_modal_projector.linear_2",
}
_PIXTRAL_PAIRED = re.compile(r"v\.blk\.\d+\.attn_[qk]\.weight")
_LLAMA_OF_MISTRAL = {"llama": "mistral"}
"""The files of Mistral Small 3.1 and 3.2 name Llama as the architecture of their text model."""


def _token_ids(gguf: GGUFFile, tokens: Mapping[str, str]) -> dict[str, int]:
    """Return the ids of tokens that the vocabulary has (`mismatch` of architectures.py), by the keys of config.json."""
    ids = {token: id for id, token in enumerate(gguf.texts("tokenizer.ggml.tokens"))}
    return {key: ids[token] for key, token in tokens.items()}


def _check_activation(mmproj: GGUFFile, name: str) -> None:
    keys, key = Keys(mmproj, "clip."), f"use_{name}"
    if not keys.flag(key):
        raise keys.fail(key, "true")


def _check_epsilon(vision: Keys, expected: float) -> None:
    key = "attention.layer_norm_epsilon"
    if abs((found := vision.number(key)) / expected - 1) > 1e-6:  # files round numbers to fp32
        raise vision.fail(key, f"{expected:g}, found {found:g}")


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
    _check_activation(mmproj, "gelu")
    vision, positions = Keys(mmproj, _VISION), "v.position_embd.weight"
    _check_epsilon(vision, _QWEN_EPS)
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
    _check_activation(mmproj, "gelu")
    vision = Keys(mmproj, _VISION)
    config, pooled = _shape_of_tower(vision), vision.integer("projector.scale_factor", 4)
    return {
        "model_type": "gemma3",
        "text_config": dict(text),
        "vision_config": config | {"layer_norm_eps": vision.number("attention.layer_norm_epsilon")},
        "mm_tokens_per_image": (config["image_size"] // max(config["patch_size"], 1) // max(pooled, 1)) ** 2,
        **_token_ids(gguf, _GEMMA_TOKENS),
    }


def _shape_of_tower(vision: Keys) -> dict[str, int]:
    """Return the fields of vision_config that say the shape of a tower and the largest side of a picture."""
    keys = {
        "num_hidden_layers": "block_count",
        "hidden_size": "embedding_length",
        "intermediate_size": "feed_forward_length",
        "num_attention_heads": "attention.head_count",
        "image_size": "image_size",
        "patch_size": "patch_size",
    }
    return {field: vision.integer(key) for field, key in keys.items()}


def _processor(mmproj: GGUFFile, *sides: str) -> dict[str, Any]:
    """Return the fields for pictures that are scaled to the largest side. sides: the keys of `size` for it."""
    vision = Keys(mmproj, _VISION)
    size = dict.fromkeys(sides, vision.integer("image_size"))
    return {"image_processor": {"size": size} | {key: vision.numbers(key) for key in ("image_mean", "image_std")}}


def _gemma_processor(mmproj: GGUFFile) -> dict[str, Any]:
    return _processor(mmproj, "height", "width")


def _gemma_names(mmproj: GGUFFile) -> dict[str, str]:
    """Return the names on the hub. Older files call the first projection of an MLP ffn_down and the second ffn_up."""
    modules, down = dict(_GEMMA_MODULES), mmproj.tensors.get("v.blk.0.ffn_down.weight")
    if down is not None and down.shape[-1] == Keys(mmproj, _VISION).integer("embedding_length"):
        first, second = "v.blk.{}.ffn_up", "v.blk.{}.ffn_down"
        modules[first], modules[second] = modules[second], modules[first]
    return _names_of(mmproj, modules) | {_GEMMA_PROJECTION: "multi_modal_projector.mm_input_projection_weight"}


def _pixtral_config(gguf: GGUFFile, mmproj: GGUFFile, text: Mapping[str, Any]) -> dict[str, Any]:
    _check_activation(mmproj, "silu")
    vision, kind = Keys(mmproj, _VISION), text["model_type"]
    _check_epsilon(vision, _PIXTRAL_EPS)
    theta = Keys(mmproj, "clip.").number("rope.freq_base", 10000.0)
    return {
        "model_type": "mistral3",
        "text_config": {**text, "model_type": _LLAMA_OF_MISTRAL.get(kind, kind), "sliding_window": None},
        "vision_config": {**_shape_of_tower(vision), "hidden_act": "silu", "rope_theta": theta},
        "spatial_merge_size": vision.integer("spatial_merge_size"),
        "multimodal_projector_bias": "mm.1.bias" in mmproj.tensors,
        **_token_ids(gguf, _PIXTRAL_TOKENS),
    }


def _pixtral_processor(mmproj: GGUFFile) -> dict[str, Any]:
    return _processor(mmproj, "longest_edge")


def _pixtral_names(mmproj: GGUFFile) -> dict[str, str]:
    return _names_of(mmproj, _PIXTRAL_MODULES)


def _pixtral_orders(mmproj: GGUFFile) -> dict[str, Order]:
    shape = _shape_of_tower(Keys(mmproj, _VISION))
    pairs = order_of_pairs(shape["hidden_size"] // max(shape["num_attention_heads"], 1))
    return {name: pairs for name in mmproj.tensors if _PIXTRAL_PAIRED.fullmatch(name)}


QWEN_TOWER = Tower(
    projector="qwen3vl_merger",
    output="mm.2.bias",
    tokens=tuple(_QWEN_TOKENS.values()),
    config=_qwen_config,
    processor=_qwen_processor,
    text={"model.": "model.language_model."},
    names=_qwen_names,
)
GEMMA3_TOWER = Tower(
    projector="gemma3",
    output=_GEMMA_PROJECTION,
    tokens=tuple(_GEMMA_TOKENS.values()),
    config=_gemma_config,
    processor=_gemma_processor,
    text={"model.": "language_model.model."},
    names=_gemma_names,
    changes={"mm.soft_emb_norm": "plus_one"},
)
PIXTRAL_TOWER = Tower(
    projector="pixtral",
    output="mm.2.weight",
    tokens=(*_PIXTRAL_TOKENS.values(), *_PIXTRAL_MARKS),
    config=_pixtral_config,
    processor=_pixtral_processor,
    text={"model.": "language_model.model.", "lm_head.": "language_model.lm_head."},
    names=_pixtral_names,
    orders=_pixtral_orders,
    needed=("mm.patch_merger.weight",),
    copies=("v.token_embd.img_break",),
)
