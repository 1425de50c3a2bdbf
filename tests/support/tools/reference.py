"""What other implementations compute of tiny checkpoints: the numbers of the conformance tests. A script.

    python reference.py JOB.json

JOB.json: {"out": directory, "models": {name: {"by": module, "family", "seed", ...}}, "new_tokens": n}. For every model it makes the checkpoint `out/<name>`, unless it is there ("resaved": as transformers 5 saves
it), and writes `out/<name>.safetensors`, what the function `reference` of the module returns. That has, for prompt p:
`p.token_ids` (the prompt and n greedy tokens of fp32), `p.float32` and `p.bfloat16`, the logits [tokens, vocab] of one
forward pass in that dtype, as fp32; with a multi-token-prediction head also `p.draft` and `p.drafts` (reference_mtp.py).
If the model takes media, for medium i: `media.i.frames` uint8, `media.i.grid`,
`media.i.float32` and `media.i.bfloat16`, the levels of its encoding; and `p.media`, the numbers of the media of prompt p
(empty: text alone).
"""

import gc
import importlib
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
gc.disable()  # it takes a third of the time in which torch and transformers are imported

import torch
from safetensors.torch import save_file

INPUTS = ("by", "options", "prompts", "cases", "clips", "short", "frames", "samplings")
"""What models have beside the options of make_tiny.py."""


def make(model_dir: Path, family: str, seed: int, *, resaved: bool = False, **dims: Any) -> None:
    import tiny
    from transformers import AutoModelForCausalLM

    made = tiny.make_checkpoint(family, model_dir.parent, seed, **dims)
    if resaved:
        AutoModelForCausalLM.from_pretrained(made, dtype=torch.bfloat16).save_pretrained(model_dir)
    else:
        shutil.copytree(made, model_dir)


def main(job: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    out = Path(job["out"])
    for name, model in job["models"].items():
        by = importlib.import_module(model["by"])  # first, because it may choose the torchvision that transformers finds
        if not (out / name).exists():
            make(out / name, **{key: value for key, value in model.items() if key not in INPUTS})
        torch.manual_seed(model["seed"])
        save_file(by.reference(out / name, job["new_tokens"], model), out / f"{name}.safetensors")


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
    os._exit(0)  # at once: to take the modules apart takes a second
