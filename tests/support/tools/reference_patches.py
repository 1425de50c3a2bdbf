"""Patches of the torchvision processors of transformers: the oracle of tests/kernels/test_pictures.py. A script.

    python reference_patches.py FRAMES.safetensors OUT.safetensors

FRAMES: uint8 [n, height, width, 3] each, named `picture.NAME` or `video.NAME`. OUT: for each of them, NAME.patches and
NAME.grid [3]. torchvision is imported as reference_media.py does.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(sys.prefix, "torchvision")))

import tvshim  # noqa: F401 - before transformers
from safetensors.torch import load_file, save_file
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

MEAN, STD = (0.48, 0.5, 0.41), (0.27, 0.5, 0.26)
AREA = {"shortest_edge": 4096, "longest_edge": 1 << 22}

if __name__ == "__main__":
    pictures = Qwen2VLImageProcessor(patch_size=16, image_mean=list(MEAN), image_std=list(STD), size=AREA)
    videos = Qwen3VLVideoProcessor(image_mean=list(MEAN), image_std=list(STD), do_sample_frames=False)
    found = {}
    for key, frames in load_file(sys.argv[1]).items():
        kind, name = key.split(".")
        channels_first = frames.permute(0, 3, 1, 2)
        if kind == "picture":
            batch = pictures(channels_first[0], return_tensors="pt")
            found |= {f"{name}.patches": batch["pixel_values"], f"{name}.grid": batch["image_grid_thw"][0]}
        else:
            batch = videos([channels_first], return_tensors="pt")
            found |= {f"{name}.patches": batch["pixel_values_videos"], f"{name}.grid": batch["video_grid_thw"][0]}
    save_file(found, sys.argv[2])
