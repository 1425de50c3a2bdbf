"""An int8 KV cache on the trained model, on 1 to 3 ranks, against transformers with keys and values that plain torch
rounds in the same way."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from batching import DEMO
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from torch import Tensor

from tilerank.parallel.join import Team
from tilerank.parallel.sharding import Sharding
from tilerank.runtime.lead.engine import Engine, Request
from tilerank.runtime.lead.sampling import SamplingParams
from tilerank.runtime.protocol.prompt import Prompt
from tilerank.runtime.rank.rank_config import RankConfig
from tilerank.runtime.rank.registry import build_model, read_supported_card
from tilerank.runtime.rank.worker import Worker
from tilerank.runtime.step.cache import PagedKV

TP = [1, 2, 3]
PROMPT, NEW_TOKENS = 40, 12
IDS = json.loads((DEMO / "eval_tokens.json").read_text())["sequences"][3][:150]


def rounded(x: Tensor) -> Tensor:
    """Round to 255 levels of the largest magnitude of each token and head."""
    step = (x.abs().amax(-1, keepdim=True) / 127).clamp_min(1e-30)
    return (x / step).round() * step


@cache
def model() -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    found: torch.nn.Module = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    return found.eval()


@torch.inference_mode()
def reference(ids: list[int], *, int8: bool = True) -> Tensor:
    """Return transformers' logits in fp32, of a model that reads its cache."""
    from transformers import DynamicCache

    class Int8Cache(DynamicCache):
        def update(
            self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
        ) -> tuple[Tensor, Tensor]:
            return super().update(rounded(key_states), rounded(value_states), layer_idx, *args, **kwargs)

    kept = Int8Cache() if int8 else DynamicCache()
    logits: Tensor = model()(torch.tensor([ids]), past_key_values=kept, use_cache=True).logits[0]
    return logits


def logits_and_tokens(team: Team, *, out: str, ids: list[int], prompt: int, new_tokens: int) -> dict[str, Any]:
    """Return, by dtype, on rank 0 the greedy tokens after the first `prompt` ids; write the logits of all ids to
    `out`."""
    found = {}
    for name in ("float32", "bfloat16"):
        worker = Worker(DEMO, team, RankConfig(dtype=getattr(torch, name), kv_dtype=torch.int8, max_total_tokens=512))
        if team.group.rank == 0:
            engine = Engine(worker)
            save_file({"logits": engine.score(Prompt(ids))}, Path(out) / f"{name}.safetensors")
            params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
            found[name] = [event.token_id for event in engine.generate([Request(Prompt(ids[:prompt]), params)])]
            worker.stop()
        else:
            worker.follow()
    return found


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kv")


@cache
def found(base: Path, tp: int) -> tuple[dict[str, list[int]], dict[str, Tensor]]:
    """Return greedy tokens, and the logits of IDS, by dtype."""
    out = base / f"tp{tp}"
    out.mkdir()
    kwargs = {"out": str(out), "ids": IDS, "prompt": PROMPT, "new_tokens": NEW_TOKENS}
    tokens = run_ranks(tp, "tests.runtime.kv_cache.test_kv_cache:logits_and_tokens", kwargs=kwargs, timeout=300)[0]
    return tokens, {name: load_file(out / f"{name}.safetensors")["logits"] for name in tokens}


def error(logits: Tensor, wanted: Tensor) -> float:
    """Return the mean over rows of the largest difference, relative to the row's largest |logit|."""
    return float(((logits - wanted).abs().amax(-1) / wanted.abs().amax(-1)).mean())


@pytest.mark.parametrize("tp", TP)
def test_logits_are_those_over_rounded_keys_and_values(base: Path, tp: int) -> None:
    """Rounding alone moves the logits by 0.0036. In fp32 the only further error is a code halfway between two integers,
    which may round either way. In bf16, whose own error is about 0.006, rounding adds almost nothing.
    """
    logits = found(base, tp)[1]
    exact, rounding = reference(IDS), error(reference(IDS), reference(IDS, int8=False))
    assert rounding > 0.003
    assert error(logits["float32"], exact) < 0.001
    assert error(logits["bfloat16"], exact) < 0.01


@pytest.mark.parametrize("tp", TP)
def test_greedy_tokens_are_the_most_likely_ones(base: Path, tp: int) -> None:
    for name, tokens in found(base, tp)[0].items():
        assert len(tokens) == NEW_TOKENS
        wanted = reference(IDS[:PROMPT] + tokens)[PROMPT - 1 : -1]
        lost = wanted.amax(-1) - wanted.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert (lost / wanted.abs().amax(-1)).max() <= (0.002 if name == "float32" else 0.02)


def test_a_page_of_codes_takes_a_byte_a_value_and_a_scale_a_token() -> None:
    """The model has 6 layers with 2 KV heads of 64."""
    assert PagedKV(2, 64, torch.int8).nbytes(33) == 2 * 32 * 2 * 2 * (64 + 4)
    card = read_supported_card(DEMO)
    sizes = []
    for kv_dtype in (None, torch.int8):
        specs = build_model(card, Sharding(0, 1, torch.bfloat16, None, kv_dtype=kv_dtype)).cache_specs()
        sizes.append(sum(spec.nbytes(32) for spec in specs))
    assert sizes == [6 * 32 * 2 * 2 * 64 * 2, 6 * 32 * 2 * 2 * (64 + 4)]
