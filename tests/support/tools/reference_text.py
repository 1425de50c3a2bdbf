"""The part of transformers in reference.py for models of text alone, whose prompts the job gives: {"prompts": [[id, ...],
...]}."""

from pathlib import Path
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText


@torch.inference_mode()
def reference(model_dir: Path, new_tokens: int, job: dict[str, Any]) -> dict[str, torch.Tensor]:
    answer = {}
    of_text = type(AutoConfig.from_pretrained(model_dir)) in MODEL_FOR_CAUSAL_LM_MAPPING
    auto = AutoModelForCausalLM if of_text else AutoModelForImageTextToText
    for dtype in (torch.float32, torch.bfloat16):
        model: Any = auto.from_pretrained(model_dir, dtype=dtype)
        model.eval()
        model.generation_config.eos_token_id = None
        for i, prompt in enumerate(job["prompts"]):
            if dtype is torch.float32:
                ids = torch.tensor([prompt])
                answer[f"{i}.token_ids"] = model.generate(
                    ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new_tokens, pad_token_id=0
                )[0]
            logits = model(answer[f"{i}.token_ids"][None]).logits[0]
            answer[f"{i}.{str(dtype).removeprefix('torch.')}"] = logits.float()
    return answer
