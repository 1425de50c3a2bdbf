"""The transformers library as a peer of `tilerank bench media`: `python run_transformers_media.py WORKLOAD RESULT`.

Runs without tilerank in a Python environment that has transformers, torchvision and Pillow. WORKLOAD: `model`, `dtype`
and `cores` as in bench/compare.py, `text` (of the prompt, from the chat template) and `sizes`, each a list of pictures:
files in base64. RESULT: `version`, and `sizes`, each with a dict of seconds for each picture: `decode`, `preprocessing`
(its fast processor), `tower`, and `first token` (of all of these and one pass of the language model).
"""

import base64
import io
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
    from PIL import Image

    torch.set_num_threads(len(workload["cores"]))
    dtype = getattr(torch, workload["dtype"])
    library: Any = transformers
    processor = library.AutoProcessor.from_pretrained(workload["model"], use_fast=True)
    model = library.AutoModelForImageTextToText.from_pretrained(workload["model"], dtype=dtype)

    def run(file: str) -> dict[str, float]:
        data = base64.b64decode(file)
        began = time.perf_counter()
        picture = Image.open(io.BytesIO(data)).convert("RGB")
        decoded = time.perf_counter()
        inputs = processor(text=[workload["text"]], images=[picture], return_tensors="pt")
        model(**inputs, use_cache=True, logits_to_keep=1).logits[:, -1].argmax(-1)
        ended = time.perf_counter()
        found = processor.image_processor(images=[picture], return_tensors="pt")
        processed = time.perf_counter()
        pixels = found["pixel_values"].to(dtype)
        if "image_grid_thw" in found:
            model.model.visual(pixels, grid_thw=found["image_grid_thw"])
        else:  # Llama-3.2-Vision
            model.model.vision_model(pixels, found["aspect_ratio_ids"], found["aspect_ratio_mask"])
        encoded = time.perf_counter()
        return {
            "decode": decoded - began,
            "preprocessing": processed - ended,
            "tower": encoded - processed,
            "first token": ended - began,
        }

    with torch.inference_mode():
        sizes = [[run(file) for file in files] for files in workload["sizes"]]
    return {"version": transformers.__version__, "sizes": sizes}


if __name__ == "__main__":
    workload_file, result_file = map(Path, sys.argv[1:])
    result_file.write_text(json.dumps(main(json.loads(workload_file.read_text()))))
