"""Functions of ranks that compare models with transformers: many models, cuts and rungs in one start of the ranks."""

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file
from torch import Tensor

from tilerank.kernels import core
from tilerank.kernels.kv_pages import PAGE_TOKENS
from tilerank.parallel.group import Group
from tilerank.parallel.join import Team
from tilerank.parallel.shard import Strategy
from tilerank.parallel.sharding import KVSplit
from tilerank.runtime.lead import engine as module
from tilerank.runtime.lead.engine import Engine, Request
from tilerank.runtime.lead.sampling import SamplingParams
from tilerank.runtime.protocol.prompt import Prompt
from tilerank.runtime.rank.rank_config import RankConfig
from tilerank.runtime.rank.worker import Worker
from tilerank.runtime.step import latent_forms


class Witness(Group):
    """A group that keeps a hash of all results of its collectives."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self.rank, self.size = group.rank, group.size
        self.start()

    def start(self) -> None:
        self._hash = hashlib.sha256()
        self.count = 0

    @property
    def waited_s(self) -> float:
        return self._group.waited_s

    def digest(self) -> str:
        return self._hash.hexdigest()

    def _seen(self, x: Tensor) -> Tensor:
        self._hash.update(x.contiguous().view(torch.uint8).numpy().data)
        self.count += 1
        return x

    def all_reduce(self, x: Tensor) -> Tensor:
        return self._seen(self._group.all_reduce(x))

    def add_rms_norm(self, x: Tensor, residual: Tensor, *norm: Any, **options: Any) -> Tensor:
        return self._seen(self._group.add_rms_norm(x, residual, *norm, **options))

    def all_gather(self, x: Tensor) -> Tensor:
        return self._seen(self._group.all_gather(x))

    def gather_columns(self, x: Tensor, starts: Tensor, n: int) -> Tensor:
        return self._seen(self._group.gather_columns(x, starts, n))

    def broadcast(self, x: Tensor, root: int = 0) -> Tensor:
        return self._seen(self._group.broadcast(x, root))

    def barrier(self) -> None:
        self._group.barrier()

    def close(self) -> None:
        self._group.close()


def workers(
    team: Team,
    out: str,
    models: list[str],
    strategies: list[Strategy],
    rungs: list[str],
    dtype: str,
    kv_split: KVSplit = "auto",
) -> Iterator[tuple[dict[str, Any], Worker, Witness]]:
    """Yield every model in every cut on every rung. `rungs` must share one layout of weights, as the compiled ones
    do."""
    witness = Witness(team.group)
    for model in models:
        for strategy in strategies:
            worker = Worker(
                Path(out) / model,
                replace(team, group=witness),
                RankConfig(dtype=getattr(torch, dtype), strategy=strategy, kv_split=kv_split, max_total_tokens=1024),
            )
            for rung in rungs:
                core.force_isa(rung)
                witness.start()
                yield {"model": model, "strategy": strategy, "rung": rung}, worker, witness


def run(
    team: Team, *, out: str, models: list[str], strategies: list[Strategy], rungs: list[str], new_tokens: int
) -> list[dict[str, Any]]:
    """Compare all cases in both dtypes with the results of reference_hf.py in `out`."""
    results = []
    for dtype in ("float32", "bfloat16"):
        for case, worker, witness in workers(team, out, models, strategies, rungs, dtype):
            if team.group.rank == 0:
                wanted = load_file(f"{out}/{case['model']}.safetensors")
                engine = Engine(worker)
                case |= compare(engine, wanted, new_tokens) if dtype == "float32" else errors(engine, wanted)
                worker.stop()
            else:
                worker.follow()
            results.append(case | {"dtype": dtype, "digest": witness.digest(), "collectives": witness.count})
    return results


def compare(engine: Engine, wanted: dict[str, Tensor], new_tokens: int) -> dict[str, Any]:
    """Return the largest error of a logit relative to its row's largest, and the prompts whose greedy tokens differ.

    All prompts, of different lengths, run as one batch. Their log-probabilities are compared with those of scoring, to
    check that decoding computes the same.
    """
    token_ids = [wanted[f"{i}.token_ids"].tolist() for i in range(prompts(wanted))]
    logit_error = max(
        row_errors(engine.score(Prompt(ids)), wanted[f"{i}.float32"]).max() for i, ids in enumerate(token_ids)
    )
    params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True, logprobs=5)
    answers: list[list[int]] = [[] for _ in token_ids]
    logprob_error = 0.0
    for event in engine.generate([Request(Prompt(ids[:-new_tokens]), params) for ids in token_ids]):
        answer = answers[event.request]
        position = len(token_ids[event.request]) - new_tokens + len(answer) - 1
        expected = wanted[f"{event.request}.float32"][position].log_softmax(-1)
        assert event.logprobs is not None
        pairs = [(event.token_id, event.logprobs.chosen), *event.logprobs.top]
        logprob_error = max(logprob_error, *(abs(value - float(expected[token])) for token, value in pairs))
        answer.append(event.token_id)
    wrong = [i for i, answer in enumerate(answers) if answer != token_ids[i][-new_tokens:]]
    return {"logit_error": float(logit_error), "logprob_error": logprob_error, "wrong_tokens": wrong}


def in_chunks(
    team: Team,
    *,
    out: str,
    models: list[str],
    strategies: list[Strategy],
    chunk_rows: list[int],
    new_tokens: int,
    kv_split: KVSplit = "auto",
    piece_tokens: int = latent_forms.PIECE_TOKENS,
) -> list[dict[str, Any]]:
    """Compare as `run` does in fp32, with at most so many prompt tokens in a step. Models with states are cut at pages,
    where otherwise they are cut at blocks of 64 tokens. Latent attention expands so many tokens at a time."""
    mock.patch("tilerank.runtime.lead.states.BLOCK_TOKENS", PAGE_TOKENS).start()
    latent_forms.PIECE_TOKENS = piece_tokens
    results = []
    for rows in chunk_rows:
        module.PREFILL_CHUNK = rows
        for case, worker, witness in workers(team, out, models, strategies, [core.isa()], "float32", kv_split):
            if team.group.rank == 0:
                wanted = load_file(f"{out}/{case['model']}.safetensors")
                case |= {"chunk_rows": rows} | compare(Engine(worker), wanted, new_tokens)
                worker.stop()
            else:
                worker.follow()
            results.append(case | {"digest": witness.digest()})
    return results


def row_errors(found: Tensor, wanted: Tensor) -> Tensor:
    """Return [rows]: the largest difference in a row, relative to its largest |logit|."""
    assert found.shape == wanted.shape and found.dtype is torch.float32
    return (found - wanted).abs().amax(-1) / wanted.abs().amax(-1)


def errors(engine: Engine, wanted: dict[str, Tensor]) -> dict[str, float]:
    """Return the errors of all positions against transformers in fp32: ours, and those of transformers in bf16."""
    ours, theirs = [], []
    for i in range(prompts(wanted)):
        exact = wanted[f"{i}.float32"]
        ours.append(row_errors(engine.score(Prompt(wanted[f"{i}.token_ids"].tolist())), exact))
        theirs.append(row_errors(wanted[f"{i}.bfloat16"], exact))
    a, b = torch.cat(ours), torch.cat(theirs)
    statistics: dict[str, Callable[[Tensor], Tensor]] = {
        "mean": Tensor.mean,
        "median": Tensor.median,
        "max": Tensor.max,
    }
    return {f"{whose}{name}": float(f(x)) for whose, x in (("", a), ("hf_", b)) for name, f in statistics.items()}


def prompts(wanted: dict[str, Tensor]) -> int:
    return sum(name.endswith(".token_ids") for name in wanted)


def perplexities(team: Team, *, model_dir: str, dtypes: list[str]) -> dict[str, Any]:
    """Return, by dtype, the perplexity of every sequence of eval_tokens.json after its first token."""
    sequences = json.loads(Path(model_dir, "eval_tokens.json").read_text())["sequences"]
    answer = {}
    for dtype in dtypes:
        worker = Worker(Path(model_dir), team, RankConfig(dtype=getattr(torch, dtype)))
        if team.group.rank != 0:
            worker.follow()
            continue
        engine, losses = Engine(worker), []
        for ids in sequences:
            logprobs = engine.score(Prompt(ids))[:-1].log_softmax(-1)
            losses.append(-logprobs.gather(1, torch.tensor(ids[1:])[:, None]))
        worker.stop()
        answer[dtype] = torch.cat(losses).mean(dtype=torch.float64).exp().item()
    return answer
