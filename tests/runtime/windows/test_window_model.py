"""Layers with a window in a model: what transformers computes, with windows shorter and longer than prompts, pages and
chunks, and the same bits from shared pages, in any chunks, after preemption, and on several ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from rungs import needs_compiled
from tiny import make_checkpoint

from tests.runtime.windows.sliding import NEW_TOKENS

DIMS: dict[str, Any] = {
    "family": "qwen3",
    "hidden": 96,
    "heads": 6,
    "kv_heads": 3,
    "head_dim": 32,
    "inter": 200,
    "vocab": 600,
    "layers": 3,
}
LENGTHS = (1, 39, 40, 41, 83, 150)


def prompts() -> list[list[int]]:
    draw = torch.Generator().manual_seed(5)
    return [torch.randint(0, 600, (length,), generator=draw).tolist() for length in LENGTHS]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp=tmp_path_factory.mktemp("sliding"), **DIMS)


@needs_compiled
@pytest.mark.parametrize(
    ("tp", "window", "slides"),
    [(1, 40, [True, False, True]), (3, 5, [True, True, True]), (2, 70, [False, True, True])],
    ids=["40", "5 in all layers, 3 ranks", "70, 2 ranks"],
)
def test_windows_are_those_of_transformers(checkpoint: Path, tp: int, window: int, slides: list[bool]) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    kinds = ["sliding_attention" if each else "full_attention" for each in slides]
    config = AutoConfig.from_pretrained(checkpoint, layer_types=kinds, sliding_window=window, use_sliding_window=True)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, config=config, dtype=torch.float32)
    kwargs = {"model": str(checkpoint), "window": window, "slides": slides, "prompts": prompts()}
    found = run_ranks(tp, "tests.runtime.windows.sliding:run", kwargs=kwargs)[0]
    assert found["differ"] == []
    for prompt, answer in zip(prompts(), found["answers"], strict=True):
        tokens = [token for token, *_ in answer]
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
        assert tokens == logits.argmax(-1).tolist() and len(tokens) == NEW_TOKENS
        expected = logits.log_softmax(-1)[range(NEW_TOKENS), tokens]
        assert (torch.tensor([chosen for _, chosen, _ in answer]) - expected).abs().max() < 1e-4
