"""Real models against transformers, whose weights are the dequantised values of GGUF files in fp32.

SmolLM2-135M, whose 9 heads and 3 KV heads do not divide, as a GGUF file and as a directory; the perplexity of
Gemma-3-270m as well, whose file has four types of blocks.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from ranks import run_ranks
from safetensors.torch import load_file

from tests.real_weights.models import WINDOW, Model, wanted
from tilerank.launch.bench.scoring.text import DEFAULT_TEXT, read_text
from tilerank.launch.bench.speculative.requests import TASKS, requests
from tilerank.loader.card import read_card
from tilerank.loader.tokenizer import Tokenizer

NEW_TOKENS = 12
SUBJECTS = ("a lighthouse", "the first snow", "a broken clock", "two rivers", "an old map", "the night train")
FRAMES = (
    "Write one sentence about {}.",
    "The best thing about {} is",
    "Question: Why do people remember {}?\nAnswer:",
    "def describe():\n    # what is {}?\n    return",
    "<|im_start|>user\nTell me about {} in three words.<|im_end|>\n<|im_start|>assistant\n",
    "Once upon a time there was {}, and nobody knew",
    "{}",
    "1. {}\n2.",
    "Translate to French: {} =",
    "In the long history of the village, which had seen kings and floods and one very patient mathematician, {} was",
)
PROMPTS = [frame.format(subject) for frame in FRAMES for subject in SUBJECTS]

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def answers_of(model_of: Callable[[str], Model], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return what finds the answers of transformers to the prompts."""

    @cache
    def find(name: str) -> Path:
        out = tmp_path_factory.mktemp("wanted") / f"{name}.safetensors"
        return wanted(model_of(name).directory, out, prompts=PROMPTS, new_tokens=NEW_TOKENS)

    return find


CASES = [
    *(("smollm2", "directory", tp) for tp in (1, 2, 3, 5, 6)),
    *(("smollm2", "file", tp) for tp in (1, 2, 3, 6)),
]


@pytest.mark.parametrize(("name", "form", "tp"), CASES)
def test_fp32_equals_transformers(
    model_of: Callable[[str], Model], answers_of: Callable[[str], Path], name: str, form: str, tp: int
) -> None:
    """Compare the logits of every answer's tokens, and greedy tokens of all prompts in one batch."""
    model, answers = model_of(name), answers_of(name)
    path = model.file if form == "file" else model.directory
    job = {"model": str(path), "wanted": str(answers), "new_tokens": NEW_TOKENS}
    found = run_ranks(tp, "tests.real_weights.rank_jobs:answer", kwargs=job, timeout=1200)[0]
    print(f"{name}, {form}, TP {tp}: largest error of a logit {found['logit_error']:.1e}")
    assert found["prompts"] == len(PROMPTS) == 60
    assert found["logit_error"] <= 1e-4
    assert found["wrong_tokens"] == []


@dataclass(frozen=True)
class Predicted:
    """A text as windows of tokens, and how well the fp32 forward of transformers predicts it."""

    windows: list[list[int]]
    perplexity: float


@pytest.fixture(scope="module")
def predicted_by(
    model_of: Callable[[str], Model], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Predicted]:
    """Return what has transformers predict the text of `bench quality`, about 8,000 tokens."""

    @cache
    def find(name: str) -> Predicted:
        model, out = model_of(name), tmp_path_factory.mktemp("predicted") / "losses.safetensors"
        text = read_text(DEFAULT_TEXT, read_card(model.file), model.file, WINDOW, limit=None)
        losses = load_file(wanted(model.directory, out, windows=text.windows))["losses"]
        assert len(losses) == text.counted > 7000
        return Predicted(text.windows, math.exp(losses.double().mean()))

    return find


@pytest.mark.parametrize(("name", "tp"), [("smollm2", 1), ("smollm2", 3), ("gemma3", 1)])
def test_perplexity_of_a_file_is_that_of_its_values(
    model_of: Callable[[str], Model], predicted_by: Callable[[str], Predicted], name: str, tp: int
) -> None:
    """With blocks as they are stored and activations of 16 bits, within 0.1 % of the fp32 forward."""
    text = predicted_by(name)
    job = {"model": str(model_of(name).file), "windows": text.windows}
    found = run_ranks(tp, "tests.real_weights.rank_jobs:perplexity", kwargs=job, timeout=1200)[0]
    print(f"{name}, TP {tp}: perplexity {found:.4f}, of the fp32 forward {text.perplexity:.4f}")
    assert found == pytest.approx(text.perplexity, rel=1e-3)


@pytest.mark.parametrize("tp", [1, 2, 3, 6])
def test_drafts_change_no_text(model_of: Callable[[str], Model], tp: int) -> None:
    """Drafts are n-grams in bf16, int8 and int4, and those of the file, which drafts for the directory; answers that
    quote their prompts and answers that do not."""
    model = model_of("smollm2")
    tokenizer = Tokenizer(model.directory)
    asked = [requests(task, 2)[i] for task in TASKS for i in range(2)]
    prompts = [tokenizer.encode(text) for text in asked]
    job = {"model": str(model.directory), "draft_model": str(model.file), "prompts": prompts, "new_tokens": 64}
    found = run_ranks(tp, "tests.real_weights.rank_jobs:drafts", kwargs=job, timeout=1200)[0]
    print(f"TP {tp}: right drafts {found}")
    ways = ("bfloat16", "int8", "int4", "draft model")
    assert {name: same for name, (same, _) in found.items()} == dict.fromkeys(ways, True)
    assert all(accepted > 0 for _, accepted in found.values())
