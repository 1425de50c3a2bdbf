"""Families of tiny checkpoints with mixtures of experts: GLM-4.x, MiniMax-M2, Mixtral, Qwen3-Next (make_tiny.py builds them)."""
import re

import torch
from tiny_configs import base_text, dims, moe_keys
from tiny_weights import split_experts

__all__ = ["draft_layer", "fam_glm4_moe", "fam_glm4_moe_lite", "fam_minimax_m2", "fam_mixtral", "fam_qwen3_next"]

def ids(t): return dict(bos_token_id=t.token_to_id("<|endoftext|>"), eos_token_id=t.token_to_id("<|im_end|>"))

def draft_layer(d, *, copies=True, drafts=0):
    """The layer after the last, which predicts a second token. copies: it has the embedding and the head as well. drafts: it has a head of its own
    for so many tokens."""
    def mtp(sd, g):
        L, pre = d.layers, f"model.layers.{d.layers - 1}."
        o = {f"model.layers.{L}." + n[len(pre):]: (torch.randn(x.shape, generator=g) * 0.05).to(x.dtype) for n, x in sd.items() if n.startswith(pre)}
        if copies:
            o[f"model.layers.{L}.embed_tokens.weight"] = sd["model.embed_tokens.weight"].clone()
            o[f"model.layers.{L}.shared_head.head.weight"] = sd["lm_head.weight"].clone()
        o[f"model.layers.{L}.eh_proj.weight"] = torch.randn(d.hidden, 2 * d.hidden, generator=g) * 0.05
        for k in ("enorm", "hnorm", "shared_head.norm"): o[f"model.layers.{L}.{k}.weight"] = 1 + torch.randn(d.hidden, generator=g) * 0.1
        if drafts:
            o[f"model.layers.{L}.shared_head.head.weight"] = torch.randn(drafts, d.hidden, generator=g) * 0.05
            o[f"model.layers.{L}.d2t"] = torch.randperm(d.vocab, generator=g)[:drafts].sort()[0] - torch.arange(drafts)
        return o
    return mtp

def routed_keys(d): return dict(moe_intermediate_size=d.moe_inter, n_group=1, n_routed_experts=d.experts, n_shared_experts=1, norm_topk_prob=True,
                                num_experts_per_tok=d.topk, num_nextn_predict_layers=1, topk_group=1)

def fam_glm4_moe(a):
    """As GLM-4.6."""
    d = dims(a, hidden=128, heads=6, kv_heads=3, head_dim=24, layers=3, inter=208, vocab=2048, experts=7, topk=3, moe_inter=80)
    c = base_text(d, architectures=["Glm4MoeForCausalLM"], model_type="glm4_moe", first_k_dense_replace=1, head_dim=d.head_dim,
                  partial_rotary_factor=0.5, rms_norm_eps=1e-5, rope_scaling=None, rope_theta=1000000, routed_scaling_factor=2.5,
                  tie_word_embeddings=False, torch_dtype="bfloat16", transformers_version="4.54.0", use_qk_norm=True, **routed_keys(d))
    c["attention_bias"] = True
    return dict(style="qwen", d=d, config=c, ids=ids, cls="Glm4MoeForCausalLM", tied=False, rename=split_experts, mtp=draft_layer(d, copies=False, drafts=getattr(a, "config", {}).get("draft_vocab_size", 0)))

def fam_glm4_moe_lite(a):
    """As GLM-4.7-Flash in the file of transformers 5, which lists the layers. Values are as wide as the keys without rotation."""
    d = dims(a, hidden=128, heads=5, layers=3, inter=208, vocab=2048, experts=7, topk=3, moe_inter=80)
    d.kv_heads = d.heads
    c = base_text(d, architectures=["Glm4MoeLiteForCausalLM"], model_type="glm4_moe_lite", kv_lora_rank=64, mlp_layer_types=["dense"] + ["sparse"] * (d.layers - 1),
                  q_lora_rank=96, qk_nope_head_dim=24, qk_rope_head_dim=16, rms_norm_eps=1e-5, rope_interleave=True, routed_scaling_factor=1.8,
                  rope_parameters={"rope_theta": 1000000, "rope_type": "default"}, tie_word_embeddings=False, v_head_dim=40, dtype="bfloat16",
                  transformers_version="5.0.0", **routed_keys(d))
    return dict(style="qwen", d=d, config=c, ids=ids, cls="Glm4MoeLiteForCausalLM", tied=False, rename=split_experts, mtp=draft_layer(d, copies=False))

