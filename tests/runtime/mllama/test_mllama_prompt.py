"""The prompts of the mllama processor equal those of transformers: tilings, sizes, and what tokens see."""

import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
from command import DEMO, run
from fake_sysfs import sockets
from planning import plan_on
from tiny import make_checkpoint
from transformers.models.mllama import image_processing_pil_mllama as hf_pictures
from transformers.models.mllama import processing_mllama as hf_prompts

from tilerank.launch.bench.public import public_config
from tilerank.loader.card import read_card
from tilerank.loader.errors import ConfigError
from tilerank.loader.tokenizer import Tokenizer
from tilerank.runtime.media.decoder import DecodedMedium
from tilerank.runtime.media.messages import MediaSource
from tilerank.runtime.media.mllama import choose_tiling, fit, read_tile_settings, tilings
from tilerank.runtime.media.processor import Processor, check_kinds
from tilerank.runtime.protocol.errors import MediaError
from tilerank.runtime.protocol.prompt import MM_CACHE_BYTES, Prompt

TILE = 56  # pixels, of make_tiny.py; a tile has 4 x 4 patches and a class token
TOKENS = 17
SIZES = [(64, 64), (30, 200), (300, 70), (1, 1), (500, 40), (200, 190)]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("mllama", tmp_path_factory.mktemp("mllama"))


def picture(height: int, width: int) -> DecodedMedium:
    return DecodedMedium("image", (1, height, width), bytes(height * width * 3), [0], None)


def test_tilings_and_sizes_are_those_of_transformers() -> None:
    draw = random.Random(1)
    assert tilings(4) == hf_pictures.get_all_supported_aspect_ratios(4)
    for _ in range(3000):
        tile, most = draw.choice([(64, 4), (560, 4), (448, 4), (224, 6)])
        height, width = (
            draw.choice([draw.randint(1, 700), draw.randint(1, 9000), tile * draw.randint(1, 5)]) for _ in "hw"
        )
        canvas = hf_pictures.get_optimal_tiled_canvas(height, width, most, tile)
        rows, columns = choose_tiling(height, width, tile, most)
        assert (rows * tile, columns * tile) == tuple(canvas), (height, width, tile, most)
        expected = hf_pictures.get_image_size_fit_to_canvas(height, width, *canvas, tile)
        assert fit(height, width, rows, columns, tile) == tuple(expected), (height, width, tile, most)


def seen(prompt: Prompt) -> list[set[tuple[int, int]]]:
    """Return for each token of a prompt the (picture, token of its encoding) that it sees."""
    source = [(part.medium, part.first + i) for part in prompt.source for i in range(part.count)]
    rows: list[set[tuple[int, int]]] = [set() for _ in prompt.token_ids]
    for visible, after in zip(prompt.visible_ranges, [*prompt.visible_ranges[1:], None], strict=True):
        for row in range(visible.start, after.start if after else len(rows)):
            rows[row] = set(source[visible.first : visible.first + visible.count])
    return rows


TEXTS = [
    "<|image|>What is this?",
    "Look: <|image|>and<|image|>then",
    "<|image|><|image|>compare",
    "a <|image|><|image|>b<|image|>c<|image|><|image|><|image|>d",
    "ends with <|image|>",
    "ends with <|image|>two <|image|><|image|>",
]


@pytest.mark.parametrize("text", TEXTS)
def test_tokens_see_what_transformers_lets_them_see(processor: Processor, text: str) -> None:
    count = text.count("<|image|>")
    sizes = [SIZES[i % len(SIZES)] for i in range(count)]
    prompt = processor.prompt(text, [picture(*size) for size in sizes])
    ids = prompt.token_ids
    image = next(id for id in ids if ids.count(id) == count and id == max(ids))
    tiles = [choose_tiling(*size, TILE, 4) for size in sizes]
    ranges = hf_prompts.get_cross_attention_token_mask(ids, image)
    mask = hf_prompts.convert_sparse_cross_attention_mask_to_dense(
        [ranges], [[rows * columns for rows, columns in tiles]], 4, len(ids)
    )[0]
    everything = {(medium, token) for medium in range(count) for token in range(4 * TOKENS)}
    for row, (found, row_mask) in enumerate(zip(seen(prompt), mask, strict=True)):
        expected = {(m, tile * TOKENS + i) for m, tile in np.argwhere(row_mask).tolist() for i in range(TOKENS)}
        assert found == (expected or everything), row
    shown = {visible.start: visible.shown for visible in prompt.visible_ranges}
    assert [shown[start] for start in sorted(shown)] == [bool(mask[start].any()) for start in sorted(shown)]


