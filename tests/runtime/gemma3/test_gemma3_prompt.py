"""The prompts of the Gemma 3 processor equal those of transformers: newlines around pictures, crops, and refusals."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import make_checkpoint

from tilerank.loader.errors import ConfigError
from tilerank.loader.tokenizer import Tokenizer
from tilerank.runtime.media.decoder import DecodedMedium
from tilerank.runtime.media.gemma3 import PanAndScan, choose_crops
from tilerank.runtime.media.messages import MediaSource
from tilerank.runtime.media.processor import Processor, check_kinds
from tilerank.runtime.media.registry import load_processor
from tilerank.runtime.protocol.errors import MediaError

TOKENS, SIDE = 16, 8  # of a picture, and patches of its side, of make_tiny.py
BEGIN = "<start_of_image>"
CROPPING = {
    "do_pan_and_scan": True,
    "pan_and_scan_min_crop_size": 25,
    "pan_and_scan_max_num_crops": 4,
    "pan_and_scan_min_ratio_to_activate": 1.2,
}
SIZES = [(64, 48), (48, 108), (30, 300), (108, 192), (300, 10), (40, 41)]
TURN = "<bos><start_of_turn>user\n{}<end_of_turn>\n<start_of_turn>model\n"
TEXTS = [TURN.format(f"{BEGIN}What is this?"), TURN.format(f"{BEGIN}{BEGIN}"), f"a {BEGIN}\nb\n\n{BEGIN} c{BEGIN}"]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("gemma3", tmp_path_factory.mktemp("gemma3"), layers=3)


@pytest.fixture(scope="module")
def cropping(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same directory, whose file switches pan and scan on."""
    out = tmp_path_factory.mktemp("cropping")
    shutil.copytree(model_dir, out, dirs_exist_ok=True)
    change(out, CROPPING)
    return out


def change(model_dir: Path, changes: dict[str, Any]) -> None:
    path = model_dir / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def processor_of(model_dir: Path) -> Processor:
    found = load_processor(model_dir, Tokenizer(model_dir))
    assert found is not None
    return found


def reference_of(model_dir: Path) -> Any:
    from transformers import AutoTokenizer
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
    from transformers.models.gemma3.processing_gemma3 import Gemma3Processor

    pictures = Gemma3ImageProcessorPil.from_pretrained(model_dir)
    return Gemma3Processor(pictures, AutoTokenizer.from_pretrained(model_dir), image_seq_length=TOKENS)


