"""The transformers library as a peer of `tilerank bench compare`: `python peer_transformers.py JOB RESULT`.

Stands alone, so that any Python which has the peer can run it. What JOB and RESULT hold is said in
bench_compare.py. A step is one eager forward pass with a cache, without the rest of `generate`.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def main(job: dict[str, Any]) -> dict[str, Any]:
    os.sched_setaffinity(0, job["cores"])  # before torch starts threads, which inherit it
    import torch
    import transformers

    torch.set_num_threads(len(job["cores"]))
    began = time.monotonic()
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(job["model"], dtype=getattr(torch, job["dtype"]))
    load_s = time.monotonic() - began

    def run(prompts: list[list[int]], new_tokens: int) -> list[tuple[int, float]]:
        began = time.monotonic()
        ids = torch.tensor(prompts)
        cache = None
        events = []
        for _ in range(new_tokens + 1):
            out = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache = out.past_key_values
            ids = out.logits[:, -1:].argmax(-1)
            seconds = time.monotonic() - began
            events += [(prompt, seconds) for prompt in range(len(prompts))]
        return events

    with torch.inference_mode():
        for case in job["cases"]:
            run(case["prompts"], 2)  # of the same shapes, for which some prepare kernels
        ready_at = time.monotonic()
        events = [run(case["prompts"], case["new_tokens"]) for case in job["cases"]]
    return {"version": transformers.__version__, "load_s": load_s, "ready_at": ready_at, "events": events}


if __name__ == "__main__":
    job_file, result_file = map(Path, sys.argv[1:])
    result_file.write_text(json.dumps(main(json.loads(job_file.read_text()))))
