"""What rank processes compute with a real model, for comparison with transformers (oracle.py)."""

from pathlib import Path
from typing import Any

import torch
from batching import forget
from conformance import row_errors
from drafting import AllDrafts
from drafting.models import with_draft_model
from safetensors.torch import load_file

from tilerank.loader.quantization_config import Quantization
from tilerank.parallel.join import Team
from tilerank.runtime.lead.drafting.drafts import Drafting
from tilerank.runtime.lead.drafting.ngrams import NgramDrafts
from tilerank.runtime.lead.engine import Engine, Request
from tilerank.runtime.lead.sampling import SamplingParams
from tilerank.runtime.protocol.prompt import Prompt
from tilerank.runtime.rank.rank_config import RankConfig
from tilerank.runtime.rank.worker import Worker


def answer(team: Team, *, model: str, wanted: str, new_tokens: int) -> dict[str, Any]:
    """Return the largest error of a logit relative to its row's largest, and the prompts whose greedy tokens differ."""
    worker = Worker(Path(model), team, RankConfig(dtype=torch.float32, max_total_tokens=8192))
    if team.group.rank:
        worker.follow()
        return {}
    engine, expected = Engine(worker), load_file(wanted)
    token_ids = [expected[f"{i}.token_ids"].tolist() for i in range(sum(name.endswith(".logits") for name in expected))]
    errors = [
        row_errors(engine.score(Prompt(ids))[-new_tokens - 1 : -1].clone(), expected[f"{i}.logits"])
        for i, ids in enumerate(token_ids)
    ]
    params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
    answers = texts(engine, [Request(Prompt(ids[:-new_tokens]), params) for ids in token_ids])
    worker.stop()
    wrong = [i for i, answer in enumerate(answers) if answer != token_ids[i][-new_tokens:]]
    return {"logit_error": float(torch.cat(errors).max()), "wrong_tokens": wrong, "prompts": len(answers)}


def perplexity(team: Team, *, model: str, windows: list[list[int]]) -> float | None:
    """Return, on rank 0, the perplexity of the tokens of windows after the first of each, in bf16."""
    config = RankConfig(dtype=torch.bfloat16, activation_bits=16, max_total_tokens=4096)
    worker = Worker(Path(model), team, config)
    if team.group.rank:
        worker.follow()
        return None
    engine, losses = Engine(worker), []
    for ids in windows:
        logits = engine.score(Prompt(ids))[:-1].float()
        losses.append(torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none"))
    worker.stop()
    return float(torch.cat(losses).double().mean().exp())


def drafts(
    team: Team, *, model: str, draft_model: str, prompts: list[list[int]], new_tokens: int
) -> dict[str, tuple[bool, int]]:
    """Return, on rank 0, whether greedy and sampled texts with drafts are those without, and how many drafts were
    right: of n-grams for each format, and of a draft model."""
    found = {}
    ways: dict[str, dict[str, Any]] = {
        "bfloat16": {},
        "int8": {"quantization": Quantization("int8")},
        "int4": {"quantization": Quantization("int4")},
        "draft model": {"speculative": "draft", "draft_model": Path(draft_model)},
    }
    for name, options in ways.items():
        config = RankConfig(dtype=torch.bfloat16, max_total_tokens=8192, **options)
        worker = Worker(Path(model), team, config)
        if team.group.rank:
            worker.follow()
            continue
        engine = Engine(worker)
        some = [
            Request(Prompt(ids), SamplingParams(max_new_tokens=new_tokens, temperature=0.7 * (i % 2), seed=i))
            for i, ids in enumerate(prompts)
        ]
        plain = texts(engine, some)
        engine.drafting = Drafting(NgramDrafts(), engine.scheduler, AllDrafts())
        if worker.draft_model is not None:
            forget(engine)
            with_draft_model(engine)
        found[name] = texts(engine, some) == plain, engine.drafting.accepted
        worker.stop()
    return found


def texts(engine: Engine, some: list[Request]) -> list[list[int]]:
    answers: list[list[int]] = [[] for _ in some]
    for event in engine.generate(some):
        answers[event.request].append(event.token_id)
    return answers
