"""The transformers library as a peer of `tilerank bench media`: `python run_transformers_media.py WORKLOAD RESULT`.

Runs without tilerank in a Python environment that has transformers, torchvision and Pillow. WORKLOAD: `model`, `dtype`
and `cores` as in bench/compare.py, `texts` (of the prompt, from the chat template, by kind of medium), `next_tokens`
(how many follow the first one) and `sizes`, each a kind and a list of media: files in base64. RESULT: `version`, and
`sizes`, each with a dict of seconds for each file: `decode`, `preprocessing` (its fast processor), `tower`, `first
token` (of all of these and one pass of the language model) and `next token` (the mean).
"""

import base64
import io
import json
import os
import sys
import time
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any


def main(workload: dict[str, Any]) -> dict[str, Any]:
    os.sched_setaffinity(0, workload["cores"])  # before torch starts threads: they inherit it
    import numpy
    import torch
    import transformers
    from PIL import Image

    torch.set_num_threads(len(workload["cores"]))
    dtype = getattr(torch, workload["dtype"])
    library: Any = transformers
    processor = library.AutoProcessor.from_pretrained(workload["model"], use_fast=True)
    model = library.AutoModelForMultimodalLM.from_pretrained(workload["model"], dtype=dtype)
    model = getattr(model, "thinker", model)
    model.generation_config.eos_token_id = None
    new_tokens = workload["next_tokens"] + 1

    class Clock:
        """Notes when `generate` yields its prompt and each token."""

        def __init__(self) -> None:
            self.times: list[float] = []

        def put(self, _: Any) -> None:
            self.times.append(time.perf_counter())

        def end(self) -> None: ...

    def measured(
        data: bytes,
        text: str,
        decode: Callable[[bytes], Any],
        inputs_of: Callable[[str, Any], Any],
        preprocess: Callable[[Any], Any],
        encode: Callable[[Any], Any],
    ) -> dict[str, float]:
        began = time.perf_counter()
        medium = decode(data)
        decoded = time.perf_counter()
        clock = Clock()
        model.generate(**inputs_of(text, medium), max_new_tokens=new_tokens, do_sample=False, streamer=clock)
        _, first, *_, last = clock.times
        ended = time.perf_counter()
        found = preprocess(medium)
        processed = time.perf_counter()
        encode(found)
        encoded = time.perf_counter()
        return {
            "decode": decoded - began,
            "preprocessing": processed - ended,
            "tower": encoded - processed,
            "first token": first - began,
            "next token": (last - first) / workload["next_tokens"],
        }

    def encode_picture(found: Any) -> None:
        pixels = found["pixel_values"].to(dtype)
        if "image_grid_thw" in found:
            model.model.visual(pixels, grid_thw=found["image_grid_thw"])
        else:  # Llama-3.2-Vision
            model.model.vision_model(pixels, found["aspect_ratio_ids"], found["aspect_ratio_mask"])

    def read_sound(data: bytes) -> Any:
        with wave.open(io.BytesIO(data)) as file:
            return numpy.frombuffer(file.readframes(file.getnframes()), numpy.int16).astype(numpy.float32) / 32768

    steps: dict[str, tuple[Any, ...]] = {
        "image": (
            lambda data: Image.open(io.BytesIO(data)).convert("RGB"),
            lambda text, picture: processor(text=[text], images=[picture], return_tensors="pt"),
            lambda picture: processor.image_processor(images=[picture], return_tensors="pt"),
            encode_picture,
        ),
        "audio": (
            read_sound,
            lambda text, samples: processor(text=[text], audio=[samples], return_tensors="pt"),
            lambda samples: processor.feature_extractor(
                [samples], sampling_rate=16000, padding=True, truncation=False, return_tensors="pt"
            ),
            lambda found: model.get_audio_features(
                found["input_features"], torch.ones(1, found["input_features"].shape[2], dtype=torch.long)
            ),
        ),
    }
    with torch.inference_mode():
        sizes = [
            [measured(base64.b64decode(file), workload["texts"][kind], *steps[kind]) for file in files]
            for kind, files in workload["sizes"]
        ]
    return {"version": transformers.__version__, "sizes": sizes}


if __name__ == "__main__":
    workload_file, result_file = map(Path, sys.argv[1:])
    result_file.write_text(json.dumps(main(json.loads(workload_file.read_text()))))
