"""`tilerank serve` and `tilerank generate` of a tiny MOSS-VL, with its reference as the judge."""

import base64
import importlib
import io
import json
import sys
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from command import run
from media_files import encoded, picture, video
from serving import serving
from tiny import TOOL, make_checkpoint
from torch import Tensor

from tilerank.loader.tokenizer import Tokenizer

NEW_TOKENS = 6
PICTURE, VIDEO = encoded(picture(50, 70)), video(35)  # 35 frames, 10 in a second
PICTURE_GRID, VIDEO_GRID, TAKEN = (1, 4, 4), (4, 4, 4), (0, 11, 22, 34)
TIMES = ("0.0", "1.1", "2.2", "3.4")
FRAMES = "".join(f"<|time_start|>{time} seconds<|time_end|><|image_pad|>" for time in TIMES)
QUESTION = "What is it?"
TEXT = f"<|im_start|>user\n<|image_pad|><|vision_start|>{FRAMES}<|vision_end|>{QUESTION}<|im_end|>\n"
SECOND_TURN = "<|im_start|>assistant\nA cat.<|im_end|>\n<|im_start|>user\nAnd <|image_pad|><|im_end|>\n"
ASKED = "<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("moss_vl", tmp_path_factory.mktemp("moss"))


@pytest.fixture(scope="module")
def expected(model_dir: Path) -> list[list[int]]:
    """The tokens of the prompt and of the answer, after one turn and after two."""
    sys.path.insert(0, str(TOOL.parent))
    reference = importlib.import_module("reference_moss")
    with av.open(io.BytesIO(VIDEO), "r") as container:
        decoded = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    shown = torch.from_numpy(np.asarray(picture(50, 70)).copy())[None]
    pixels = reference.pixel_values(shown, PICTURE_GRID)
    both = torch.cat(
        [pixels, reference.pixel_values(torch.from_numpy(np.stack([decoded[i] for i in TAKEN])), VIDEO_GRID)]
    )
    model = reference.MossVLForConditionalGeneration.from_pretrained(model_dir)
    tokenizer = Tokenizer(model_dir)

    def answer(text: str, pixels: Tensor, grids: list[tuple[int, int, int]]) -> list[int]:
        ids = torch.tensor(tokenizer.encode(text, add_special_tokens=False))
        for _ in range(NEW_TOKENS):
            ids = torch.cat([ids, model(ids, pixels, torch.tensor(grids))[-1:].argmax(-1)])
        return ids.tolist()

    one, two = [PICTURE_GRID, VIDEO_GRID], [PICTURE_GRID, VIDEO_GRID, PICTURE_GRID]
    return [answer(TEXT + ASKED, both, one), answer(TEXT + SECOND_TURN + ASKED, torch.cat([both, pixels]), two)]


def test_generate_with_a_picture_and_a_video(model_dir: Path, expected: list[list[int]], tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(PICTURE)
    (tmp_path / "b.mp4").write_bytes(VIDEO)
    media = ("--image", tmp_path / "a.png", "--video", tmp_path / "b.mp4")
    options = ("--dtype", "float32", "--json", "--ignore-eos", "--max-new-tokens", NEW_TOKENS)
    result = run("generate", model_dir, *options, *media, "--prompt", QUESTION)
    assert result.status == 0, result.err
    found = json.loads(result.out)
    assert [*found["prompt_token_ids"], *found["token_ids"]] == expected[0]


def test_serve_two_turns(model_dir: Path, expected: list[list[int]]) -> None:
    tokenizer = Tokenizer(model_dir)
    image, clip = (f"data:;base64,{base64.b64encode(data).decode()}" for data in (PICTURE, VIDEO))
    shown: Any = {"type": "image_url", "image_url": {"url": image}}
    messages: list[Any] = [
        {
            "role": "user",
            "content": [shown, {"type": "video_url", "video_url": {"url": clip}}, {"type": "text", "text": QUESTION}],
        }
    ]
    more = [
        {"role": "assistant", "content": "A cat."},
        {"role": "user", "content": [{"type": "text", "text": "And "}, shown]},
    ]
    two: Any = [{"type": "video_url", "video_url": {"url": clip}}] * 2  # 35 frames each of the 768 that they share
    in_two = f"<|im_start|>user\n{f'<|vision_start|>{FRAMES}<|vision_end|>' * 2}<|im_end|>\n{ASKED}"
    with serving("--model-path", model_dir, "--limit-mm-per-prompt", '{"image": 2, "video": 2}') as server:
        create = server.client().chat.completions.create
        for conversation, tokens in zip((messages, messages + more), expected, strict=True):
            found = create(
                model=model_dir.name,
                messages=conversation,
                max_tokens=NEW_TOKENS,
                temperature=0,
                extra_body={"ignore_eos": True},
            )
            assert found.usage is not None and found.usage.prompt_tokens == len(tokens) - NEW_TOKENS
            assert found.choices[0].message.content == tokenizer.decode(tokens[-NEW_TOKENS:])
        found = create(model=model_dir.name, messages=[{"role": "user", "content": two}], max_tokens=1)
        assert found.usage is not None
        assert found.usage.prompt_tokens == len(tokenizer.encode(in_two, add_special_tokens=False))
        written = [*messages, {"role": "user", "content": "<|image|>"}]
        refused = server.post("/v1/chat/completions", {"model": model_dir.name, "messages": written})
        assert refused.status_code == 400 and "the text contains <|image|>" in refused.text
