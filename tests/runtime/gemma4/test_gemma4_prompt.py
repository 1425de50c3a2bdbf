"""The prompts of the Gemma 4 processor equal those of transformers: sizes of pictures, placeholders, and refusals."""

import random
from pathlib import Path

import pytest
from tiny import make_checkpoint

from tilerank.loader.tokenizer import Tokenizer
from tilerank.runtime.media.decoder import DecodedMedium
from tilerank.runtime.media.gemma4 import Gemma4Processor, Gemma4Settings, read_gemma4_settings
from tilerank.runtime.media.processor import Processor
from tilerank.runtime.media.qwen_vl import Preprocessing
from tilerank.runtime.media.registry import load_processor
from tilerank.runtime.protocol.errors import MediaError

TEXTS = ["<bos><|turn>user\n<|image|>What is this?<turn|>\n<|turn>model\n", "a <|image|><|image|>\nb", "no picture"]
SIZES = [(64, 48), (10, 200), (700, 30)]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("gemma4", tmp_path_factory.mktemp("gemma4"), layers=3)


@pytest.fixture(scope="module")
def processor(model_dir: Path) -> Processor:
    found = load_processor(model_dir, Tokenizer(model_dir))
    assert isinstance(found, Gemma4Processor)
    return found


def picture(height: int, width: int) -> DecodedMedium:
    return DecodedMedium("image", (1, height, width), bytes(3 * height * width), [0], None)


def test_sizes_are_those_of_transformers() -> None:
    from transformers.models.gemma4.image_processing_pil_gemma4 import get_aspect_ratio_preserving_size as wanted_size

    settings = Gemma4Settings(Preprocessing(16, 3, 1, (0.5,) * 3, (0.5,) * 3, "bicubic"), 280)
    draw = random.Random(1)
    sizes = [(480, 640), (1080, 1920), (100, 100), (1, 300), (5000, 2)]
    sizes += [(draw.randint(1, 3000), draw.randint(1, 3000)) for _ in range(200)]
    for height, width in sizes:
        found = tuple(16 * side for side in settings.grid(height, width))
        assert found == wanted_size(height, width, 16, 280 * 9, 3), (height, width)
    assert settings.grid(480, 640) == (42, 57)  # 266 tokens


def test_prompts_have_a_token_for_each_square_of_patches(model_dir: Path, processor: Processor) -> None:
    """As the text of transformers with all tokens written out, which the tokenizer encodes."""
    from transformers import AutoTokenizer

    settings, tokenizer = read_gemma4_settings(model_dir), AutoTokenizer.from_pretrained(model_dir)
    for number, text in enumerate(TEXTS):
        sizes = [SIZES[(number + i) % len(SIZES)] for i in range(text.count("<|image|>"))]
        counts = [rows * columns // 9 for rows, columns in (settings.grid(*size) for size in sizes)]
        first, *pieces = text.split("<|image|>")
        written = [f"<|image>{'<|image|>' * count}<image|>{piece}" for count, piece in zip(counts, pieces, strict=True)]
        prompt = processor.prompt(text, [picture(*size) for size in sizes])
        assert prompt.token_ids == tokenizer.encode("".join([first, *written]), add_special_tokens=False)
        assert [run.count for run in prompt.placeholder_ranges] == counts
        assert all(count <= processor.most_tokens("image") == 70 for count in counts)


@pytest.mark.parametrize(
    ("text", "sizes", "sentence"),
    [
        ("<|image|>", [], "expected one <|image|> in the prompt for each picture, found 1 for 0"),
        ("a", [(9, 9)], "expected one <|image|> in the prompt for each picture, found 0 for 1"),
    ],
)
def test_a_prompt_without_its_pictures_is_refused(
    processor: Processor, text: str, sizes: list[tuple[int, int]], sentence: str
) -> None:
    with pytest.raises(MediaError) as caught:
        processor.prompt(text, [picture(*size) for size in sizes])
    assert str(caught.value).startswith(sentence)


def test_a_placeholder_in_tokens_is_refused(model_dir: Path, processor: Processor) -> None:
    with pytest.raises(MediaError, match=r"contains <\|image\|>, but has no picture"):
        processor.text_prompt([5, Tokenizer(model_dir).token_id("<|image|>") or 0])
