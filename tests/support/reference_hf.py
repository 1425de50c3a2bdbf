"""Results of transformers, the reference of the exactness tests. A script, so that each session runs it once.

    python reference_hf.py JOB.json

JOB.json: {"out": directory, "models": [{"name", "family", "seed", "prompts": [[id, ...], ...], ...dims}, ...],
"new_tokens": n}. For every model it makes the checkpoint `out/<name>` and writes `out/<name>.safetensors` with, for
prompt i: `i.token_ids` (the prompt and n greedy tokens of fp32), `i.float32` and `i.bfloat16`, the logits
[len(token_ids), vocab] of one forward pass in that dtype, as fp32.
"""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tiny
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config, Qwen3MoeConfig


def save_special(family: str, out: Path, seed: int, dims: dict[str, Any]) -> None:
    """Write checkpoints that make_tiny.py has no option for: biases, mixtures with dense layers, weights that are not
    renormalised, and the config.json of transformers 5.
    """
    shape = {
        "hidden_size": dims["hidden"],
        "intermediate_size": dims["inter"],
        "num_attention_heads": dims["heads"],
        "num_key_value_heads": dims["kv_heads"],
        "head_dim": dims["head_dim"],
        "num_hidden_layers": dims["layers"],
        "vocab_size": dims["vocab"],
        "max_position_embeddings": 512,
    }
    if family == "llama_biases":
        config: Any = LlamaConfig(**shape, attention_bias=True, mlp_bias=True)
    elif family == "qwen3_biases":
        config = Qwen3Config(**shape, attention_bias=True)
    else:
        config = Qwen3MoeConfig(
            **shape,
            num_experts=dims["experts"],
            num_experts_per_tok=dims["topk"],
            moe_intermediate_size=dims["moe_inter"],
            norm_topk_prob=False,
            decoder_sparse_step=2,  # layers 1 and 3
            mlp_only_layers=[3],
        )
    torch.manual_seed(seed)
    build: Callable[..., Any] = AutoModelForCausalLM.from_config
    model = build(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim >= 2:
                weight.normal_(0, 1.5 * weight.shape[-1] ** -0.5)
            elif name.endswith("bias"):
                weight.normal_(0, 0.2)
            else:
                weight.normal_(1, 0.1)
    model.to(torch.bfloat16).save_pretrained(out)


def make(family: str, out: Path, seed: int, dims: dict[str, Any]) -> None:
    if family.endswith(("_biases", "_some_dense")):
        save_special(family, out, seed, dims)
    else:
        shutil.move(tiny.make_checkpoint(family, out.parent, seed, **dims), out)


@torch.inference_mode()
def reference(model_dir: Path, prompts: list[list[int]], new_tokens: int) -> dict[str, torch.Tensor]:
    answer = {}
    for dtype in (torch.float32, torch.bfloat16):
        model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype)
        model.eval()
        model.generation_config.eos_token_id = None
        for i, prompt in enumerate(prompts):
            if dtype is torch.float32:
                ids = torch.tensor([prompt])
                answer[f"{i}.token_ids"] = model.generate(
                    ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new_tokens, pad_token_id=0
                )[0]
            logits = model(answer[f"{i}.token_ids"][None]).logits[0]
            answer[f"{i}.{str(dtype).removeprefix('torch.')}"] = logits.float()
    return answer


def main(job: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    out = Path(job["out"])
    for model in job["models"]:
        dims = {key: value for key, value in model.items() if key not in ("name", "family", "seed", "prompts")}
        make(model["family"], out / model["name"], model["seed"], dims)
        tensors = reference(out / model["name"], model["prompts"], job["new_tokens"])
        save_file(tensors, out / f"{model['name']}.safetensors")


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
