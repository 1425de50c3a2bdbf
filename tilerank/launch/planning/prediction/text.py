"""A prediction as text for a terminal, or as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ...text import count, table
from .machine import Machine
from .predict import CaseSpeed, PredictedGoodput
from .rank_splits import Choice, RankSplit


@dataclass(frozen=True)
class Prediction:
    """The predicted speed of a model on a machine.

    prefill: ranks that compute prompts apart. goodput: if limits were given. choice: of `prefill`, if it was chosen.
    """

    machine: Machine
    source_of_shares: str
    cases: Sequence[CaseSpeed]
    prefill: int
    goodput: PredictedGoodput | None
    choice: Choice | None


def render(prediction: Prediction) -> str:
    """Return the lines of a prediction: what it is of, the cases, the goodput, and where the figures come from."""
    machine = prediction.machine
    hosts = f"{count(machine.hosts, 'host')} of " if machine.hosts > 1 else ""
    rows = [["prompt", "batch", "first token", "decode", "step"]]
    for case in prediction.cases:
        rate, step = f"{case.tokens_per_s:.1f} tokens/s", f"{1e3 * case.step_s:.1f} ms"
        rows.append([f"{case.prompt_tokens}", f"{case.batch}", f"{case.first_s:.3f} s", rate, step])
    lines = [
        f"Prediction for {machine.name}: {hosts}{count(machine.nodes, 'node')} of {count(machine.cores, 'core')}, "
        f"{machine.read_gbs:g} GB/s a node. Nothing of this is measured.",
        "",
        *table(rows),
        *_goodput(prediction.goodput),
        *_splits(prediction.choice),
        "",
        f"Rates of the machine: {machine.source}.",
        f"Shares of them that kernels reach: {prediction.source_of_shares}.",
    ]
    return "\n".join(lines)


def _goodput(goodput: PredictedGoodput | None) -> list[str]:
    if goodput is None:
        return []
    found = goodput.best
    result = f"{found.rate:.3g} requests/s, {found.tokens_per_s:.1f} new tokens/s" if found else "none"
    return ["", f"Goodput: {result}. {goodput.text()}."]


def _splits(choice: Choice | None) -> list[str]:
    """Return the table of the splits and the number that was chosen."""
    if choice is None:
        return []
    rows = [["ranks", "goodput", "new tokens/s", "first token", "token after"], *map(_row, choice.splits)]
    chosen = choice.chosen.prefill
    return ["", *table(rows), f"Chosen: {f'--prefill-nodes {chosen}' if chosen else 'all ranks together'}."]


def _row(split: RankSplit) -> list[str]:
    found = split.goodput and split.goodput.best
    if not found:
        return [split.text(), split.rate_text(), "", "", ""]
    waits = (f"{1e3 * seconds:.0f} ms" for seconds in (found.waits.ttft_s, found.waits.tpot_s))
    return [split.text(), split.rate_text(), f"{found.tokens_per_s:.1f}", *waits]


def as_json(prediction: Prediction) -> dict[str, Any]:
    """Return a prediction for JSON."""
    goodput = prediction.goodput
    machine = {name: getattr(prediction.machine, name) for name in ("name", "source", "nodes", "cores", "hosts")}
    splits = [] if prediction.choice is None else prediction.choice.splits
    return {
        "machine": machine,
        "source_of_shares": prediction.source_of_shares,
        "cases": [asdict(case) | {"tokens_per_s": case.tokens_per_s} for case in prediction.cases],
        "prefill_nodes": prediction.prefill,
        **_rates(goodput),
        "limits": goodput and asdict(goodput.limits),
        "mix": goodput and goodput.mix.text(),
        "splits": [
            {"prefill_nodes": split.prefill, "fits": split.goodput is not None} | _rates(split.goodput)
            for split in splits
        ],
    }


def _rates(goodput: PredictedGoodput | None) -> dict[str, float | None]:
    found = goodput and goodput.best
    return {
        "goodput_requests_per_s": found.rate if found else None,
        "goodput_tokens_per_s": found.tokens_per_s if found else None,
    }
