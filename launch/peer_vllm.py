"""vLLM's CPU backend as a peer of `tilerank bench compare`: `python peer_vllm.py JOB RESULT`.

Stands alone, so that any Python which has the peer can run it. What JOB and RESULT hold is said in bench_compare.py. A
step is one of its engine, in this process, which has one worker with a thread for each core.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def main(job: dict[str, Any]) -> dict[str, Any]:
    os.sched_setaffinity(0, job["cores"])  # before threads start, which inherit it
    os.environ |= {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, job["cores"])),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    import vllm

    longest = max(len(prompt) + case["new_tokens"] for case in job["cases"] for prompt in case["prompts"])
    began = time.monotonic()
    engine = vllm.LLM(
        job["model"],
        dtype=job["dtype"],
        skip_tokenizer_init=True,
        max_model_len=longest + 64,
        max_num_seqs=max(len(case["prompts"]) for case in job["cases"]),
        enable_prefix_caching=False,
        enforce_eager=True,  # else it compiles for longer than all cases take
    ).llm_engine
    load_s = time.monotonic() - began

    def run(prompts: list[list[int]], new_tokens: int) -> list[tuple[int, float]]:
        settings = vllm.SamplingParams(temperature=0, max_tokens=new_tokens + 1, ignore_eos=True, detokenize=False)
        began = time.monotonic()
        for number, prompt in enumerate(prompts):
            engine.add_request(str(number), {"prompt_token_ids": prompt}, settings)
        events, made = [], [0] * len(prompts)
        while engine.has_unfinished_requests():
            outputs = engine.step()
            seconds = time.monotonic() - began
            for output in outputs:
                number, count = int(output.request_id.partition("-")[0]), len(output.outputs[0].token_ids)
                events += [(number, seconds)] * (count - made[number])
                made[number] = count
        return events

    for case in job["cases"]:
        run(case["prompts"], 2)  # of the same shapes, for which some prepare kernels
    ready_at = time.monotonic()
    events = [run(case["prompts"], case["new_tokens"]) for case in job["cases"]]
    return {"version": vllm.__version__, "load_s": load_s, "ready_at": ready_at, "events": events}


if __name__ == "__main__":
    job_file, result_file = map(Path, sys.argv[1:])
    result_file.write_text(json.dumps(main(json.loads(job_file.read_text()))))
