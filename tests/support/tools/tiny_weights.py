"""The weights of tiny checkpoints: drawn, in the dtypes and the shards of the public models (make_tiny.py calls it)."""
import json, math, os, re

import torch
from safetensors.torch import save_file

BF16, F32 = torch.bfloat16, torch.float32
BOUNDS = ("input_min", "input_max", "output_min", "output_max")

def reinit(model, seed, tied, zero_centred=False):
    g = torch.Generator().manual_seed(seed)
    R = lambda p, s: torch.randn(p.shape, generator=g) * s
    U = lambda p, a, b: torch.rand(p.shape, generator=g) * (b - a) + a
    todo = list(model.named_parameters()) + [(n, b) for n, b in model.named_buffers() if n.endswith(("e_score_correction_bias", "layer_scalar", "std_bias", "std_scale", *BOUNDS))]
    unscaled = model.config.model_type.startswith("gemma4")   # scores are not divided: large ones amplify the rounding of the reference itself
    with torch.no_grad():
        for n, p in todo:
            last = n.rsplit(".", 1)[-1]
            norm = re.search(r"(norm|ln_post|ln_q|layer_norm)", n.rsplit(".", 2)[-2] if "." in n else n) or ".norms." in n
            if last == "A_log": v = U(p, 0.05, 1.0).log()
            elif last == "dt_bias": v = U(p, -1.5, 0.5)
            elif last == "e_score_correction_bias": v = R(p, 0.15)
            elif last in ("cross_attn_attn_gate", "cross_attn_mlp_gate", "gate_attn", "gate_ffn", "gate") and p.numel() == 1: v = U(p, 0.4, 0.8)
            elif last in ("alpha", "beta"): v = R(p, 0.1)
            elif last in ("layer_scalar", "std_scale"): v = U(p, 0.6, 1.4)
            elif last == "std_bias": v = R(p, 1.0)
            elif last in BOUNDS:   # some numbers are beyond each; a projection without bounds keeps the infinite ones
                v = p if "layers.1.self_attn.k_proj" in n else U(p, 0.7, 1.5) * (-1 if last.endswith("min") else 1)
            elif last == "position_embedding_table": v = R(p, 0.4)
            elif n.endswith("router.scale"): v = 1 + R(p, 0.2)
            elif last == "per_expert_scale": v = U(p, 0.5, 1.5)
            elif n.endswith("router.proj.weight"): v = R(p, 2.0)
            elif unscaled and n.endswith("q_norm.weight"): v = 0.2 + R(p, 0.02)
            elif last in ("gamma", "scale"): v = U(p, 0.2, 0.4)
            elif last == "separator_token": v = R(p, 1.0)
            elif norm and last == "weight":
                v = R(p, 0.1) if zero_centred and "visual" not in n and ".linear_attn." not in n else 1 + R(p, 0.1)
            elif last == "sinks": v = 0.5 + R(p, 1.0)
            elif last == "gate_up_proj_bias" or last == "down_proj_bias": v = R(p, 0.5)
            elif last == "gate_up_proj" and model.config.model_type == "gpt_oss":   # [experts, in, out]; some are beyond the limit
                v = R(p, 3 / math.sqrt(p.shape[-2]))
            elif last == "bias": v = R(p, 0.3 if re.search(r"[qkv]_proj\.bias$", n) and "visual" not in n else 0.1)
            elif "embed_tokens" in n: v = R(p, 3 / math.sqrt(p.shape[1]) if tied else 1.0)
            elif "codec_embedding" in n or "code_embedding" in n: v = R(p, 1.0)
            elif "pos_embed" in n: v = R(p, 0.5)
            elif "tile_embedding" in n or "positional_embedding" in n or last == "class_embedding": v = R(p, 0.4)
            elif "lm_head" in n or "codec_head" in n: v = R(p, 3 / math.sqrt(p.shape[1]))
            elif re.search(r"mlp\.(gate|router)\.weight$", n): v = R(p, 2 / math.sqrt(p.shape[1]))
            elif n.endswith("shared_expert_gate.weight"): v = R(p, 1 / math.sqrt(p.shape[1]))
            elif "conv1d.weight" in n: v = R(p, 0.6)
            elif n.startswith("code2wav.") and p.ndim == 3:       # keep the waveform inside (-1, 1)
                last_conv = n == f"code2wav.decoder.{len(model.config.code2wav_config.upsample_rates) + 2}.conv.weight"
                v = R(p, (0.12 if last_conv else 0.8) / math.sqrt(p[0].numel()))
            elif p.ndim >= 3 and "experts" not in n: v = R(p, 1.2 / math.sqrt(p[0].numel()))
            elif p.ndim >= 2:
                gain = 1.4 if re.search(r"(gate_proj|up_proj|gate_up_proj|fc1|q_proj|k_proj|q_b_proj)", n) else 1.0
                v = R(p, gain / math.sqrt(p.shape[-1]))
            else: v = R(p, 0.2)
            keep = last in ("e_score_correction_bias", "A_log") or n.endswith("linear_attn.norm.weight")
            p.copy_(v if keep else v.to(BF16).to(p.dtype))
    return g

def split_experts(sd):
    out = {}
    for n, t in sd.items():
        m = re.match(r"(.*\.mlp\.experts)\.(gate_up_proj|down_proj)$", n)
        if not m: out[n] = t; continue
        for e in range(t.shape[0]):
            if m[2] == "down_proj": out[f"{m[1]}.{e}.down_proj.weight"] = t[e].clone()
            else:
                a, b = t[e].chunk(2, 0)
                out[f"{m[1]}.{e}.gate_proj.weight"], out[f"{m[1]}.{e}.up_proj.weight"] = a.clone(), b.clone()
    return out

def to_disk_dtype(sd, all_bf16=False):
    o = {}
    for n, t in sd.items():
        keep = not all_bf16 and (n.endswith("e_score_correction_bias") or n.endswith(".A_log") or n.endswith("linear_attn.norm.weight"))
        o[n] = t.detach().to(F32 if keep else BF16).contiguous() if t.is_floating_point() and t.dtype in (F32, BF16, torch.float16) else t.contiguous()
    return o

def write_shards(sd, out, nshards):
    names = list(sd)
    sizes = {n: sd[n].numel() * sd[n].element_size() for n in names}
    total = sum(sizes.values())
    if nshards <= 1:
        save_file(sd, os.path.join(out, "model.safetensors"), metadata={"format": "pt"}); return
    groups, cur, acc = [], [], 0
    for n in names:
        cur.append(n); acc += sizes[n]
        if acc >= total / nshards and len(groups) < nshards - 1: groups.append(cur); cur, acc = [], 0
    groups.append(cur)
    wm = {}
    for i, gset in enumerate(groups, 1):
        fn = f"model-{i:05d}-of-{len(groups):05d}.safetensors"
        save_file({n: sd[n] for n in gset}, os.path.join(out, fn), metadata={"format": "pt"})
        wm.update({n: fn for n in gset})
    json.dump({"metadata": {"total_size": total}, "weight_map": wm}, open(os.path.join(out, "model.safetensors.index.json"), "w"), indent=2)
