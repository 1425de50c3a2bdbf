"""The part of transformers in reference.py for models of text alone, whose prompts the job gives: {"prompts": [[id, ...],
...]}.

With "int8_inputs", the arguments of Int8Inputs, `p.int8` has the logits in bfloat16 with inputs of 8 bits.
"""

import re
from pathlib import Path
from typing import Any

import reference_mtp
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

PROJECTION = re.compile(r"_proj(_with_mqa)?(\.weight)?$")


class Int8Inputs(TorchFunctionMode):
    """Rounds the inputs of projections to 8 bits, with a scale for `group` inputs of each token; products are computed
    in fp32.

    One scale for a token (group 0) is what the settings of w8a8 checkpoints define ("dynamic", by "token"). but: parts
    of the names of projections whose inputs stay as they are.
    """

    def __init__(self, model: torch.nn.Module, but: list[str], group: int) -> None:
        super().__init__()
        self.group = group
        named = [(name, p) for name, p in model.named_parameters() if PROJECTION.search(name)]
        chosen = [p for name, p in named if not any(part in name for part in but)]
        self.places = [range(p.data_ptr(), p.data_ptr() + p.nbytes) for p in chosen]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # gpt-oss multiplies its experts by @, with weights [inputs, outputs].
        is_product = func in (F.linear, torch.Tensor.matmul)
        if not is_product or not any(args[1].data_ptr() in place for place in self.places):
            return func(*args, **(kwargs or {}))
        x, weight, *bias = args
        groups = x.float().unflatten(-1, (-1, self.group or x.shape[-1]))
        scales = (groups.abs().amax(-1, keepdim=True) / 127).clamp(min=1e-30)
        rounded = ((groups / scales).round() * scales).flatten(-2)
        return func(rounded, weight.float(), *(b if b is None else b.float() for b in bias)).to(x.dtype)


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
            ids = answer[f"{i}.token_ids"]
            if dtype is torch.float32:
                found = reference_mtp.drafts(model, model_dir, ids)
                answer |= {f"{i}.{name}": x for name, x in found.items()}
            logits = model(ids[None]).logits[0]
            answer[f"{i}.{str(dtype).removeprefix('torch.')}"] = logits.float()
    if (inputs := job.get("int8_inputs")) is not None:
        model.set_experts_implementation("eager")  # by products, which the mode sees
        with Int8Inputs(model, **inputs):
            for i in range(len(job["prompts"])):
                answer[f"{i}.int8"] = model(answer[f"{i}.token_ids"][None]).logits[0].float()
    return answer
