"""OpenVINO GenAI as a peer of `tilerank bench compare`: `python peer_openvino.py JOB RESULT`.

Stands alone, so that any Python which has the peer (openvino-genai, and optimum-intel to convert the model) can run it.
What JOB and RESULT hold is said in bench_compare.py. A step is one of its continuous batching, all prompts at once.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def convert(job: dict[str, Any], target: Path) -> None:
    """Writes the model as OpenVINO wants it, weights as they are or as codes, unless an earlier run did."""
    if target.exists():
        return
    from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig

    codes: dict[str, Any] = {"load_in_8bit": False}
    if job["quantization"] == "int8":
        codes = {"quantization_config": OVWeightQuantizationConfig(bits=8, sym=True)}
    elif job["quantization"] == "int4":
        config = OVWeightQuantizationConfig(bits=4, sym=True, group_size=job["group"])  # 8 bits of the head, as ours
        codes = {"quantization_config": config}
    made = target.with_suffix(".part")
    OVModelForCausalLM.from_pretrained(job["model"], export=True, compile=False, **codes).save_pretrained(made)
    made.rename(target)


def main(job: dict[str, Any]) -> dict[str, Any]:
    os.sched_setaffinity(0, job["cores"])  # before threads start, which inherit it
    began = time.monotonic()
    kind = {None: "ir", "int8": "ir-int8", "int4": f"ir-int4-{job['group']}"}[job["quantization"]]
    files = Path(job["scratch"]) / kind
    convert(job, files)
    converted_s = time.monotonic() - began
    import numpy
    import openvino
    import openvino_genai as genai

    # Where the CPU has no bf16 instructions it takes the hint for its keys and values, and then fails on them.
    computes_bf16 = "BF16" in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    properties = {
        "INFERENCE_PRECISION_HINT": "bf16" if job["dtype"] == "bfloat16" and computes_bf16 else "f32",
        "INFERENCE_NUM_THREADS": len(job["cores"]),
        "PERFORMANCE_HINT": "LATENCY",
        "CACHE_DIR": str(Path(job["scratch"]) / "compiled"),
    }
    scheduler = genai.SchedulerConfig()
    scheduler.max_num_batched_tokens = 8192  # prompts whole
    began = time.monotonic()
    pipeline = genai.ContinuousBatchingPipeline(str(files), scheduler, "CPU", properties)
    load_s = time.monotonic() - began

    def run(prompts: list[list[int]], new_tokens: int) -> list[tuple[int, float]]:
        settings = genai.GenerationConfig()
        settings.max_new_tokens = settings.min_new_tokens = new_tokens + 1
        settings.ignore_eos = True
        began = time.monotonic()
        handles = [
            pipeline.add_request(number, openvino.Tensor(numpy.array([prompt])), settings)
            for number, prompt in enumerate(prompts)
        ]
        events = []
        while pipeline.has_non_finished_requests():
            pipeline.step()
            seconds = time.monotonic() - began
            for number, handle in enumerate(handles):
                if handle.can_read():
                    made = [token for one in handle.read().values() for token in one.generated_ids]
                    events += [(number, seconds)] * len(made)
        return events

    for case in job["cases"]:
        run(case["prompts"], 2)  # of the same shapes, for which some prepare kernels
    ready_at = time.monotonic()
    events = [run(case["prompts"], case["new_tokens"]) for case in job["cases"]]
    return {"version": genai.__version__, "load_s": load_s, "ready_at": ready_at - converted_s, "events": events}


if __name__ == "__main__":
    job_file, result_file = map(Path, sys.argv[1:])
    result_file.write_text(json.dumps(main(json.loads(job_file.read_text()))))
