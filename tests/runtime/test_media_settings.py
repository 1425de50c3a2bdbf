"""The processor's files of Qwen3-VL: where settings are found, and what is refused at the start."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from media_files import DEMO_VL

from tilerank.loader.errors import ConfigError
from tilerank.loader.tokenizer import Tokenizer
from tilerank.runtime.media.qwen_vl import Area, FrameSampling, Preprocessing, read_settings
from tilerank.runtime.media.registry import load_processor

PICTURES, VIDEOS, NESTED = "preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The files of the demo model, without its weights."""
    for path in DEMO_VL.glob("*.json"):
        shutil.copy(path, tmp_path)
    return tmp_path


def content(model: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((model / name).read_text())
    return found


def change(model: Path, name: str, **changes: object) -> None:
    (model / name).write_text(json.dumps({**content(model, name), **changes}))


def remove(model: Path, name: str, key: str) -> None:
    fields = content(model, name)
    del fields[key]
    (model / name).write_text(json.dumps(fields))


def test_settings_of_the_demo_model(model: Path) -> None:
    found = read_settings(model)
    assert found.preprocessing == Preprocessing(8, 2, 2, (0.5,) * 3, (0.5,) * 3, "bicubic")
    assert found.picture == found.video == Area(2304, 16384)
    assert found.sampling == FrameSampling(2.0, 4, 768, None)
    assert found.keeps_markers


def test_the_nested_file_comes_first(model: Path) -> None:
    pictures = content(model, PICTURES) | {"size": {"shortest_edge": 1, "longest_edge": 2}}
    videos = content(model, VIDEOS) | {"size": {"shortest_edge": 3, "longest_edge": 4}, "fps": 5}
    nested = {"image_processor": pictures, "video_processor": videos, "processor_class": "Qwen3VLProcessor"}
    (model / NESTED).write_text(json.dumps(nested))
    found = read_settings(model)
    assert (found.picture, found.video, found.sampling.fps) == (Area(1, 2), Area(3, 4), 5.0)
    (model / PICTURES).unlink()
    (model / VIDEOS).unlink()
    assert read_settings(model) == found


def test_videos_may_be_in_the_file_of_pictures(model: Path) -> None:
    (model / VIDEOS).unlink()
    change(model, PICTURES, size={"shortest_edge": 5, "longest_edge": 6})
    assert read_settings(model).video == Area(5, 6)


def test_old_names_of_areas_come_first(model: Path) -> None:
    change(model, PICTURES, min_pixels=7, max_pixels=8)
    assert read_settings(model).picture == Area(7, 8)
    change(model, PICTURES, max_pixels=None)
    assert read_settings(model).picture == Area(7, 16384)
    change(model, PICTURES, max_pixels=9)
    remove(model, PICTURES, "size")
    assert read_settings(model).picture == Area(7, 9)


@pytest.mark.parametrize("version", ["4.57.0", "5.23.0"])
def test_markers_follow_the_version_of_the_processor(version: str, model: Path) -> None:
    change(model, VIDEOS, transformers_version=version)
    assert read_settings(model).keeps_markers == (version == "5.23.0")


def test_a_bound_of_the_frames(model: Path) -> None:
    change(model, VIDEOS, cap_pixels_per_frame=True)
    assert read_settings(model).sampling.frame_tokens == 768
    change(model, VIDEOS, max_video_tokens=10)
    assert read_settings(model).sampling.frame_tokens == 10


def edit(name: str, **changes: object) -> Callable[[Path], None]:
    return lambda model: change(model, name, **changes)


def without(*names: str) -> Callable[[Path], None]:
    def break_model(model: Path) -> None:
        for name in names:
            (model / name).unlink()

    return break_model


@pytest.mark.parametrize(
    ("break_model", "sentence"),
    [
        (without(PICTURES, VIDEOS), f"expected {PICTURES}, or {NESTED} with image_processor, found neither"),
        (without(PICTURES), f"expected {PICTURES}, or "),
        (edit(PICTURES, image_processor_type="MllamaImageProcessor"), "image_processor_type: expected Qwen2VLImage"),
        (edit(PICTURES, processor_class="Qwen2VLProcessor"), "processor_class: expected Qwen3VLProcessor, found"),
        (edit(VIDEOS, video_processor_type="Qwen2VLVideoProcessor"), "video_processor_type: expected Qwen3VL"),
        (edit(PICTURES, patch_size=16), "expected the patches of "),
        (edit(PICTURES, size=None), "size: expected an object with shortest_edge and longest_edge"),
        (edit(PICTURES, size={"height": 3, "width": 4}), "size.shortest_edge: expected an integer"),
        (edit(PICTURES, min_pixels=99999), "size: expected at most 16384 as the least area, found 99999"),
        (edit(PICTURES, image_mean=[0.5]), "image_mean: expected three numbers from 0 to 1"),
        (edit(PICTURES, image_mean=[0.5, True, 0.5]), "image_mean: expected three numbers from 0 to 1"),
        (edit(PICTURES, image_std=[0.5, 0, 0.5]), "image_std: expected three numbers above 0"),
        (edit(PICTURES, resample=1), r"resample: expected 2 \(bilinear\) or 3 \(bicubic\), found 1"),
        (edit(PICTURES, do_normalize=False), "do_normalize: expected true, found False"),
        (edit(PICTURES, rescale_factor=1.0), "rescale_factor: expected 1/255"),
        (edit(VIDEOS, num_frames=8), "num_frames: expected fps instead, found 8"),
        (edit(VIDEOS, do_sample_frames=False), "do_sample_frames: expected true"),
        (edit(VIDEOS, fps=0), "fps: expected a number above 0"),
        (edit("config.json", image_token_id=3), "image_token_id: found 3, but the tokenizer has"),
        (
            edit("config.json", vision_config={"patch_size": 14}),
            "patch_size: expected 14 like vision_config.patch_size",
        ),
        (edit("config.json", vision_config=None), "vision_config: expected an object"),
    ],
)
def test_refusals(break_model: Callable[[Path], None], sentence: str, model: Path) -> None:
    break_model(model)
    with pytest.raises(ConfigError, match=sentence) as caught:
        load_processor(model, Tokenizer(model))
    assert str(caught.value).startswith(str(model)) and "\n" not in str(caught.value)


def test_a_family_of_text_has_no_processor(model: Path) -> None:
    change(model, "config.json", model_type="qwen3")
    assert load_processor(model, Tokenizer(model)) is None
