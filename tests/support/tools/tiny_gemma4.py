"""The tiny checkpoints of Gemma 4 (make_tiny.py)."""
import json, os

from tiny_configs import base_text, dims

__all__ = ["fam_gemma4", "fam_gemma4_text"]

def gemma4_text(d, **extra):
    """The fields of a language model as the file of Gemma-4-26B-A4B has them; without its experts, those of 31B."""
    c = base_text(d, model_type="gemma4_text", attention_k_eq_v=True, bos_token_id=2, dtype="bfloat16", enable_moe_block=d.experts > 0, eos_token_id=1,
                  final_logit_softcapping=8.0, global_head_dim=2 * d.head_dim, head_dim=d.head_dim, hidden_activation="gelu_pytorch_tanh",
                  hidden_size_per_layer_input=0, layer_types=["full_attention" if (i + 1) % 3 == 0 else "sliding_attention" for i in range(d.layers)],
                  moe_intermediate_size=d.moe_inter if d.experts else None, num_experts=d.experts or None, num_global_key_value_heads=1,
                  num_kv_shared_layers=0, pad_token_id=0, rms_norm_eps=1e-6, rope_parameters={
                      "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 10000.0, "rope_type": "proportional"},
                      "sliding_attention": {"rope_theta": 100.0, "rope_type": "default"}},
                  sliding_window=20, tie_word_embeddings=True, top_k_experts=d.topk if d.experts else None, use_bidirectional_attention="vision",
                  use_double_wide_mlp=False, vocab_size_per_layer_input=d.vocab)
    del c["hidden_act"]
    return c | extra

def gemma4_shared(d, per_layer):
    """The fields in which Gemma-4-E2B and E4B differ: inputs of layers, and keys that layers share."""
    return dict(attention_k_eq_v=False, hidden_size_per_layer_input=per_layer, num_global_key_value_heads=None, num_kv_shared_layers=d.layers // 2,
                use_bidirectional_attention=None, use_double_wide_mlp=True)

def fam_gemma4_text(a):
    d = dims(a, hidden=128, heads=4, kv_heads=2, head_dim=32, layers=6, inter=352, vocab=2048, experts=0, topk=2, moe_inter=80)
    shared = gemma4_shared(d, a.per_layer) if getattr(a, "per_layer", 0) else {}
    c = gemma4_text(d, architectures=["Gemma4ForCausalLM"], transformers_version="5.5.0.dev0", **shared)
    def ids(t): return dict(bos_token_id=2, eos_token_id=[1, t.token_to_id("<turn|>")], pad_token_id=0)
    return dict(style="gemma4", d=d, config=c, ids=ids, cls="Gemma4ForCausalLM", tied=True, eos=["<eos>", "<turn|>"], pad="<pad>", bos="<bos>")

def gemma4_pictures(out):
    image = {"do_convert_rgb": True, "do_normalize": False, "do_rescale": True, "do_resize": True, "image_mean": [0.0] * 3, "image_std": [1.0] * 3,
             "image_processor_type": "Gemma4ImageProcessor", "image_seq_length": 280, "max_soft_tokens": 70, "patch_size": 4, "pooling_kernel_size": 3,
             "resample": 3, "rescale_factor": 1 / 255}
    whole = {"image_processor": image, "image_seq_length": 280, "processor_class": "Gemma4Processor"}
    json.dump(whole, open(os.path.join(out, "processor_config.json"), "w"), indent=2)

def fam_gemma4(a):
    """Pictures of at most 70 tokens of 3 x 3 patches of 4 pixels."""
    d = dims(a, hidden=128, heads=4, kv_heads=2, head_dim=32, layers=3, inter=352, vocab=2048, experts=0, topk=2, moe_inter=80)
    shared = gemma4_shared(d, a.per_layer) if getattr(a, "per_layer", 0) else {}
    vision = dict(attention_bias=False, default_output_length=280, dtype="bfloat16", global_head_dim=24, head_dim=24, hidden_activation="gelu_pytorch_tanh",
                  hidden_size=96, initializer_range=0.02, intermediate_size=136, max_position_embeddings=131072, model_type="gemma4_vision",
                  num_attention_heads=4, num_hidden_layers=3, num_key_value_heads=4, patch_size=4, pooling_kernel_size=3, position_embedding_size=256,
                  rms_norm_eps=1e-6, rope_parameters={"rope_theta": 100.0, "rope_type": "default"}, standardize=not shared, use_clipped_linears=bool(shared))
    c = dict(architectures=["Gemma4ForConditionalGeneration"], audio_config=None, dtype="bfloat16", initializer_range=0.02, model_type="gemma4",
             text_config=gemma4_text(d, **shared), tie_word_embeddings=True, transformers_version="5.5.0.dev0", vision_config=vision,
             vision_soft_tokens_per_image=280)
    def ids(t): return dict(boi_token_id=t.token_to_id("<|image>"), eoi_token_id=t.token_to_id("<image|>"), image_token_id=t.token_to_id("<|image|>"))
    return dict(style="gemma4", d=d, config=c, ids=ids, cls="Gemma4ForConditionalGeneration", tied=True, proc=gemma4_pictures,
                eos=["<eos>", "<turn|>"], pad="<pad>", bos="<bos>")
