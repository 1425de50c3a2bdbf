"""What transformers computes with a real model in fp32. Two scripts in one.

    python oracle.py convert FILE.gguf OUT   the values of a GGUF file in fp32 as a Hugging Face directory
    python oracle.py answer JOB.json         what transformers answers

transformers converts in an environment that has `gguf` and `accelerate` as well. JOB.json: {"model": directory,
"prompts": [text, ...], "new_tokens": n, "windows": [[token id, ...], ...], "out": file}. The file has for prompt i
`i.token_ids`, the prompt and n greedy tokens, and `i.logits` [n, vocab], the logits from which they were chosen; and
`losses`, -log p of each token of the windows after the first of each.
"""

import json
import sys
from pathlib import Path
from typing import Any


def convert(gguf: Path, out: Path) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source: dict[str, Any] = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    model: Any = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    part = out.with_suffix(".part")
    part.mkdir(parents=True)
    config = model.config.to_dict() | {"torch_dtype": "float32", "architectures": [type(model).__name__]}
    kept = {key: value for key, value in config.items() if key not in ("dtype", "quantization_config")}
    (part / "config.json").write_text(json.dumps(kept))
    tensors = {name: value.contiguous() for name, value in model.state_dict().items()}
    del tensors["lm_head.weight"]  # tied
    save_file(tensors, part / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save_pretrained(part)
    model.generation_config.save_pretrained(part)
    part.rename(out)


def answer(job: dict[str, Any]) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    tokenizer: Any = AutoTokenizer.from_pretrained(job["model"])
    load: Any = AutoModelForCausalLM.from_pretrained
    model = load(job["model"], dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    found, losses, new = {}, [torch.empty(0)], job["new_tokens"]
    with torch.inference_mode():
        for i, prompt in enumerate(job["prompts"]):
            ids = torch.tensor([tokenizer.encode(prompt)])
            ids = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new, pad_token_id=0
            )
            found[f"{i}.token_ids"] = ids[0].clone()
            found[f"{i}.logits"] = model(ids).logits[0, -new - 1 : -1].float().clone()
        for window in job["windows"]:
            logits = model(torch.tensor([window])).logits[0, :-1].float()
            losses.append(torch.nn.functional.cross_entropy(logits, torch.tensor(window[1:]), reduction="none"))
    save_file(found | {"losses": torch.cat(losses)}, job["out"])


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["convert", gguf, out]:
            convert(Path(gguf), Path(out))
        case ["answer", job]:
            answer(json.loads(Path(job).read_text()))
