"""The prompts of the Qwen3-VL processor equal those of transformers: sizes, token ids, positions; pictures as RGB."""

import json
import random
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from media_files import DEMO_VL, encoded, modes
from tiny import make_checkpoint

from tilerank.loader.tokenizer import Tokenizer
from tilerank.runtime.media.decoder import DecodedMedium
from tilerank.runtime.media.pictures import read_picture
from tilerank.runtime.media.processor import Processor
from tilerank.runtime.media.qwen_vl import (
    Area,
    FrameSampling,
    most_picture_tokens,
    most_video_tokens,
    picture_size,
    video_size,
)
from tilerank.runtime.media.registry import load_processor
from tilerank.runtime.protocol.errors import MediaError
from tilerank.runtime.protocol.prompt import Prompt

ORACLE = Path(__file__).parents[1] / "support" / "reference_media.py"
IMAGE, VIDEO = ({"type": kind} for kind in ("image", "video"))
FAMILIES = ["demo", "qwen3_vl", "qwen3_vl_moe"]


def turn(role: str, *parts: dict[str, str] | str) -> dict[str, Any]:
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return {"role": role, "content": content}


# name: messages, (height, width) of pictures, (total, fps, height, width) of videos
CASES: dict[str, tuple[list[Any], list[Any], list[Any]]] = {
    f"picture {height} x {width}": ([turn("user", IMAGE, "What is this?")], [(height, width)], [])
    for height, width in [(137, 97), (48, 80), (16, 3000), (1, 1), (1, 200), (24, 40), (1080, 1920), (32, 32)]
}
CASES |= {
    f"video {total} at {fps}": ([turn("user", VIDEO, "What happens?")], [], [(total, fps, height, width)])
    for total, fps, height, width in [
        (2, 1.0, 60, 90),
        (3, 30.0, 60, 90),
        (5, 10.0, 48, 80),
        (25, 10.0, 33, 200),
        (31, 4.0, 20, 20),
        (61, 29.97, 90, 160),
        (24, None, 64, 64),
        (3000, 25.0, 8, 8),
    ]
}
CASES |= {
    "pictures of different sizes": (
        [turn("user", IMAGE, "and", IMAGE, IMAGE, "?")],
        [(300, 40), (64, 64), (51, 700)],
        [],
    ),
    "two turns": (
        [turn("user", IMAGE, "What is this?"), turn("assistant", "A square."), turn("user", "and this", IMAGE)],
        [(100, 80), (80, 100)],
        [],
    ),
    "videos and pictures": (
        [turn("user", VIDEO, "then", IMAGE, VIDEO, "and", IMAGE)],
        [(90, 50), (40, 40)],
        [(7, 2.0, 50, 70), (9, 3.0, 64, 64)],
    ),
}


