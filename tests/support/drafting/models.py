"""Draft models of tests, and engines that always draft with them."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from batching import DEMO, answers, forget
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafting import AllDrafts, Depths, without_drafts
from tilerank.parallel.join import Team
from tilerank.runtime.lead.drafting.drafts import Drafting
from tilerank.runtime.lead.drafting.model_drafts import MAX_MODEL_DRAFTS, ModelDrafts
from tilerank.runtime.lead.engine import Engine, Request
from tilerank.runtime.lead.sampling import SamplingParams
from tilerank.runtime.protocol.prompt import Prompt
from tilerank.runtime.rank.rank_config import RankConfig
from tilerank.runtime.rank.worker import Worker


def changed(out: Path, config: dict[str, Any], change: Callable[[str, Tensor], Tensor | None]) -> Path:
    """Write the demo model with other values in config.json, and with what `change` makes of its tensors, if anything.
    It has no tokenizer, as ranks need none."""
    out.mkdir()
    (out / "config.json").write_text(json.dumps(json.loads((DEMO / "config.json").read_text()) | config))
    tensors = {name: change(name, x) for name, x in load_file(DEMO / "model.safetensors").items()}
    save_file({name: x for name, x in tensors.items() if x is not None}, out / "model.safetensors")
    return out


def without_last_layer(out: Path) -> Path:
    """Write the demo model without its last layer: most of what it says is what the whole model says."""
    layers = json.loads((DEMO / "config.json").read_text())["num_hidden_layers"] - 1
    config = {"num_hidden_layers": layers, "layer_types": ["full_attention"] * layers}
    return changed(out, config, lambda name, x: None if name.startswith(f"model.layers.{layers}.") else x)


def with_sizes(out: Path, vocab: int, context: int) -> Path:
    """Write the demo model with another vocabulary, the first tokens of which are its own, and another context."""

    def change(name: str, x: Tensor) -> Tensor:
        return F.pad(x, (0, 0, 0, max(vocab - len(x), 0)))[:vocab].clone() if "embed_tokens" in name else x

    return changed(out, {"vocab_size": vocab, "max_position_embeddings": context, "eos_token_id": 0}, change)


def with_draft_model(engine: Engine, drafting: int = 1, resting: int = 0) -> Engine:
    """Let the draft model of an engine draft, and check all of its drafts. Returns it."""
    source = ModelDrafts(engine.worker)
    source._depth = Depths(MAX_MODEL_DRAFTS, drafting, resting)
    engine.drafting = Drafting(source, engine.scheduler, AllDrafts())
    return engine


def same_texts(team: Team, *, model: str, draft_model: str, prompts: Sequence[list[int]]) -> dict[str, Any]:
    """Return, on rank 0, the ways of drafting with which greedy or sampled texts are others, and how many tokens were
    drafted and accepted for greedy ones."""
    config = RankConfig(
        dtype=torch.float32, max_total_tokens=1024, speculative="draft", draft_model=Path(draft_model), strategy="split"
    )
    worker = Worker(Path(model), team, config)
    if team.group.rank:
        worker.follow()
        return {}
    engine = Engine(worker)
    greedy, sampled = (
        [
            Request(Prompt(ids), SamplingParams(40, temperature, seed=i, ignore_eos=True, logprobs=1))
            for i, ids in enumerate(prompts)
        ]
        for temperature in (0.0, 0.8)
    )
    wanted = [answers(without_drafts(engine), some) for some in (greedy, sampled)]
    result: dict[str, Any] = {"others": []}
    for name, kwargs in (("all", {}), ("in chunks", {"chunk_rows": 9}), ("giving way", {"pages": 8})):
        forget(engine, **kwargs)
        found = answers(with_draft_model(engine), greedy)
        result[name] = (engine.drafting.drafted, engine.drafting.accepted)
        forget(engine, **kwargs)
        found_sampled = answers(with_draft_model(engine), sampled)
        result["others"] += [] if [found, found_sampled] == wanted else [name]
    assert engine.state().preemptions
    worker.stop()
    return result
