"""Vision models against transformers, as rank processes see it: many models and cuts in one start of the ranks."""

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from exactness import Witness, row_errors
from safetensors.torch import load_file
from torch import Tensor

from tilerank.parallel.join import Team
from tilerank.runtime.lead.engine import Engine, Request
from tilerank.runtime.lead.sampling import SamplingParams
from tilerank.runtime.protocol.prompt import Medium, PlaceholderRange, Prompt, Segment, VisibleRange
from tilerank.runtime.rank.rank_config import RankConfig
from tilerank.runtime.rank.worker import Worker

PIECE = 2e6
"""Operations of a piece of an encode: a few rows of a layer."""


def run(
    team: Team, *, out: str, models: list[str], strategies: list[str], dtypes: list[str], new_tokens: int
) -> list[dict[str, Any]]:
    """All cases against what reference_vl.py left in `out`."""
    witness = Witness(team.group)
    results = []
    for model in models:
        wanted = load_file(f"{out}/{model}.safetensors")
        for strategy in strategies:
            for dtype in dtypes:
                worker = Worker(
                    Path(out) / model,
                    replace(team, group=witness),
                    RankConfig(
                        dtype=getattr(torch, dtype),
                        strategy=strategy,  # type: ignore[arg-type]
                        max_total_tokens=1024,
                    ),
                )
                witness.start()
                case: dict[str, Any] = {"model": model, "strategy": strategy, "dtype": dtype}
                case |= {"tower": [encoding_errors(worker, wanted, i, dtype) for i in range(count(wanted, "frames"))]}
                if team.group.rank == 0:
                    engine = Engine(worker)
                    case |= prompt_errors(engine, wanted, dtype)
                    if dtype == "float32":
                        case |= {"wrong_tokens": wrong_tokens(engine, wanted, new_tokens)}
                    worker.stop()
                else:
                    worker.follow()
                results.append(case | {"digest": witness.digest(), "collectives": witness.count})
    return results


def count(wanted: dict[str, Tensor], key: str) -> int:
    return sum(name.endswith(f".{key}") for name in wanted)


def encoding_errors(worker: Worker, wanted: dict[str, Tensor], i: int, dtype: str) -> dict[str, float]:
    """Errors of the rows of an encoding, ours and those of transformers in `dtype`, against fp32."""
    assert worker.encoder is not None
    frames, exact = wanted[f"media.{i}.frames"], wanted[f"media.{i}.float32"]
    rows, columns, frame_pairs = 0, 0, 0
    frame_pairs, rows, columns = wanted[f"media.{i}.grid"].tolist()
    *pieces, encoding = worker.encoder.encode(frames, (frame_pairs, rows, columns), PIECE)
    assert len(pieces) >= 9 and all(piece is None for piece in pieces) and encoding is not None
    assert encoding.dtype is getattr(torch, dtype)
    assert encoding.shape == exact.shape == worker.encoder.shape((frame_pairs, rows, columns))
    return compare(encoding.float(), wanted[f"media.{i}.{dtype}"], exact)


def compare(ours: Tensor, theirs: Tensor, exact: Tensor) -> dict[str, float]:
    a, b = row_errors(ours, exact), row_errors(theirs, exact)
    return {"max": float(a.max()), "mean": float(a.mean()), "hf_max": float(b.max()), "hf_mean": float(b.mean())}


def media_prompt(wanted: dict[str, Tensor], p: int, length: int) -> Prompt:
    """The first `length` tokens of prompt p, with its media."""
    numbers = wanted[f"{p}.media"].tolist()
    media, places = [], []
    has_source = f"{p}.source" in wanted  # reference_mllama.py
    runs = iter(() if has_source else wanted[f"{p}.places"].tolist())
    for index, number in enumerate(numbers):
        frames, (t, rows, columns) = wanted[f"media.{number}.frames"], wanted[f"media.{number}.grid"].tolist()
        size = (frames.shape[0], frames.shape[1], frames.shape[2])
        media.append(Medium("image" if size[0] == 1 else "video", frames.numpy().tobytes(), size, (t, rows, columns)))
        for part in range(0 if has_source else t):
            start, tokens = next(runs)
            places.append(PlaceholderRange(start, tokens, index, part * tokens))
    if has_source:
        source = [Segment(*part) for part in wanted[f"{p}.source"].tolist()]
        ranges = wanted[f"{p}.visible_ranges"].tolist()
        visible = [VisibleRange(start, first, n, bool(shown)) for start, first, n, shown in ranges]
        prompt = Prompt(wanted[f"{p}.token_ids"][:length].tolist(), media, source=source, visible_ranges=visible)
        if source and f"{p}.source_positions" in wanted:  # reference_moss.py
            prompt.positions = wanted[f"{p}.positions"][:, :length].tolist()
            prompt.source_positions = wanted[f"{p}.source_positions"].tolist()
        return prompt
    positions = wanted[f"{p}.positions"][:, :length].tolist() if numbers else []
    return Prompt(wanted[f"{p}.token_ids"][:length].tolist(), media, places, positions)


def prompt_errors(engine: Engine, wanted: dict[str, Tensor], dtype: str) -> dict[str, Any]:
    """Errors of the logits of each prompt, with the tokens that transformers generated."""
    errors = []
    for p in range(count(wanted, "token_ids")):
        length = len(wanted[f"{p}.token_ids"])
        logits = engine.score(media_prompt(wanted, p, length))
        errors.append(compare(logits, wanted[f"{p}.{dtype}"], wanted[f"{p}.float32"]))
    return {"prompts": errors}


def wrong_tokens(engine: Engine, wanted: dict[str, Tensor], new_tokens: int) -> list[int]:
    """The prompts whose greedy tokens are not those of transformers, all in one batch."""
    params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
    token_ids = [wanted[f"{p}.token_ids"].tolist() for p in range(count(wanted, "token_ids"))]
    requests = [Request(media_prompt(wanted, p, len(ids) - new_tokens), params) for p, ids in enumerate(token_ids)]
    answers: list[list[int]] = [[] for _ in token_ids]
    for event in engine.generate(requests):
        answers[event.request].append(event.token_id)
    return [p for p, answer in enumerate(answers) if answer != token_ids[p][-new_tokens:]]


def of_dtype(cases: list[list[dict[str, Any]]], dtype: str, models: Collection[str] = ()) -> list[list[dict[str, Any]]]:
    """Return the cases of a dtype, for each what every rank found. `models` must be among them, and any at all."""
    found = [case for case in cases if case[0]["dtype"] == dtype]
    assert found and {case[0]["model"] for case in found} >= set(models)
    return found


def mean(errors: list[dict[str, float]], key: str) -> float:
    return sum(e[key] for e in errors) / len(errors)