def random_sizes() -> tuple[list[list[int]], list[list[int]]]:
    """Return arguments of smart_resize for pictures and videos; sides of half a token are frequent."""
    draw = random.Random(1)
    pictures, videos = [], []
    for _ in range(2000):
        token = draw.choice([16, 28, 32])
        sides = [
            draw.choice([draw.randint(1, 300), draw.randint(1, 5000), token // 2 * draw.randint(1, 40)]) for _ in "hw"
        ]
        least = draw.randint(1, 1 << 18)
        most = least + draw.randint(0, 1 << draw.randint(10, 24))
        pictures.append([*sides, token, least, most])
        videos.append([draw.randint(1, 64), *sides, 2, token, least, most])
    return pictures, videos


PICTURE_SIZES, VIDEO_SIZES = random_sizes()
SAMPLES = [
    (total, fps) for total in (1, 2, 3, 4, 5, 24, 25, 97, 1001, 99999) for fps in (None, 0.5, 10.0, 23.976, 30.0)
]


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {name: make_checkpoint(name, tmp_path_factory.mktemp("vl")) for name in FAMILIES[1:]}
    return {"demo": DEMO_VL, **made}


@pytest.fixture(scope="module")
def expected(directories: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What transformers finds, in a process of its own."""
    folder = tmp_path_factory.mktemp("oracle")
    for name, (image, form) in modes().items():
        (folder / name).write_bytes(encoded(image, form))
    prompts = [
        {"directory": str(directory), "text": template(directory, messages), "images": images, "videos": videos}
        for directory in directories.values()
        for messages, images, videos in CASES.values()
    ]
    job = {
        "prompts": prompts,
        "picture_sizes": PICTURE_SIZES,
        "video_sizes": VIDEO_SIZES,
        "samples": SAMPLES,
        "sampler": str(DEMO_VL),
        "pictures": [str(folder / name) for name in modes()],
    }
    (folder / "job.json").write_text(json.dumps(job))
    subprocess.run([sys.executable, ORACLE, folder / "job.json", folder / "out.json"], check=True)
    found = json.loads((folder / "out.json").read_text())
    names = [(family, case) for family in directories for case in CASES]
    return {**found, "prompts": dict(zip(names, found["prompts"], strict=True))}


@cache
def ours(directory: Path) -> tuple[Tokenizer, Processor]:
    tokenizer = Tokenizer(directory)
    processor = load_processor(directory, tokenizer)
    assert processor is not None
    return tokenizer, processor


def template(directory: Path, messages: list[Any]) -> str:
    return ours(directory)[0].apply_chat_template(messages, add_generation_prompt=True)


def image_frames(height: int, width: int) -> DecodedMedium:
    return DecodedMedium("image", (1, height, width), bytes(height * width * 3), [0], None)


def sampled(directory: Path, total: int, fps: float | None, height: int, width: int) -> DecodedMedium:
    indices = ours(directory)[1].sample(total, fps)
    return DecodedMedium("video", (len(indices), height, width), bytes(len(indices) * height * width * 3), indices, fps)


# ---- prompts


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("family", FAMILIES)
def test_prompt_is_that_of_transformers(family: str, case: str, directories: dict[str, Path], expected: Any) -> None:
    directory = directories[family]
    messages, images, videos = CASES[case]
    left = {"image": [image_frames(*size) for size in images], "video": [sampled(directory, *v) for v in videos]}
    kinds = [part["type"] for message in messages for part in message["content"] if part["type"] != "text"]
    prompt = ours(directory)[1].prompt(template(directory, messages), [left[kind].pop(0) for kind in kinds])
    theirs = expected["prompts"][family, case]
    for kind in ("image", "video"):
        assert [list(medium.grid) for medium in prompt.media if medium.kind == kind] == theirs[f"{kind}_grid"]
    assert prompt.token_ids == theirs["ids"]
    assert prompt.positions == theirs["positions"]
    assert prompt.shift == theirs["shift"]
    check_places(prompt)


def check_places(prompt: Prompt) -> None:
    """The places are all tokens of their ids, and cover every medium."""
    covered = {i for place in prompt.placeholder_ranges for i in range(place.start, place.start + place.count)}
    placeholders = {prompt.token_ids[i] for i in covered}
    assert covered == {i for i, id in enumerate(prompt.token_ids) if id in placeholders}
    for number, medium in enumerate(prompt.media):
        places = [place for place in prompt.placeholder_ranges if place.medium == number]
        assert [place.first for place in places] == [i * places[0].count for i in range(len(places))]
        assert len(places) == medium.grid[0]
        assert sum(place.count for place in places) * 4 == medium.grid[0] * medium.grid[1] * medium.grid[2]


def test_markers_of_transformers_4() -> None:
    """There the pair around a video's placeholder is replaced, too (Qwen3VLProcessor.__call__ of 4.57)."""
    tokenizer, new = ours(DEMO_VL)
    old = load_processor(DEMO_VL, tokenizer)
    vars(old)["_keeps_markers"] = False
    text = template(DEMO_VL, [turn("user", "see", VIDEO, "?")])
    frames = sampled(DEMO_VL, 5, 2.0, 64, 64)
    kept, replaced = (processor.prompt(text, [frames]) for processor in (new, old) if processor)
    start, end = (tokenizer.encode(f"<|vision_{side}|>")[0] for side in ("start", "end"))
    outer = [kept.token_ids.index(start), len(kept.token_ids) - 1 - kept.token_ids[::-1].index(end)]
    assert replaced.token_ids == [id for i, id in enumerate(kept.token_ids) if i not in outer]
    starts = [run.start for run in kept.placeholder_ranges]
    assert [run.start + 1 for run in replaced.placeholder_ranges] == starts


def test_text_alone() -> None:
    tokenizer, processor = ours(DEMO_VL)
    prompt = processor.prompt("Hello", [])
    assert prompt == processor.text_prompt(tokenizer.encode("Hello", add_special_tokens=False))
    assert not prompt.positions and prompt.shift == 0


# ---- sizes, frames and colours


def found_size(function: Any, *arguments: Any) -> list[int] | None:
    try:
        return list(function(*arguments))
    except MediaError:
        return None


def test_picture_sizes_are_those_of_transformers(expected: Any) -> None:
    for (height, width, token, least, most), size in zip(PICTURE_SIZES, expected["picture_sizes"], strict=True):
        area = Area(least, most)
        assert found_size(picture_size, height, width, token, area) == size
        if size:
            assert size[0] * size[1] // token**2 <= most_picture_tokens(token, area)


def test_video_sizes_are_those_of_transformers(expected: Any) -> None:
    sampling = FrameSampling(2.0, 4, 64, None)
    for arguments, size in zip(VIDEO_SIZES, expected["video_sizes"], strict=True):
        frames, height, width, temporal, token, least, most = arguments
        area = Area(least, most)
        assert found_size(video_size, frames, height, width, token, temporal, area, sampling) == size, arguments
        if size:
            tokens = (frames + 1) // 2 * size[0] * size[1] // token**2
            assert tokens <= most_video_tokens(token, 2, area, sampling), arguments


def test_sampled_frames_are_those_of_transformers(expected: Any) -> None:
    for (total, fps), frames in zip(SAMPLES, expected["samples"], strict=True):
        assert ours(DEMO_VL)[1].sample(total, fps) == frames


@pytest.mark.parametrize("name", modes())
def test_colours_are_those_of_transformers(name: str, expected: Any) -> None:
    image, form = modes()[name]
    height, width, rows = read_picture(encoded(image, form), 1 << 20)
    assert (width, height) == image.size
    assert rows.hex() == expected["pictures"][list(modes()).index(name)]


def test_most_tokens_of_the_published_settings() -> None:
    """16384 tokens of 32 x 32 pixels in 16777216."""
    assert most_picture_tokens(32, Area(65536, 16777216)) == 16384
    assert most_video_tokens(32, 2, Area(4096, 25165824), FrameSampling(2.0, 4, 768, None)) >= 25165824 // 2048


# ---- refusals


def refusal(text: str, *media: DecodedMedium) -> str:
    with pytest.raises(MediaError) as caught:
        ours(DEMO_VL)[1].prompt(text, media)
    return str(caught.value)


def test_placeholders_must_be_as_many_as_media() -> None:
    picture, video = image_frames(64, 64), sampled(DEMO_VL, 4, 2.0, 64, 64)
    assert "found 1 for 0" in refusal("<|vision_start|><|image_pad|><|vision_end|>")
    assert "found 2 for 1" in refusal("<|image_pad|><|image_pad|>", picture)
    assert "found 0 for 1" in refusal("Hello", picture)
    assert "found 0 for 1" in refusal("<|video_pad|>", picture)
    assert "in this order" in refusal("<|image_pad|><|video_pad|>", video, picture)


def test_tokens_without_media_may_not_be_placeholders() -> None:
    tokenizer, processor = ours(DEMO_VL)
    with pytest.raises(MediaError, match="has no image"):
        processor.text_prompt(tokenizer.encode("a<|image_pad|>"))


def test_media_that_the_model_cannot_take_are_named() -> None:
    assert refusal("<|image_pad|>" * 2, image_frames(64, 64), image_frames(1, 201)) == (
        "image 2: expected sides of a ratio up to 200, found 201 x 1 pixels"
    )
    short = DecodedMedium("video", (1, 64, 64), bytes(64 * 64 * 3), [0], None)
    assert refusal("<|video_pad|>", short) == "video 1: expected a video of at least 2 frames, found 1"
    long = DecodedMedium("video", (769, 1, 1), bytes(769 * 3), list(range(769)), None)
    assert refusal("<|video_pad|>", long) == "video 1: expected at most 768 frames, found 769"
