"""transformers as a peer of benchmarks/compare_speech.py: `python run_transformers_speech.py WORKLOAD RESULT`.

Runs without tilerank in a Python environment that has transformers. WORKLOAD: `model`, `dtype` and `cores` as in
benchmarks/compare.py, `frames` (of each sound) and `repeat`. RESULT: `version`, and `seconds`, for each number of
frames a list of the seconds that code2wav took. Its weights are random, on which the time does not depend.
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
    from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe

    torch.set_num_threads(len(workload["cores"]))
    dtype = getattr(torch, workload["dtype"])
    config = transformers.AutoConfig.from_pretrained(workload["model"]).code2wav_config
    library: Any = modeling_qwen3_omni_moe
    model = library.Qwen3OmniMoeCode2Wav._from_config(config, dtype=dtype)
    seconds = []
    with torch.inference_mode():
        for frames in workload["frames"]:
            codes = torch.zeros(1, config.num_quantizers, frames, dtype=torch.int64)
            model(codes)
            runs = []
            for _ in range(workload["repeat"]):
                began = time.perf_counter()
                model(codes)
                runs.append(time.perf_counter() - began)
            seconds.append(runs)
    return {"version": transformers.__version__, "seconds": seconds}


if __name__ == "__main__":
    workload_file, result_file = map(Path, sys.argv[1:])
    result_file.write_text(json.dumps(main(json.loads(workload_file.read_text()))))
