"""The prompts of the MOSS-VL processor: texts and tokens, sizes, sampled frames, positions, and what tokens see."""

import importlib
import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import make_checkpoint
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from tilerank.loader.errors import ConfigError
from tilerank.loader.tokenizer import Tokenizer
from tilerank.parallel.sharding import Sharding
from tilerank.runtime.media.decoder import DecodedMedium
from tilerank.runtime.media.messages import MediaSource
from tilerank.runtime.media.moss_vl import (
    most_video_tokens,
    picture_share,
    read_settings,
    sample_frames,
    share_frames,
    video_size,
)
from tilerank.runtime.media.processor import Processor, samplers
from tilerank.runtime.media.qwen_vl import Area, FrameSampling
from tilerank.runtime.media.registry import load_processor
from tilerank.runtime.protocol.errors import MediaError
from tilerank.runtime.protocol.prompt import Prompt, Segment
from tilerank.runtime.rank.registry import build_model, read_supported_card

PICTURES, VIDEOS = "preprocessor_config.json", "video_preprocessor_config.json"
IMAGE, VIDEO = ({"type": kind} for kind in ("image", "video"))
# Bounds of the published checkpoints, whose budgets are 201326592 pixels.
PUBLIC = Area(4096, 16777216)
PUBLIC_SIZE = {"shortest_edge": 4096, "longest_edge": 16777216}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("moss_vl", tmp_path_factory.mktemp("moss"))


def picture(height: int, width: int, value: int = 0) -> DecodedMedium:
    return DecodedMedium("image", (1, height, width), bytes([value]) * (height * width * 3), [0], None)


def video(height: int, width: int, indices: list[int], fps: float | None) -> DecodedMedium:
    return DecodedMedium("video", (len(indices), height, width), bytes(len(indices) * height * width * 3), indices, fps)


def turn(role: str, *parts: dict[str, str] | str) -> dict[str, Any]:
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return {"role": role, "content": content}


