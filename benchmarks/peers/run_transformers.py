"""The transformers library as a peer of benchmarks/compare.py: `python run_transformers.py WORKLOAD RESULT`.

Runs without tilerank in a Python environment that has transformers. The docstring of PEERS in benchmarks/compare.py
describes WORKLOAD and RESULT. A step is one eager forward pass with a cache and an argmax, without the rest of
`generate`.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def main(workload: dict[str, Any]) -> dict[str, Any]:
    os.sched_setaffinity(0, workload["cores"])  # before torch starts threads: they inherit it
    import torch
    import transformers

    torch.set_num_threads(len(workload["cores"]))
    start = time.monotonic()
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        workload["model"], dtype=getattr(torch, workload["dtype"])
    )
    load_s = time.monotonic() - start

    def run(prompts: list[list[int]], new_tokens: int) -> list[tuple[int, float]]:
        start = time.monotonic()
        ids = torch.tensor(prompts)
        cache = None
        events = []
        for _ in range(new_tokens + 1):
            out = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache = out.past_key_values
            ids = out.logits[:, -1:].argmax(-1)
            seconds = time.monotonic() - start
            events += [(prompt, seconds) for prompt in range(len(prompts))]
        return events

    with torch.inference_mode():
        for case in workload["cases"]:
            run(case["prompts"], 2)  # warm-up: some systems prepare kernels for each shape
        ready_at = time.monotonic()
        events = [run(case["prompts"], case["new_tokens"]) for case in workload["cases"]]
    return {"version": transformers.__version__, "load_s": load_s, "ready_at": ready_at, "events": events}


if __name__ == "__main__":
    workload_file, result_file = map(Path, sys.argv[1:])
    result_file.write_text(json.dumps(main(json.loads(workload_file.read_text()))))
