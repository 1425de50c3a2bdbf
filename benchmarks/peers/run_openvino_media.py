"""OpenVINO GenAI as a peer of benchmarks/compare_media.py: `python run_openvino_media.py WORKLOAD RESULT`.

Runs without tilerank in a Python environment that has openvino-genai, Pillow, and optimum-intel with a version of
transformers from which it can convert the model (4.57 for Qwen3-VL). WORKLOAD and RESULT are those of
run_transformers_media.py, without `preprocessing`: GenAI reports the time of pixels to embeddings as a whole, here
`tower`. The converted model lies beside WORKLOAD.
"""

import base64
import io
import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def main(workload: dict[str, Any], model_dir: Path) -> dict[str, Any]:
    os.sched_setaffinity(0, workload["cores"])  # before threads start: they inherit it
    import numpy
    import openvino
    import openvino_genai as genai
    from optimum.exporters.openvino import main_export
    from PIL import Image

    main_export(workload["model"], str(model_dir), task="image-text-to-text", convert_tokenizer=True)
    computes_bf16 = "BF16" in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    properties = {
        "INFERENCE_PRECISION_HINT": "bf16" if workload["dtype"] == "bfloat16" and computes_bf16 else "f32",
        "INFERENCE_NUM_THREADS": len(workload["cores"]),
        "PERFORMANCE_HINT": "LATENCY",
    }
    pipeline = genai.VLMPipeline(str(model_dir), "CPU", **properties)
    settings = genai.GenerationConfig()
    settings.max_new_tokens, settings.ignore_eos = 1, True
    settings.apply_chat_template = False  # the text comes from it

    def run(file: str) -> dict[str, float]:
        data = base64.b64decode(file)
        began = time.perf_counter()
        picture = numpy.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
        decoded = time.perf_counter()
        answer = pipeline.generate(
            workload["texts"]["image"], images=[openvino.Tensor(picture[None])], generation_config=settings
        )
        ended = time.perf_counter()
        embedded_s = answer.perf_metrics.get_prepare_embeddings_duration().mean / 1000
        return {"decode": decoded - began, "tower": embedded_s, "first token": ended - began}

    sizes = [[run(file) for file in files] for _, files in workload["sizes"]]
    return {"version": genai.__version__, "sizes": sizes}


if __name__ == "__main__":
    workload_file, result_file = map(Path, sys.argv[1:])
    result = main(json.loads(workload_file.read_text()), workload_file.parent / "ir")
    result_file.write_text(json.dumps(result))
