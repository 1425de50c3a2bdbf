"""What the ranks of a conformance test do: many models, cuts, dtypes and rungs in one start of them (families/)."""

import hashlib
import math
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from batching import after_preemption, answers, forget, one_by_one
from drafting import with_drafts
from drafting.heads import compare_heads
from safetensors.torch import load_file
from torch import Tensor

from tilerank.kernels import core
from tilerank.kernels.kv_pages import PAGE_TOKENS
from tilerank.parallel.group import Group
from tilerank.parallel.join import Team
from tilerank.parallel.shard import Strategy
from tilerank.parallel.sharding import KVSplit
from tilerank.runtime.lead.engine import Engine, Request
from tilerank.runtime.lead.sampling import SamplingParams
from tilerank.runtime.protocol.prompt import Medium, PlaceholderRange, Prompt, Segment, VisibleRange
from tilerank.runtime.protocol.sizes import PREFILL_CHUNK
from tilerank.runtime.rank.rank_config import RankConfig
from tilerank.runtime.rank.worker import Worker
from tilerank.runtime.step import latent_forms

PIECE = 1e6
"""Operations of a piece of an encode: a few rows of a layer."""


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


def run(
    team: Team,
    *,
    out: str,
    models: list[str],
    new_tokens: int,
    cuts: list[Strategy],
    dtypes: list[str],
    rungs: list[str] | None = None,
    chunk_rows: list[int] | None = None,
    piece_tokens: int | None = None,
    kv_split: KVSplit = "auto",
    options: dict[str, dict[str, str]] | None = None,
    decode: bool = False,
) -> list[dict[str, Any]]:
    """Compare all cases with what tools/reference.py left in `out`. options: of families, by model. decode: in bf16
    as well."""
    if chunk_rows:
        mock.patch("tilerank.runtime.lead.states.BLOCK_TOKENS", PAGE_TOKENS).start()
    latent_forms.PIECE_TOKENS = piece_tokens or latent_forms.PIECE_TOKENS
    witness, results = Witness(team.group), []
    rungs, sizes = rungs or [core.isa()], chunk_rows or [PREFILL_CHUNK]
    for dtype, rung, cut, model, rows in product(dtypes, rungs, cuts, models, sizes):
        core.force_isa(rung)
        wanted = load_file(f"{out}/{model}.safetensors")
        has_head = "0.draft" in wanted
        config = RankConfig(
            dtype=getattr(torch, dtype),
            strategy=cut,
            kv_split=kv_split,
            max_total_tokens=2048,
            family_options=(options or {}).get(model, {}),
            speculative="mtp" if has_head and dtype == "float32" else "ngram",
        )
        worker = Worker(Path(out) / model, replace(team, group=witness), config)
        witness.start()
        found = {"encodings": encoding_errors(worker, wanted, dtype)}
        if team.group.rank == 0:
            engine = Engine(worker)
            if dtype == "float32":
                alone = cut == cuts[-1] and rung != "reference" and not chunk_rows
                resumed = alone and team.group.size == 1 and rung == rungs[0]
                found |= exact(engine, wanted, new_tokens, rows, alone=alone, resumed=resumed)
                if has_head:
                    some = continued(wanted, new_tokens)
                    found |= compare_heads(engine, wanted, some, rows, decode=alone)
            else:
                found |= rounded(engine, wanted, new_tokens if decode else 0)
            worker.stop()
        else:
            worker.follow()
        case = {"dtype": dtype, "rung": rung, "cut": cut, "model": model, "rows": rows}
        results.append(case | found | {"digest": witness.digest(), "collectives": witness.count})
    return results


def encoding_errors(worker: Worker, wanted: dict[str, Tensor], dtype: str) -> dict[str, float]:
    """Return the errors of the encodings of all media on this rank; empty if there are none."""
    ours, theirs = list[Tensor](), list[Tensor]()
    while (right := wanted.get(f"media.{len(ours)}.float32")) is not None:
        medium = f"media.{len(ours)}"
        frames, (t, rows, columns) = wanted[f"{medium}.frames"], wanted[f"{medium}.grid"].tolist()
        grid = (t, rows, columns)
        assert worker.encoder is not None
        (whole,) = worker.encoder.encode(frames, grid, math.inf)
        *pieces, encoding = worker.encoder.encode(frames, grid, PIECE)
        assert len(pieces) >= (1 if frames.ndim == 1 else 9) and all(piece is None for piece in pieces)
        assert encoding is not None and whole is not None
        assert core.isa() == "reference" or torch.equal(encoding, whole)
        assert encoding.dtype is getattr(torch, dtype) and encoding.shape == right.shape == worker.encoder.shape(grid)
        ours.append(row_errors(encoding.float(), right))
        theirs.append(row_errors(wanted[f"{medium}.{dtype}"], right))
    return statistics(ours, theirs) if ours else {}


