"""A GGUF file against a directory with the same values, which the conformance tests compare with transformers."""

from pathlib import Path

import numpy as np
import pytest
import torch
from ranks import run_ranks

from tests.runtime.gguf.tiny_llama import VOCAB, make
from tilerank.loader.tokenizer import Tokenizer

IDS = torch.randint(0, VOCAB, (40,), generator=torch.Generator().manual_seed(0)).tolist()
DTYPES = ["float32", "bfloat16"]


def logits(model: Path, tp: int, dtypes: list[str]) -> list[np.ndarray]:
    kwargs = {"model": str(model), "dtypes": dtypes, "ids": IDS}
    return [np.array(flat) for flat in run_ranks(tp, "tests.runtime.gguf.tiny_llama:score", kwargs=kwargs)[0]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make(tmp_path_factory.mktemp("gguf"))


def test_logits_are_those_of_the_stored_values(models: tuple[Path, Path]) -> None:
    file, directory = models
    exact, rounded = logits(directory, 1, DTYPES)
    error_of_bf16 = np.abs(rounded - exact).mean()
    for tp in (1, 3):
        plain, blocks = logits(file, tp, DTYPES)
        assert np.abs(plain - exact).max() <= 1e-4, tp
        assert np.abs(blocks - exact).mean() <= error_of_bf16, tp  # which rounds the weights, too


def test_a_tokenizer_and_a_chat_template_come_from_the_file(models: tuple[Path, Path]) -> None:
    tokenizer = Tokenizer(models[0])
    assert tokenizer.encode("abc</s>") == [tokenizer.token_id("abc"), VOCAB - 1]
    assert tokenizer.encode("</s> 12") == [VOCAB - 1, *(tokenizer.token_id(t) for t in "Ġ12")]
    assert tokenizer.end_token_ids() == (VOCAB - 1,)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "a"}]) == "a</s>"