def minimax_names(sd):
    """The names of Mixtral's experts; the bias of the router beside it."""
    parts = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    out = {}
    for n, t in split_experts(sd).items():
        n = re.sub(r"\.mlp\.", ".block_sparse_moe.", n)
        out[re.sub(r"(\.experts\.\d+\.)(\w+)\.", lambda m: f"{m[1]}{parts[m[2]]}.", n)] = t
    return out

def fam_minimax_m2(a):
    d = dims(a, hidden=128, heads=6, kv_heads=3, head_dim=24, layers=3, vocab=2048, experts=7, topk=3, moe_inter=80)
    d.inter = d.moe_inter
    c = base_text(d, architectures=["MiniMaxM2ForCausalLM"], model_type="minimax_m2", attn_type_list=[1] * d.layers, head_dim=d.head_dim,
                  num_experts_per_tok=d.topk, num_local_experts=d.experts, num_mtp_modules=3, qk_norm_type="per_layer", rms_norm_eps=1e-6,
                  rope_theta=5000000, rotary_dim=d.head_dim // 2, scoring_func="sigmoid", shared_intermediate_size=0, tie_word_embeddings=False,
                  transformers_version="4.46.1", use_mtp=True, use_qk_norm=True, use_routing_bias=True)
    del c["attention_bias"]
    return dict(style="qwen", d=d, config=c, ids=ids, cls="MiniMaxM2ForCausalLM", tied=False, rename=minimax_names, mtp=draft_layer(d))

def fam_mixtral(a):
    d = dims(a, hidden=128, heads=6, kv_heads=3, head_dim=24, layers=2, vocab=2048, experts=7, topk=2, moe_inter=80)
    d.inter = d.moe_inter
    c = base_text(d, architectures=["MixtralForCausalLM"], model_type="mixtral", head_dim=d.head_dim, num_experts_per_tok=d.topk, num_local_experts=d.experts,
                  output_router_logits=False, rms_norm_eps=1e-5, rope_theta=1e6, router_aux_loss_coef=0.02, sliding_window=None, tie_word_embeddings=False,
                  torch_dtype="bfloat16", transformers_version="4.36.0.dev0")
    del c["attention_bias"]
    return dict(style="qwen", d=d, config=c, ids=ids, cls="MixtralForCausalLM", tied=False, rename=minimax_names)

def fam_qwen3_next(a):
    d = dims(a, hidden=128, heads=6, kv_heads=3, head_dim=32, layers=4, inter=208, vocab=2048, experts=7, topk=3, moe_inter=80)
    lin = {k: getattr(a, k, None) or v for k, v in (("linear_num_key_heads", 3), ("linear_num_value_heads", 6), ("linear_key_head_dim", 32),
                                                    ("linear_value_head_dim", 32))}
    c = base_text(d, architectures=["Qwen3NextForCausalLM"], model_type="qwen3_next", full_attention_interval=4, head_dim=d.head_dim,
                  linear_conv_kernel_dim=4, **lin, partial_rotary_factor=0.25, rms_norm_eps=1e-6, rope_scaling=None, rope_theta=10000000,
                  shared_expert_intermediate_size=d.moe_inter, tie_word_embeddings=False, torch_dtype="bfloat16",
                  transformers_version="4.57.0.dev0", use_sliding_window=False, **moe_keys(d))
    del c["attention_bias"]
    def mtp(sd, g):
        pre = f"model.layers.{d.layers - 1}."
        o = {"mtp.layers.0." + n[len(pre):]: torch.randn(x.shape, generator=g) * 0.05 for n, x in sd.items() if n.startswith(pre)}
        o["mtp.fc.weight"] = torch.randn(d.hidden, 2 * d.hidden, generator=g) * 0.05
        for k in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"): o[f"mtp.{k}.weight"] = torch.randn(d.hidden, generator=g) * 0.1
        return o
    return dict(style="qwen", d=d, config=c, ids=ids, cls="Qwen3NextForCausalLM", tied=False, zero_centred=True, rename=split_experts, mtp=mtp)