def test_the_text_begins_where_transformers_begins_it(processor: Processor, model_dir: Path) -> None:
    tokenizer = Tokenizer(model_dir)
    for text in ("<|image|><|image|>hello", "<|begin_of_text|><|image|>hello<|image|>", "a<|image|>b<|image|>"):
        expected = hf_prompts.build_string_from_input(text, "<|begin_of_text|>", "<|image|>")
        found = processor.prompt(text, [picture(64, 64)] * 2).token_ids
        assert found == tokenizer.encode(expected, add_special_tokens=False)


def test_keys_identify_the_pictures_and_what_is_seen_of_them(processor: Processor) -> None:
    one, other = picture(64, 64), DecodedMedium("image", (1, 64, 64), b"\1" * (64 * 64 * 3), [0], None)
    text = "<|image|>What is this?"
    keys = processor.prompt(text, [one]).keys
    assert processor.prompt(text + " And more", [one]).keys[: len(keys)] == keys
    assert not set(keys) & set(processor.prompt(text, [other]).keys)
    assert min(processor.prompt("text", []).keys) >= 0 > max(keys)


@pytest.mark.parametrize(
    ("text", "media", "sentence"),
    [
        ("<|image|>", [], "expected one <|image|> in the prompt for each picture, found 1 for 0"),
        ("hello", [picture(9, 9)], "expected one <|image|> in the prompt for each picture, found 0 for 1"),
    ],
)
def test_a_prompt_that_does_not_match_its_media(
    processor: Processor, text: str, media: list[DecodedMedium], sentence: str
) -> None:
    with pytest.raises(MediaError, match=sentence.replace("|", r"\|")):
        processor.prompt(text, media)


def test_a_video_is_refused(processor: Processor) -> None:
    with pytest.raises(MediaError, match=r"^the model takes image, found video$"):
        check_kinds(processor, [MediaSource("video", ("clip.mp4",), listed=False)])


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"size": {"height": 32, "width": 64}}, "size.width: expected the 32 of height, found 64"),
        ({"size": {"height": 32, "width": 32}}, r"size: expected 56 like vision_config.image_size"),
        ({"max_image_tiles": 3}, "max_image_tiles: expected 4 like vision_config.max_num_tiles"),
        ({"image_processor_type": "CLIPImageProcessor"}, "image_processor_type: expected MllamaImageProcessor"),
        ({"do_pad": False}, "do_pad: expected true"),
    ],
)
def test_settings_of_another_family(model_dir: Path, tmp_path: Path, change: dict[str, object], sentence: str) -> None:
    shutil.copy(model_dir / "config.json", tmp_path)
    settings = json.loads((model_dir / "preprocessor_config.json").read_text()) | change
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match=sentence):
        read_tile_settings(tmp_path)


def test_other_families_have_no_intermediate_layers() -> None:
    found = run("plan", str(DEMO), "--mllama-intermediate", "meta")
    assert found.status == 1
    assert found.err.endswith(
        "config.json: model_type: expected 'mllama' with --mllama-intermediate meta, found 'qwen3'\n"
    )


def test_plans_count_sources_with_encodings(tmp_path: Path) -> None:
    """Llama-3.2-11B-Vision: 32 of its 40 layers are self-attention, with 8 KV heads of 128 in bf16. Sources share the
    bytes of encoded media. The language model alone has neither sources nor layers that see them."""
    whole = public_config("llama-3.2-11b-vision")
    found = {}
    for name, config in (("whole", whole), ("text", whole["text_config"])):
        (tmp_path / "config.json").write_text(json.dumps(config))
        plan = plan_on(sockets(2, 8), tmp_path, read_card(tmp_path), 2, mm_cache_bytes=MM_CACHE_BYTES)
        found[name] = [(plan.num_layers, rank.media, rank.cache_per_token, rank.state) for rank in plan.ranks]
    per_token = 32 * 2 * 8 * 128 * 2 // 2
    assert found["whole"] == [(40, MM_CACHE_BYTES, per_token, 0)] * 2
    assert found["text"] == [(32, 0, per_token, 0)] * 2
