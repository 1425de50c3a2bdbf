"""transformers as a peer of benchmarks/compare_media.py: `python run_transformers_media.py WORKLOAD RESULT`.

Runs without tilerank in a Python environment that has transformers, torchvision and Pillow. WORKLOAD: `model`, `dtype`
and `cores` as in benchmarks/compare.py, `texts` (of the prompt, from the chat template, by kind of medium),
`next_tokens` (how many follow the first one) and `sizes`, each a kind and a list of media: files in base64.
RESULT: `version`, and `sizes`, each with a dict of seconds for each file: `decode`, `preprocessing` (its fast
processor), `tower`, `first token` (of all of these and one pass of the language model) and `next token` (the mean).
"""

import base64
import io
import json
import os
import sys
import time
import wave
from pathlib import Path
from typing import Any


class Clock:
    """A streamer of `generate` that notes when it yields its prompt and each token."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, _: Any) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None: ...


class Pictures:
    """The steps of a picture."""

    def __init__(self, processor: Any, model: Any) -> None:
        from PIL import Image  # here, since `decode` is timed

        self._processor, self._model, self._open = processor, model, Image.open

    def decode(self, data: bytes) -> Any:
        return self._open(io.BytesIO(data)).convert("RGB")

    def inputs(self, text: str, picture: Any) -> Any:
        return self._processor(text=[text], images=[picture], return_tensors="pt")

    def preprocess(self, picture: Any) -> Any:
        return self._processor.image_processor(images=[picture], return_tensors="pt")

    def encode(self, found: Any) -> None:
        pixels = found["pixel_values"].to(self._model.dtype)
        if "image_grid_thw" in found:
            self._model.model.visual(pixels, grid_thw=found["image_grid_thw"])
        else:  # Llama-3.2-Vision
            self._model.model.vision_model(pixels, found["aspect_ratio_ids"], found["aspect_ratio_mask"])


class Sounds:
    """The steps of a WAV file of one channel, 16 bits and 16 kHz."""

    def __init__(self, processor: Any, model: Any) -> None:
        import numpy

        self._processor, self._model, self._numpy = processor, model, numpy

    def decode(self, data: bytes) -> Any:
        numpy = self._numpy
        with wave.open(io.BytesIO(data)) as file:
            return numpy.frombuffer(file.readframes(file.getnframes()), numpy.int16).astype(numpy.float32) / 32768

    def inputs(self, text: str, samples: Any) -> Any:
        return self._processor(text=[text], audio=[samples], return_tensors="pt")

    def preprocess(self, samples: Any) -> Any:
        return self._processor.feature_extractor(
            [samples], sampling_rate=16000, padding=True, truncation=False, return_tensors="pt"
        )

    def encode(self, found: Any) -> None:
        import torch

        features = found["input_features"]
        self._model.get_audio_features(features, torch.ones(1, features.shape[2], dtype=torch.long))


def measured(model: Any, steps: Pictures | Sounds, data: bytes, text: str, next_tokens: int) -> dict[str, float]:
    """Return the seconds of each step of one file."""
    began = time.perf_counter()
    medium = steps.decode(data)
    decoded = time.perf_counter()
    clock = Clock()
    inputs = steps.inputs(text, medium)
    model.generate(**inputs, max_new_tokens=next_tokens + 1, do_sample=False, streamer=clock)
    _, first, *_, last = clock.times
    ended = time.perf_counter()
    found = steps.preprocess(medium)
    processed = time.perf_counter()
    steps.encode(found)
    encoded = time.perf_counter()
    return {
        "decode": decoded - began,
        "preprocessing": processed - ended,
        "tower": encoded - processed,
        "first token": first - began,
        "next token": (last - first) / next_tokens,
    }


def main(workload: dict[str, Any]) -> dict[str, Any]:
    os.sched_setaffinity(0, workload["cores"])  # before torch starts threads: they inherit it
    import torch
    import transformers

    torch.set_num_threads(len(workload["cores"]))
    library: Any = transformers
    processor = library.AutoProcessor.from_pretrained(workload["model"], use_fast=True)
    dtype = getattr(torch, workload["dtype"])
    model = library.AutoModelForMultimodalLM.from_pretrained(workload["model"], dtype=dtype)
    model = getattr(model, "thinker", model)
    model.generation_config.eos_token_id = None
    steps: dict[str, Pictures | Sounds] = {"image": Pictures(processor, model), "audio": Sounds(processor, model)}
    texts, next_tokens = workload["texts"], workload["next_tokens"]
    with torch.inference_mode():
        sizes = [
            [measured(model, steps[kind], base64.b64decode(file), texts[kind], next_tokens) for file in files]
            for kind, files in workload["sizes"]
        ]
    return {"version": transformers.__version__, "sizes": sizes}


if __name__ == "__main__":
    workload_file, result_file = map(Path, sys.argv[1:])
    result_file.write_text(json.dumps(main(json.loads(workload_file.read_text()))))
