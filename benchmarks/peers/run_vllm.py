"""vLLM's CPU backend as a peer of benchmarks/compare.py: `python run_vllm.py WORKLOAD RESULT`.

Runs without tilerank in a Python environment that has vLLM. The docstring of PEERS in benchmarks/compare.py describes
WORKLOAD and RESULT. A step is one step of its engine, in this process, with one worker that has a thread for each core.
Drafts are those of its n-grams.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

DRAFTS, NGRAM = 5, 4  # as in its documentation of n-grams


def main(workload: dict[str, Any]) -> dict[str, Any]:
    os.sched_setaffinity(0, workload["cores"])  # before threads start: they inherit it
    os.environ |= {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, workload["cores"])),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    import vllm

    longest = max(len(prompt) + case["new_tokens"] for case in workload["cases"] for prompt in case["prompts"])
    lookup = {"method": "ngram", "num_speculative_tokens": DRAFTS, "prompt_lookup_max": NGRAM}
    start = time.monotonic()
    engine = vllm.LLM(
        workload["model"],
        dtype=workload["dtype"],
        skip_tokenizer_init=True,
        max_model_len=longest + 64,
        max_num_seqs=max(len(case["prompts"]) for case in workload["cases"]),
        enable_prefix_caching=False,
        enforce_eager=True,  # compilation takes longer than all cases
        speculative_config=lookup if workload["drafts"] else None,
    ).llm_engine
    load_s = time.monotonic() - start

    def run(case: dict[str, Any], new_tokens: int) -> list[tuple[int, float]]:
        prompts = case["prompts"]
        settings = vllm.SamplingParams(
            temperature=0,
            max_tokens=new_tokens + 1,
            ignore_eos=True,
            stop_token_ids=case["end_token_ids"],
            detokenize=False,
        )
        start = time.monotonic()
        for number, prompt in enumerate(prompts):
            engine.add_request(str(number), {"prompt_token_ids": prompt}, settings)
        events, counts = [], [0] * len(prompts)
        while engine.has_unfinished_requests():
            outputs = engine.step()
            seconds = time.monotonic() - start
            for output in outputs:
                number, count = int(output.request_id.partition("-")[0]), len(output.outputs[0].token_ids)
                events += [(number, seconds)] * (count - counts[number])
                counts[number] = count
        return events

    for case in workload["cases"]:
        run(case, 2)  # warm-up: some systems prepare kernels for each shape
    ready_at = time.monotonic()
    events = [run(case, case["new_tokens"]) for case in workload["cases"]]
    return {"version": vllm.__version__, "load_s": load_s, "ready_at": ready_at, "events": events}


if __name__ == "__main__":
    workload_file, result_file = map(Path, sys.argv[1:])
    result_file.write_text(json.dumps(main(json.loads(workload_file.read_text()))))