def exact(
    engine: Engine, wanted: dict[str, Tensor], new_tokens: int, chunk_rows: int, *, alone: bool, resumed: bool
) -> dict[str, Any]:
    """Return the largest error of a logit, relative to its row's largest, the largest of a log-probability while
    decoding, the prompts whose greedy tokens differ, and, if `alone`, whether every prompt alone, and all with drafts,
    give the bits of all.

    All prompts, of different lengths, are decoded as one batch. Their log-probabilities are compared with the logits of
    the reference, to check that decoding computes the same as scoring. So are, if `resumed`, those of answers that
    continue pages of the cache, and of answers that are preempted half-way.
    """
    logits, requests = reference_logits(wanted), continued(wanted, new_tokens)
    scored = [row_errors(engine.score(prompt_of(wanted, p, len(rows))), rows) for p, rows in enumerate(logits)]
    forget(engine, chunk_rows=chunk_rows)
    batch = answers(engine, requests)
    forget(engine, chunk_rows=chunk_rows)
    same_bits = not alone or one_by_one(engine, requests) == batch
    if alone:
        forget(engine, chunk_rows=chunk_rows)
        same_bits = same_bits and answers(with_drafts(engine, requests, batch), requests) == batch
    every = [batch]
    if resumed:
        hits = engine.state().hit_tokens
        every.append(answers(engine, requests))
        assert engine.state().hit_tokens > hits, "no prompt continues pages of the cache"
        every.append(after_preemption(engine, requests, len(requests) * new_tokens // 2))
    right = [wanted[f"{p}.token_ids"][-new_tokens:].tolist() for p in range(len(batch))]
    logprob_error, wrong_tokens = 0.0, set[int]()
    for found in every:
        wrong_tokens |= {p for p, answer in enumerate(found) if [token for token, *_ in answer] != right[p]}
        for answer, rows in zip(found, logits, strict=True):
            for (token, chosen, top), row in zip(answer, rows[-new_tokens - 1 :].log_softmax(-1), strict=False):
                pairs = [(token, chosen), *top]
                logprob_error = max(logprob_error, *(abs(value - float(row[other])) for other, value in pairs))
    return {
        "logit_error": float(torch.cat(scored).max()),
        "logprob_error": logprob_error,
        "wrong_tokens": sorted(wrong_tokens),
        "same_bits": same_bits,
    }


def rounded(engine: Engine, wanted: dict[str, Tensor], new_tokens: int) -> dict[str, Any]:
    """Return the errors in bf16 at all positions of all prompts, with the tokens that the reference generated; a hash
    of these logits; and how much less likely our greedy tokens are where they first differ from the reference's, by its
    logits, relative to the largest of them."""
    ours, theirs, digest, lost = [], [], hashlib.sha256(), 0.0
    logits = reference_logits(wanted)
    for p, rows in enumerate(logits):
        scored = engine.score(prompt_of(wanted, p, len(rows)))
        digest.update(scored.numpy().data)
        ours.append(row_errors(scored, rows))
        theirs.append(row_errors(wanted[f"{p}.bfloat16"], rows))
    found = answers(engine, continued(wanted, new_tokens)) if new_tokens else []
    for answer, rows in zip(found, logits, strict=False):
        decoded = rows[-new_tokens - 1 : -1]
        for (token, *_), row in zip(answer, decoded, strict=True):
            if token != row.argmax():
                lost = max(lost, float((row.max() - row[token]) / row.abs().max()))
                break
    return {"logits": statistics(ours, theirs), "bits": digest.hexdigest(), "lost": lost}


def reference_logits(wanted: dict[str, Tensor]) -> list[Tensor]:
    """Return the logits in fp32 of all prompts with the tokens generated after them."""
    return [wanted[f"{p}.float32"] for p in range(sum(name.endswith(".token_ids") for name in wanted))]


def continued(wanted: dict[str, Tensor], new_tokens: int) -> list[Request]:
    """Return a request for the greedy tokens of each prompt."""
    params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True, logprobs=5)
    lengths = [len(rows) - new_tokens for rows in reference_logits(wanted)]
    return [Request(prompt_of(wanted, p, length), params) for p, length in enumerate(lengths)]


def row_errors(found: Tensor, wanted: Tensor) -> Tensor:
    """Return [...]: the largest difference in a row, relative to its largest |value|."""
    assert found.shape == wanted.shape and found.dtype is torch.float32
    return (found - wanted).abs().amax(-1) / wanted.abs().amax(-1)


def statistics(ours: list[Tensor], theirs: list[Tensor]) -> dict[str, float]:
    """Return statistics of errors of rows, ours and, with "hf_" before their names, those of the reference in bf16."""
    found = dict[str, float]()
    for whose, parts in (("", ours), ("hf_", theirs)):
        x = torch.cat([part.flatten() for part in parts])
        found |= {f"{whose}{name}": float(getattr(x, name)()) for name in ("mean", "median", "max")}
    return found


def prompt_of(wanted: dict[str, Tensor], p: int, length: int) -> Prompt:
    """Return the first `length` tokens of prompt p, with its media."""
    token_ids = wanted[f"{p}.token_ids"][:length].tolist()
    if f"{p}.media" not in wanted:
        return Prompt(token_ids)
    media = []
    for number in wanted[f"{p}.media"].tolist():
        frames, (t, rows, columns) = wanted[f"media.{number}.frames"], wanted[f"media.{number}.grid"].tolist()
        size = (len(frames), 1, 1) if frames.ndim == 1 else (len(frames), *frames.shape[1:3])
        kind = "audio" if frames.ndim == 1 else "image" if len(frames) == 1 else "video"
        media.append(Medium(kind, frames.numpy().tobytes(), size, (t, rows, columns)))
    prompt = Prompt(token_ids, media)
    if f"{p}.places" in wanted:
        prompt.placeholder_ranges = [PlaceholderRange(*place) for place in wanted[f"{p}.places"].tolist()]
    if f"{p}.source" in wanted:
        prompt.source = [Segment(*part) for part in wanted[f"{p}.source"].tolist()]
        ranges = wanted[f"{p}.visible_ranges"].tolist()
        prompt.visible_ranges = [VisibleRange(start, first, n, bool(shown)) for start, first, n, shown in ranges]
    if media and f"{p}.positions" in wanted:
        prompt.positions = wanted[f"{p}.positions"][:, :length].tolist()
    if media and f"{p}.source_positions" in wanted:  # reference_moss.py
        prompt.source_positions = wanted[f"{p}.source_positions"].tolist()
    return prompt
