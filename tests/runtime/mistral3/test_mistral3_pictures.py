"""Prompts with pictures of mistral3 equal those of transformers; what its files do not allow is refused."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import make_checkpoint

from tilerank.loader.card import read_card
from tilerank.loader.errors import ConfigError
from tilerank.loader.tokenizer import Tokenizer
from tilerank.parallel.sharding import Sharding
from tilerank.runtime.media.decoder import DecodedMedium
from tilerank.runtime.media.mistral3 import Mistral3Processor, Mistral3Settings, read_mistral3_settings
from tilerank.runtime.media.processor import Processor
from tilerank.runtime.media.qwen_vl import Preprocessing
from tilerank.runtime.media.registry import load_processor
from tilerank.runtime.protocol.errors import MediaError
from tilerank.runtime.rank.registry import build_model

HALVES = (0.5, 0.5, 0.5)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("mistral3", tmp_path_factory.mktemp("mistral3"), layers=1)


@pytest.fixture(scope="module")
def processor(model_dir: Path) -> Processor:
    found = load_processor(model_dir, Tokenizer(model_dir))
    assert isinstance(found, Mistral3Processor)
    return found


def picture(height: int, width: int) -> DecodedMedium:
    return DecodedMedium("image", (1, height, width), bytes(3 * height * width), [0], None)


def test_sizes_are_those_of_transformers() -> None:
    from transformers.models.pixtral.image_processing_pil_pixtral import get_resize_output_image_size as wanted_size

    settings = Mistral3Settings(Preprocessing(14, 2, 1, HALVES, HALVES, "bicubic"), 1540)
    draw = random.Random(1)
    sizes = [(480, 640), (1540, 1540), (1541, 3), (28, 29), (1, 1)]
    sizes += [(draw.randint(3, 3000), draw.randint(3, 3000)) for _ in range(200)]
    for height, width in sizes:
        found = tuple(28 * count for count in settings.tokens(height, width))
        blank = np.broadcast_to(np.uint8(0), (height, width, 3))
        assert found == wanted_size(blank, (1540, 1540), (28, 28)), (height, width)
    assert settings.tokens(480, 640) == (18, 23) and settings.most == 55 * 55


@pytest.mark.parametrize("text", ["<|im_start|>user\n[IMG]What is this?<|im_end|>\n", "a [IMG][IMG]\nb", "no picture"])
def test_prompts_have_marks_after_rows(model_dir: Path, processor: Processor, text: str) -> None:
    """As the text of transformers with all tokens written out, which the tokenizer encodes."""
    from transformers import AutoTokenizer

    settings, sizes = read_mistral3_settings(model_dir), [(64, 48), (10, 200)][: text.count("[IMG]")]
    grids = [settings.tokens(*size) for size in sizes]
    first, *pieces = text.split("[IMG]")
    for (rows, columns), piece in zip(grids, pieces, strict=True):
        written = "[IMG_BREAK]".join(["[IMG]" * columns] * rows)
        first += f"{written}[IMG_END]{piece}"
    prompt = processor.prompt(text, [picture(*size) for size in sizes])
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    assert prompt.token_ids == tokenizer.encode(first, add_special_tokens=False)
    ranges = [(run.count, run.medium, run.first) for run in prompt.placeholder_ranges]
    assert ranges == [
        (columns, number, row * columns) for number, (rows, columns) in enumerate(grids) for row in range(rows)
    ]
    token = Tokenizer(model_dir).token_id("[IMG]")
    assert all(set(prompt.token_ids[run.start : run.start + run.count]) == {token} for run in prompt.placeholder_ranges)


@pytest.mark.parametrize(
    ("text", "sizes", "sentence"),
    [
        ("[IMG]", [], "expected one [IMG] in the prompt for each picture, found 1 for 0"),
        ("a", [(9, 9)], "expected one [IMG] in the prompt for each picture, found 0 for 1"),
        ("[IMG]", [(1, 129)], "expected a picture of which a side is at most 64 times the other, found 1 by 129"),
    ],
)
def test_what_is_no_prompt_is_refused(
    processor: Processor, text: str, sizes: list[tuple[int, int]], sentence: str
) -> None:
    with pytest.raises(MediaError) as caught:
        processor.prompt(text, [picture(*size) for size in sizes])
    assert str(caught.value).startswith(sentence)


def test_a_placeholder_in_tokens_is_refused(model_dir: Path, processor: Processor) -> None:
    with pytest.raises(MediaError, match=r"contains \[IMG\], but has no picture"):
        processor.text_prompt([5, Tokenizer(model_dir).token_id("[IMG]") or 0])


def test_a_directory_without_settings_of_pictures_takes_text(model_dir: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(model_dir, tmp_path / "text")
    for name in ("preprocessor_config.json", "processor_config.json"):
        (copy / name).unlink()
    assert load_processor(copy, Tokenizer(copy)) is None


@pytest.mark.parametrize(
    ("file", "changes", "sentence"),
    [
        ("processor_config.json", {"patch_size": 14}, "patch_size: expected the 4 of config.json, found 14"),
        ("processor_config.json", {"spatial_merge_size": 1}, "spatial_merge_size: expected the 2 of config.json"),
        ("preprocessor_config.json", {"do_rescale": False}, "do_rescale: expected true, found False"),
        ("preprocessor_config.json", {"size": {}}, "size.longest_edge: expected an integer from 1 to"),
        ("config.json", {"projector_hidden_act": "silu"}, "projector_hidden_act: expected 'gelu', found 'silu'"),
        ("config.json", {"vision_feature_layer": [-2, -1]}, "vision_feature_layer: expected -1, found [-2, -1]"),
        ("config.json", {"vision_config": {"hidden_act": "gelu"}}, "vision_config.hidden_act: expected 'silu'"),
        (
            "config.json",
            {"vision_config": {"rope_parameters": {"rope_type": "linear"}}},
            "vision_config.rope_parameters.rope_type: expected 'default' or 'axial', found 'linear'",
        ),
    ],
)
def test_other_settings_are_refused(
    model_dir: Path, tmp_path: Path, file: str, changes: dict[str, Any], sentence: str
) -> None:
    copy = shutil.copytree(model_dir, tmp_path / "copy")
    fields = json.loads((copy / file).read_text())
    for key, value in changes.items():
        fields[key] = fields[key] | value if key == "vision_config" else value
    (copy / file).write_text(json.dumps(fields))
    with pytest.raises(ConfigError) as caught:
        build_model(read_card(copy), Sharding(0, 1, torch.float32, None))
    assert str(caught.value).startswith(f"{copy / file}: {sentence}")
