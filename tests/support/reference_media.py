"""What transformers makes of pictures and videos: the oracle of the tests of media. A script of its own process.

    python reference_media.py JOB.json OUT.json

JOB.json: {"prompts": [{"directory", "text", "images": [[height, width], ...], "videos": [[total, fps, height, width],
...]}, ...], "picture_sizes": [arguments of smart_resize, ...], "video_sizes": the same, "samples": [[total, fps], ...],
"sampler": directory, "pictures": [path, ...]}. OUT.json has a list under each of these names: {"ids", "positions",
"shift", "image_grid", "video_grid"}; [height, width] or null if the size is refused; frame numbers; RGB rows in hex.

torchvision is imported from `torchvision` in the environment, because a build of it that does not fit torch makes every
other import of transformers fail (see tools/tvshim.py).
"""

import json
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(sys.prefix, "torchvision")))
sys.path.insert(0, str(Path(__file__).parent / "tools"))

import numpy as np
import torch
import tvshim  # noqa: F401 - before transformers
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor
from transformers.image_transforms import convert_to_rgb
from transformers.models.qwen2_vl import image_processing_qwen2_vl as picture_module
from transformers.models.qwen3_vl import video_processing_qwen3_vl as video_module
from transformers.video_utils import VideoMetadata


@cache
def loaded(directory: str) -> tuple[Any, Any]:
    """The processor, and a model without weights for its positions."""
    build: Callable[..., Any] = AutoModelForImageTextToText.from_config
    load: Callable[..., Any] = AutoProcessor.from_pretrained
    with torch.device("meta"):
        model = build(AutoConfig.from_pretrained(directory))
    return load(directory), model


def prompt(case: dict[str, Any]) -> dict[str, Any]:
    processor, model = loaded(case["directory"])
    videos = case["videos"]
    found = processor(
        text=[case["text"]],
        images=[Image.new("RGB", (width, height)) for height, width in case["images"]] or None,
        videos=[np.zeros((total, height, width, 3), np.uint8) for total, _, height, width in videos] or None,
        video_metadata=[VideoMetadata(total_num_frames=video[0], fps=video[1]) for video in videos] or None,
        return_tensors="pt",
    )
    image_grid, video_grid = found.get("image_grid_thw"), found.get("video_grid_thw")
    positions, shift = model.model.get_rope_index(
        found["input_ids"], found["mm_token_type_ids"], image_grid, video_grid
    )
    return {
        "ids": found["input_ids"][0].tolist(),
        "positions": positions[:, 0].tolist(),
        "shift": shift.item(),
        "image_grid": [] if image_grid is None else image_grid.tolist(),
        "video_grid": [] if video_grid is None else video_grid.tolist(),
    }


def size(module: Any, arguments: list[int]) -> list[int] | None:
    try:
        return list(module.smart_resize(*arguments))
    except ValueError:
        return None


def pixels(path: str) -> np.ndarray[Any, Any]:
    converted = convert_to_rgb(Image.open(path), return_numpy=True)
    assert isinstance(converted, np.ndarray)
    return converted


def main(job_path: str, out_path: str) -> None:
    job = json.loads(Path(job_path).read_text())
    sampler = loaded(job["sampler"])[0].video_processor
    out = {
        "prompts": [prompt(case) for case in job["prompts"]],
        "picture_sizes": [size(picture_module, arguments) for arguments in job["picture_sizes"]],
        "video_sizes": [size(video_module, arguments) for arguments in job["video_sizes"]],
        "samples": [
            sampler.sample_frames(VideoMetadata(total_num_frames=total, fps=fps)).tolist()
            for total, fps in job["samples"]
        ],
        "pictures": [pixels(path).tobytes().hex() for path in job["pictures"]],
    }
    Path(out_path).write_text(json.dumps(out))


if __name__ == "__main__":
    main(*sys.argv[1:])
