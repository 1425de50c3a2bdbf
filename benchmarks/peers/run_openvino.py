"""OpenVINO GenAI as a peer of benchmarks/compare.py: `python run_openvino.py WORKLOAD RESULT`.

Runs without tilerank in a Python environment that has openvino-genai, and optimum-intel to convert the model.
The docstring of PEERS in benchmarks/compare.py describes WORKLOAD and RESULT. A step is one step of its continuous
batching pipeline over all prompts. Drafts are those of its prompt lookup.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

DRAFTS, NGRAM = 5, 3  # as in its sample of prompt lookup


def convert(workload: dict[str, Any], target: Path) -> None:
    """Write the model as OpenVINO IR, with its weights unchanged or quantised. Does nothing if `target` exists."""
    if target.exists():
        return
    from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig

    options: dict[str, Any] = {"load_in_8bit": False}
    if workload["quantization"] == "int8":
        options = {"quantization_config": OVWeightQuantizationConfig(bits=8, sym=True)}
    elif workload["quantization"] == "int4":
        # It keeps the output head in 8 bits, as tilerank does.
        options = {"quantization_config": OVWeightQuantizationConfig(bits=4, sym=True, group_size=workload["group"])}
    partial_dir = target.with_suffix(".part")
    model = OVModelForCausalLM.from_pretrained(workload["model"], export=True, compile=False, **options)
    model.save_pretrained(partial_dir)
    partial_dir.rename(target)


def main(workload: dict[str, Any]) -> dict[str, Any]:
    os.sched_setaffinity(0, workload["cores"])  # before threads start: they inherit it
    start = time.monotonic()
    name = {None: "ir", "int8": "ir-int8", "int4": f"ir-int4-{workload['group']}"}[workload["quantization"]]
    model_dir = Path(workload["scratch"]) / name
    convert(workload, model_dir)
    converted_s = time.monotonic() - start
    import numpy
    import openvino
    import openvino_genai as genai

    # On a CPU without bf16 instructions, the bf16 hint would set the type of its KV cache, and the pipeline would fail.
    computes_bf16 = "BF16" in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    properties = {
        "INFERENCE_PRECISION_HINT": "bf16" if workload["dtype"] == "bfloat16" and computes_bf16 else "f32",
        "INFERENCE_NUM_THREADS": len(workload["cores"]),
        "PERFORMANCE_HINT": "LATENCY",
        "CACHE_DIR": str(Path(workload["scratch"]) / "compiled"),
    } | ({"prompt_lookup": True} if workload["drafts"] else {})
    scheduler = genai.SchedulerConfig()
    scheduler.max_num_batched_tokens = 8192  # no chunked prefill
    start = time.monotonic()
    pipeline = genai.ContinuousBatchingPipeline(str(model_dir), scheduler, "CPU", properties)
    load_s = time.monotonic() - start

    def run(case: dict[str, Any], new_tokens: int) -> list[tuple[int, float]]:
        settings = genai.GenerationConfig()
        settings.max_new_tokens = new_tokens + 1
        settings.stop_token_ids = set(case["end_token_ids"])
        settings.ignore_eos = not settings.stop_token_ids
        if workload["drafts"]:
            settings.num_assistant_tokens, settings.max_ngram_size = DRAFTS, NGRAM
        start = time.monotonic()
        handles = [
            pipeline.add_request(number, openvino.Tensor(numpy.array([prompt])), settings)
            for number, prompt in enumerate(case["prompts"])
        ]
        events = []
        while pipeline.has_non_finished_requests():
            pipeline.step()
            seconds = time.monotonic() - start
            for number, handle in enumerate(handles):
                if handle.can_read():
                    tokens = [token for output in handle.read().values() for token in output.generated_ids]
                    events += [(number, seconds)] * len(tokens)
        return events

    for case in workload["cases"]:
        run(case, 2)  # warm-up: some systems prepare kernels for each shape
    ready_at = time.monotonic()
    events = [run(case, case["new_tokens"]) for case in workload["cases"]]
    return {"version": genai.__version__, "load_s": load_s, "ready_at": ready_at - converted_s, "events": events}


if __name__ == "__main__":
    workload_file, result_file = map(Path, sys.argv[1:])
    result_file.write_text(json.dumps(main(json.loads(workload_file.read_text()))))