def pixels(height: int, width: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(height * width).integers(0, 256, (height, width, 3), np.uint8)


def picture(height: int, width: int) -> DecodedMedium:
    return DecodedMedium("image", (1, height, width), pixels(height, width).tobytes(), [0], None)


@pytest.mark.parametrize("crops", [False, True], ids=["squeezed", "cropped"])
def test_prompts_are_those_of_transformers(model_dir: Path, cropping: Path, crops: bool) -> None:
    """Newlines of messages and pictures become tokens together. Every picture and every crop has its tokens.

    The defaults of the reference hide the settings of the file, so that they are given with every call.
    """
    from PIL import Image

    directory = cropping if crops else model_dir
    ours, theirs = processor_of(directory), reference_of(directory)
    image_id = json.loads((directory / "config.json").read_text())["image_token_index"]
    for number, text in enumerate(TEXTS):
        sizes = [SIZES[(2 * number + i) % len(SIZES)] for i in range(text.count(BEGIN))]
        given = [Image.fromarray(pixels(*size)) for size in sizes]
        wanted = theirs(text=[text], images=[given], add_special_tokens=False, **(CROPPING if crops else {}))
        prompt = ours.prompt(text, [picture(*size) for size in sizes])
        assert prompt.token_ids == list(wanted["input_ids"][0])
        assert len(prompt.media) == len(wanted["pixel_values"])
        covered = [(run.start, run.count, run.medium, run.first) for run in prompt.placeholder_ranges]
        starts = [i for i, id in enumerate(prompt.token_ids) if id == image_id][::TOKENS]
        assert covered == [(start, TOKENS, medium, 0) for medium, start in enumerate(starts)]
        assert all(medium.grid == (1, SIDE, SIDE) for medium in prompt.media)


def test_crops_are_those_of_transformers() -> None:
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    theirs, draw = Gemma3ImageProcessorPil(), random.Random(1)
    sizes = [(480, 640), (1080, 1920), (700, 3000), (100, 300), *((draw.randint(1, 2000),) * 2 for _ in range(3))]
    sizes += [(draw.randint(1, 1200), draw.randint(1, 1200)) for _ in range(300)]
    counts = []
    for height, width in sizes:
        image = np.arange(height * width, dtype=np.int32).reshape(1, height, width)
        wanted = theirs.pan_and_scan(image, 256, 4, 1.2)
        crops = choose_crops(height, width, PanAndScan(1.2, 256, 4))
        found = [image[:, crop.top : crop.bottom, crop.left : crop.right] for crop in crops]
        assert len(found) == len(wanted) and all(map(np.array_equal, found, wanted)), (height, width)
        counts.append(len(found))
    assert counts[:4] == [2, 2, 4, 0] and 3 in counts


def test_a_crop_has_the_pixels_of_its_place(cropping: Path) -> None:
    prompt = processor_of(cropping).prompt(BEGIN, [picture(48, 108)])
    whole, left, right = prompt.media
    assert (whole.size, left.size, right.size) == ((1, 48, 108), (1, 48, 54), (1, 48, 54))
    assert right.frames == pixels(48, 108)[:, 54:].tobytes()


@pytest.mark.parametrize(
    ("text", "kinds", "sentence"),
    [
        ("no mark", ["image"], f"expected one {BEGIN} in the prompt for each picture, found 0 for 1; "),
        (f"{BEGIN}{BEGIN}", ["image"], f"expected one {BEGIN} in the prompt for each picture, found 2 for 1; "),
        (f"{BEGIN}<image_soft_token>", ["image"], "expected 1 placeholders of pictures in the prompt, found 2"),
    ],
)
def test_media_that_do_not_match_are_refused(model_dir: Path, text: str, kinds: list[str], sentence: str) -> None:
    media = [DecodedMedium(kind, (1, 8, 8), bytes(192), [0], None) for kind in kinds]
    with pytest.raises(MediaError) as caught:
        processor_of(model_dir).prompt(text, media)
    assert str(caught.value).startswith(sentence)


def test_a_video_is_refused(model_dir: Path) -> None:
    with pytest.raises(MediaError, match=r"^the model takes image, found video$"):
        check_kinds(processor_of(model_dir), [MediaSource("video", ("clip.mp4",), listed=False)])


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"size": {"height": 112, "width": 100}}, "size.width: expected the 112 of vision_config.image_size of "),
        ({"do_resize": False}, "do_resize: expected true, found False"),
        ({"resample": 0}, "resample: expected 2 (bilinear) or 3 (bicubic), found 0"),
        ({"image_processor_type": "Other"}, "image_processor_type: expected Gemma3ImageProcessor or "),
    ],
)
def test_settings_that_would_change_the_result_are_refused(
    model_dir: Path, tmp_path: Path, changes: dict[str, Any], sentence: str
) -> None:
    shutil.copytree(model_dir, tmp_path, dirs_exist_ok=True)
    change(tmp_path, changes)
    with pytest.raises(ConfigError) as caught:
        processor_of(tmp_path)
    assert str(caught.value).removeprefix(f"{tmp_path / 'preprocessor_config.json'}: ").startswith(sentence)


def test_text_without_pictures(model_dir: Path) -> None:
    processor, tokenizer = processor_of(model_dir), Tokenizer(model_dir)
    ids = tokenizer.encode("Hello")
    assert processor.text_prompt(ids).token_ids == ids
    with pytest.raises(MediaError, match="the prompt contains <image_soft_token>, but has no picture"):
        processor.text_prompt(tokenizer.encode("<image_soft_token>"))
