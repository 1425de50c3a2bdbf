"""Families of tiny checkpoints that are short to describe: relatives of Llama and of Qwen (make_tiny.py builds them)."""
import json, os

from tiny_configs import base_text, dims, moe_keys
from tiny_weights import split_experts

__all__ = ["fam_mistral", "fam_mistral3", "fam_olmo3", "fam_phi3", "fam_qwen2_moe", "fam_smollm3"]

def ids(t): return {f"{key}_token_id": t.token_to_id(f"<|{name}|>") for key, name in (("bos", "endoftext"), ("eos", "im_end"), ("pad", "endoftext"))}

def released(d, cls, model_type, *, without=(), tied=False, **fields):
    """What make_tiny.py builds a checkpoint from, with the fields of the file of Llama that `without` does not name."""
    c = base_text(d, architectures=[cls], model_type=model_type, tie_word_embeddings=tied, torch_dtype="bfloat16", **fields)
    for key in without: del c[key]
    return dict(style="qwen", d=d, config=c, ids=ids, cls=cls, tied=tied)

def fam_mistral(a):
    """As Mistral-7B-v0.1, with heads that are not as wide as the hidden state divided by their number."""
    d = dims(a, hidden=128, heads=8, kv_heads=2, head_dim=24, layers=3, inter=352, vocab=2048)
    return released(d, "MistralForCausalLM", "mistral", head_dim=d.head_dim, rms_norm_eps=1e-5, rope_theta=10000.0, sliding_window=20,
                    without=("attention_bias",))

def mistral3_names(sd):
    """Names of the released files, which have the parts of the model at the top."""
    names = {"model.language_model.": "language_model.model.", "model.vision_tower.": "vision_tower.",
             "model.multi_modal_projector.": "multi_modal_projector.", "lm_head.": "language_model.lm_head."}
    out = {}
    for n, t in sd.items():
        old = next(old for old in names if n.startswith(old))
        out[names[old] + n[len(old):]] = t
    return out

def mistral3_pictures(out):
    """Pictures of at most 64 pixels a side, with tokens of 2 x 2 patches of 4 pixels."""
    steps = {f"do_{step}": True for step in ("convert_rgb", "normalize", "rescale", "resize")}
    files = {"preprocessor_config.json": dict(steps, image_mean=[0.48145466, 0.4578275, 0.40821073], image_std=[0.26862954, 0.26130258, 0.27577711],
                 image_processor_type="PixtralImageProcessorFast", patch_size=4, processor_class="PixtralProcessor", resample=3,
                 rescale_factor=1 / 255, size={"longest_edge": 64}),
             "processor_config.json": dict(image_break_token="[IMG_BREAK]", image_end_token="[IMG_END]", image_token="[IMG]", patch_size=4,
                 processor_class="PixtralProcessor", spatial_merge_size=2)}
    for name, values in files.items(): json.dump(values, open(os.path.join(out, name), "w"), indent=2)

def fam_mistral3(a):
    """As Ministral-3, whose queries are scaled from the 16th position on."""
    d = dims(a, hidden=128, heads=8, kv_heads=2, head_dim=32, layers=3, inter=352, vocab=2048)
    rope = {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 16.0, "llama_4_scaling_beta": 0.1, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 16, "rope_theta": 10000.0, "rope_type": "yarn", "type": "yarn"}
    text = base_text(d, model_type="ministral3", head_dim=d.head_dim, rms_norm_eps=1e-5, rope_parameters=rope, sliding_window=None)
    text["max_position_embeddings"] = 256
    vision = dict(attention_dropout=0.0, head_dim=24, hidden_act="silu", hidden_size=96, image_size=64, intermediate_size=136,
                  model_type="pixtral", num_attention_heads=4, num_channels=3, num_hidden_layers=2, patch_size=4,
                  rope_parameters={"rope_theta": 10000.0, "rope_type": "default"})
    c = dict(architectures=["Mistral3ForConditionalGeneration"], dtype="bfloat16", model_type="mistral3",
             multimodal_projector_bias=False, projector_hidden_act="gelu", spatial_merge_size=2, text_config=text,
             tie_word_embeddings=False, transformers_version="5.0.0.dev0", vision_config=vision, vision_feature_layer=-1)
    def with_pictures(t): return ids(t) | {"image_token_index": t.token_to_id("[IMG]")}
    return dict(style="pixtral", d=d, config=c, ids=with_pictures, cls="Mistral3ForConditionalGeneration", tied=False, rename=mistral3_names,
                proc=mistral3_pictures)

def fam_qwen2_moe(a):
    """As Qwen1.5-MoE: experts one by one, a wider one for all tokens."""
    d = dims(a, hidden=128, heads=4, kv_heads=4, layers=3, inter=208, vocab=2048, experts=7, topk=3, moe_inter=80)
    moe = {**moe_keys(d), "norm_topk_prob": False, "shared_expert_intermediate_size": 2 * d.moe_inter}
    return released(d, "Qwen2MoeForCausalLM", "qwen2_moe", max_window_layers=d.layers, rms_norm_eps=1e-6, rope_theta=1000000.0,
                    sliding_window=32768, use_sliding_window=False, without=("attention_bias",), **moe) | dict(rename=split_experts)

def fam_phi3(a):
    """As Phi-4-mini. Both lists of factors are equal: transformers chooses by the length of a sequence."""
    d = dims(a, hidden=128, heads=8, kv_heads=2, layers=3, inter=352, vocab=2048)
    half = int(d.hidden // d.heads * 0.75) // 2
    factors = [1.0 + 0.5 * i for i in range(half)]
    return released(d, "Phi3ForCausalLM", "phi3", embd_pdrop=0.0, original_max_position_embeddings=64, partial_rotary_factor=0.75,
                    resid_pdrop=0.0, rms_norm_eps=1e-5, rope_theta=10000.0, sliding_window=31, tied=True,
                    rope_scaling={"long_factor": factors, "short_factor": factors, "type": "longrope"})

def fam_olmo3(a):
    """As Olmo-3-7B: three of four layers with a window."""
    d = dims(a, hidden=128, heads=8, kv_heads=8, layers=4, inter=352, vocab=2048)
    kinds = ["full_attention" if (i + 1) % 4 == 0 else "sliding_attention" for i in range(d.layers)]
    rope = {"attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0, "factor": 8.0,
            "original_max_position_embeddings": 64, "rope_type": "yarn"}
    return released(d, "Olmo3ForCausalLM", "olmo3", layer_types=kinds, rms_norm_eps=1e-6, rope_scaling=rope, rope_theta=500000,
                    sliding_window=20)

def fam_smollm3(a):
    """As SmolLM3-3B."""
    d = dims(a, hidden=128, heads=8, kv_heads=2, layers=4, inter=352, vocab=2048)
    kept = [int((i + 1) % 4 != 0) for i in range(d.layers)]
    return released(d, "SmolLM3ForCausalLM", "smollm3", layer_types=["full_attention"] * d.layers, max_window_layers=28, mlp_bias=False,
                    no_rope_layer_interval=4, no_rope_layers=kept, rms_norm_eps=1e-6, rope_scaling=None, rope_theta=100000.0,
                    sliding_window=None, use_sliding_window=False, tied=True)
