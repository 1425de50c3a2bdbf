"""Fields of config.json that the families of tiny checkpoints share (make_tiny.py and tiny_short.py call it)."""
import argparse

def dims(a, **d):
    """Family defaults overridden by the command line."""
    for k in ("hidden", "heads", "kv_heads", "head_dim", "layers", "inter", "vocab", "experts", "topk", "moe_inter"):
        v = getattr(a, k, None)
        if v is not None: d[k] = v
    return argparse.Namespace(**d)

def base_text(d, **extra):
    c = dict(attention_bias=False, attention_dropout=0.0, hidden_act="silu", hidden_size=d.hidden, initializer_range=0.02,
             intermediate_size=d.inter, max_position_embeddings=4096, num_attention_heads=d.heads, num_hidden_layers=d.layers,
             num_key_value_heads=d.kv_heads, use_cache=True, vocab_size=d.vocab)
    c.update(extra); return c

def moe_keys(d): return dict(decoder_sparse_step=1, mlp_only_layers=[], moe_intermediate_size=d.moe_inter, norm_topk_prob=True, num_experts=d.experts,
                             num_experts_per_tok=d.topk, output_router_logits=False, router_aux_loss_coef=0.001)
