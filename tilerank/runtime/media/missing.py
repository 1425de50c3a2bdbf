"""What is missing for model families that do not run."""

_MISSING = {
    "gemma4_unified": "an encoder that takes raw patches and sound",
    "gemma4_assistant": "drafts that read the keys of another model",
    "diffusion_gemma": "generation by diffusion",
    "gemma3n": "alternating updates of several streams",
    "deepseek_v32": "the sparse attention of DeepSeek-V3.2",
    "glm_moe_dsa": "the sparse attention of GLM-5",
    "glm4v_moe": "the vision tower of GLM-4.5V",
    "minimax_m3": "the sparse attention and the clamped activation of MiniMax-M3",
    "mistral4": "the latent attention of Mistral Small 4, beside a mixture of experts in its own layout",
    "qwen4_exp": "the hyper-connections, sparse attention and embeddings of n-grams of Qwen3.8-Flash-Next",
}
"""By `model_type`."""


def missing_for(model_type: str) -> str:
    """Return the end of an error about a family that does not run: what it needs, or nothing if it is unknown."""
    return f" ({model_type} needs {_MISSING[model_type]}, not supported yet)" if model_type in _MISSING else ""