# Messages, media, the text between <|im_start|> and <|im_end|> of each turn, and rows and columns of tokens of a frame.
CASES: dict[str, tuple[list[Any], list[DecodedMedium], list[str], list[tuple[int, int]]]] = {
    "text": ([turn("user", "Hello")], [], ["user\nHello"], []),
    "picture": ([turn("user", IMAGE, "What?")], [picture(70, 50)], ["user\n<|image_pad|>What?"], [(2, 2)]),
    "pictures in a row": (
        [turn("user", "See", IMAGE, IMAGE, "?")],
        [picture(64, 130), picture(96, 32)],
        ["user\nSee<|image_pad|><|image_pad|>?"],
        [(2, 4), (4, 2)],
    ),
    "video": (
        [turn("user", VIDEO, "What?")],
        [video(64, 90, [0, 15, 31], 10.0)],
        [
            "user\n<|vision_start|><|time_start|>0.0 seconds<|time_end|><|image_pad|><|time_start|>1.5 seconds"
            "<|time_end|><|image_pad|><|time_start|>3.1 seconds<|time_end|><|image_pad|><|vision_end|>What?"
        ],
        [(2, 3)] * 3,
    ),
    "two turns": (
        [turn("user", IMAGE, "What?"), turn("assistant", "A cat."), turn("user", "And", VIDEO, IMAGE)],
        [picture(70, 50), video(40, 40, [0, 30], None), picture(40, 200)],
        [
            "user\n<|image_pad|>What?",
            "assistant\nA cat.",
            "user\nAnd<|vision_start|><|time_start|>0.0 seconds<|time_end|><|image_pad|><|time_start|>1.2 seconds"
            "<|time_end|><|image_pad|><|vision_end|><|image_pad|>",
        ],
        [(2, 2), (2, 2), (2, 2), (1, 6)],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_prompts_are_those_of_the_reference(processor: Processor, model_dir: Path, name: str) -> None:
    messages, media, turns, grids = CASES[name]
    tokenizer = Tokenizer(model_dir)
    found = processor.prompt(tokenizer.apply_chat_template(messages, add_generation_prompt=True), media)
    text = "".join(f"<|im_start|>{text}<|im_end|>\n" for text in turns) + "<|im_start|>assistant\n"
    assert found.token_ids == tokenizer.encode(text, add_special_tokens=False)
    if not media:
        assert found == Prompt(found.token_ids)
        return
    tokens = [rows * columns + 1 for rows, columns in grids]
    image = json.loads((model_dir / "config.json").read_text())["image_token_id"]
    model = SimpleNamespace(config=SimpleNamespace(image_token_id=image))
    reference = importlib.import_module("moss_vl_ref").MossVLForConditionalGeneration
    positions, source_positions, seen = reference.positions(model, torch.tensor(found.token_ids), grids)
    assert found.positions == positions.tolist()
    assert found.source_positions == source_positions.tolist()
    visible = [0] * len(found.token_ids)
    for part in found.visible_ranges:
        assert part.first == 0 and part.shown
        visible[part.start :] = [part.count] * (len(visible) - part.start)
    assert visible == [sum(tokens[:count]) for count in seen.tolist()]
    assert sum(part.count for part in found.source) == sum(tokens)
    assert found.source == [Segment(i, 0, part.count) for i, part in enumerate(found.source)]
    merged = [(t, rows // 2, columns // 2) for t, rows, columns in (medium.grid for medium in found.media)]
    assert [grid for t, *grid in merged for _ in range(t)] == [list(grid) for grid in grids]


def test_keys_identify_the_frames_that_tokens_may_have_seen(processor: Processor) -> None:
    """Prompts that begin alike share pages, also if other pictures follow."""
    one, other = picture(70, 50), picture(70, 50, 1)
    first = processor.prompt("a b <|image|>c d", [one])
    longer = processor.prompt("a b <|image|>c d<|image|>e", [one, other])
    different = processor.prompt("a b <|image|>c d", [other])
    place = first.visible_ranges[0].start
    assert longer.keys[: len(first.keys)] == first.keys
    assert min(first.keys[:place]) >= 0 > max(first.keys[place:])
    assert different.keys[:place] == first.keys[:place]
    assert not set(different.keys[place:]) & set(first.keys)
    assert longer.source_digest != first.source_digest


@pytest.mark.parametrize(
    ("text", "media", "sentence"),
    [
        ("<|image|>", [], "expected one <|image_pad|> in the prompt for each image, found 1 for 0"),
        ("hello", [picture(9, 9)], "expected one <|image_pad|> in the prompt for each image, found 0 for 1"),
        ("<|video|>", [video(31, 64, [0], 1.0)], "video 1: expected frames of at least 32 x 32 pixels, found 64 x 31"),
        ("<|image|>" * 2, [picture(9, 9), picture(1, 201)], "image 2: expected sides of a ratio up to 200"),
        ("<|video|>", [video(32, 32, list(range(769)), 1.0)], "video 1: expected at most 768 frames, found 769"),
    ],
)
def test_a_prompt_that_does_not_match_its_media(
    processor: Processor, text: str, media: list[DecodedMedium], sentence: str
) -> None:
    with pytest.raises(MediaError, match=sentence.replace("|", r"\|")):
        processor.prompt(text, media)


def test_users_may_write_no_placeholder(processor: Processor) -> None:
    assert set(processor.placeholders) == {"<|image|>", "<|video|>", "<|image_pad|>", "<|video_pad|>"}


def test_pictures_share_their_budget_by_their_pixels(model_dir: Path, tmp_path: Path) -> None:
    """Each share is at least the least and at most the most of a picture; smart_resize is that of transformers."""
    sizes, budget = [(1000, 1500), (3000, 1000), (40, 30)], 2_000_000
    found = limited(model_dir, tmp_path, multi_image_max_pixels=budget, size=PUBLIC_SIZE)
    media = found.prompt("<|image|>" * 3, [picture(*size) for size in sizes]).media
    shares = [int(budget * (pixels / 4_501_200)) for pixels in (1_500_000, 3_000_000)] + [4096]
    expected = [smart_resize(*size, 32, 4096, share) for size, share in zip(sizes, shares, strict=True)]
    assert [(16 * rows, 16 * columns) for _, rows, columns in (medium.grid for medium in media)] == expected
    assert picture_share(1_500_000, 1_500_000, PUBLIC, 201326592) == PUBLIC


def limited(model_dir: Path, folder: Path, **fields: object) -> Processor:
    """Return the processor of a checkpoint with other fields for pictures."""
    for path in model_dir.glob("*.json"):
        shutil.copy(path, folder)
    (folder / PICTURES).write_text(json.dumps(json.loads((model_dir / PICTURES).read_text()) | fields))
    found = load_processor(folder, Tokenizer(folder))
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("videos", "budget", "expected"),
    [
        ([(5, 64, 90)], 201326592, [(64, 96)]),
        ([(256, 1080, 1920)], 201326592, [(640, 1152)]),
        ([(2, 480, 640), (100, 720, 1280)], 20000000, [(192, 288), (320, 576)]),
        ([(1, 32, 40)], 201326592, [(64, 96)]),
        ([(1, 33, 6000)], 201326592, [(32, 6016)]),
        ([(3, 4000, 5000)], 201326592, [(3648, 4576)]),
        ([(200, 100, 200)], 3145728, [(64, 160)]),
    ],
)
def test_sizes_of_videos_are_those_of_the_remote_code(
    videos: list[tuple[int, int, int]], budget: int, expected: list[tuple[int, int]]
) -> None:
    """The numbers are what video_processing_moss_vl.py of the published checkpoints returned."""
    total = sum(map(math.prod, videos))
    shares = [int(budget * math.prod(video) / total) for video in videos]
    found = [video_size(video, 32, PUBLIC, share) for video, share in zip(videos, shares, strict=True)]
    assert found == expected
    bound = most_video_tokens(32, PUBLIC, budget, FrameSampling(1.0, 1, 256, None))
    for (frames, *_), (height, width) in zip(videos, expected, strict=True):
        assert frames * (height * width // 1024 + 1) <= bound


@pytest.mark.parametrize(
    ("total", "fps", "expected"),
    [
        (1, 30.0, [0]),
        (30, 30.0, [0]),
        (31, 30.0, [0, 30]),
        (100, 30.0, [0, 33, 66, 99]),  # 3.33 seconds
        (60, None, [0, 29, 59]),  # 24 frames per second
        (5, 0.5, [0, 1, 2, 3, 4]),  # all of them
    ],
)
def test_frames_are_taken_once_a_second(total: int, fps: float | None, expected: list[int]) -> None:
    assert sample_frames(total, fps, FrameSampling(1.0, 1, 256, None)) == expected
    assert len(sample_frames(100_000, 10.0, FrameSampling(1.0, 1, 256, None))) == 256


def test_videos_share_the_frames_by_their_durations(processor: Processor) -> None:
    """3.5 and 1.2 seconds share 765 frames beside one each: 569.68 and 195.32, so 570 and 195. A list of frames takes
    no part."""
    assert share_frames([3.5, 1.2], 767) == [571, 196]
    assert share_frames([1.0, 1.0, 1.0], 8) == [3, 3, 2]
    assert share_frames([5.0, 1.0], 1) == [1, 1]
    assert share_frames([300.0, 30.0, 1000.0], 256) == [58, 7, 191]
    sources = [
        MediaSource("video", ("a",), False),
        MediaSource("image", ("b",), False),
        MediaSource("video", ("c",), True),
    ]
    described: dict[int, tuple[int, float | None]] = {}
    assert samplers(processor, sources, described.__getitem__) == [processor.sample] * 3
    sources.append(MediaSource("video", ("d",), False))
    described |= {0: (35, 10.0), 3: (100_000, 10.0)}
    chosen = samplers(processor, sources, described.__getitem__)
    assert [sample(35, 10.0) for sample in chosen[:3]] == [[0]] + [processor.sample(35, 10.0)] * 2
    assert len(chosen[3](100_000, 10.0)) == 767


@pytest.mark.parametrize(
    ("name", "change", "sentence"),
    [
        (PICTURES, {"temporal_patch_size": 2}, "temporal_patch_size: expected 1, found 2"),
        (PICTURES, {"image_processor_type": "Qwen2VLImageProcessor"}, "image_processor_type: expected MossVLImage"),
        (PICTURES, {"image_std": [0.1, 0.5, 0.5]}, "expected the patches of"),
        (VIDEOS, {"video_max_pixels": 0}, "video_max_pixels: expected an integer from 1"),
        (VIDEOS, {"do_sample_frames": False}, "do_sample_frames: expected true"),
    ],
)
def test_settings_that_are_refused(model_dir: Path, tmp_path: Path, name: str, change: Any, sentence: str) -> None:
    for file in ("config.json", PICTURES, VIDEOS):
        shutil.copy(model_dir / file, tmp_path)
    (tmp_path / name).write_text(json.dumps(json.loads((model_dir / name).read_text()) | change))
    with pytest.raises(ConfigError, match=sentence):
        read_settings(tmp_path)


@pytest.mark.parametrize(
    ("part", "change", "sentence"),
    [
        ("text_config", {"cross_attention_layers": [7]}, "expected a list of layers from 0 to 6, all but the last"),
        ("text_config", {"cross_attention_layers": None}, "expected a list of layers"),
        ("text_config", {"rope_scaling": {"rope_type": "default"}}, "mrope_section: expected the frequencies"),
        ("vision_config", {"out_hidden_size": 64}, "out_hidden_size: expected 128, found 64"),
    ],
)
def test_configs_that_are_refused(model_dir: Path, tmp_path: Path, part: str, change: Any, sentence: str) -> None:
    for path in model_dir.iterdir():
        shutil.copy(path, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config[part] |= change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=sentence):
        build_model(read_supported_card(tmp_path), Sharding(0, 1, torch.bfloat16, None))


def test_settings_of_published_checkpoints(model_dir: Path, tmp_path: Path) -> None:
    for file in ("config.json", PICTURES, VIDEOS):
        shutil.copy(model_dir / file, tmp_path)
    assert read_settings(tmp_path).volume == read_settings(tmp_path).frame.most == 512 * 32 * 32
    size = {"size": PUBLIC_SIZE}
    budgets = {PICTURES: {"multi_image_max_pixels": 201326592}, VIDEOS: {"video_max_pixels": 409600, "min_frames": 1}}
    for name, more in budgets.items():
        (tmp_path / name).write_text(json.dumps(json.loads((model_dir / name).read_text()) | size | more))
    found = read_settings(tmp_path)
    assert (found.picture, found.pictures, found.frame, found.volume) == (PUBLIC, 201326592, PUBLIC, 409600)
    assert found.sampling == FrameSampling(1.0, 1, 100, None)  # of 4096 pixels each
