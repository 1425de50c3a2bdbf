"""A prediction as text for a terminal, or as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ...goodput.search import best
from ...text import count, table
from .predict import Prediction


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
        *_goodput(prediction),
        "",
        f"Rates of the machine: {machine.source}.",
        f"Shares of them that kernels reach: {prediction.source_of_shares}.",
    ]
    return "\n".join(lines)


def _goodput(prediction: Prediction) -> list[str]:
    if prediction.mix is None or prediction.limits is None:
        return []
    found = best(prediction.goodput)
    result = f"{found.rate:.3g} requests/s, {found.tokens_per_s:.1f} new tokens/s" if found else "none"
    return ["", f"Goodput: {result}. {prediction.mix.text()}; {prediction.limits.text()}, for 99 % of the requests."]


def as_json(prediction: Prediction) -> dict[str, Any]:
    """Return a prediction for JSON."""
    found = best(prediction.goodput)
    machine = {name: getattr(prediction.machine, name) for name in ("name", "source", "nodes", "cores", "hosts")}
    return {
        "machine": machine,
        "source_of_shares": prediction.source_of_shares,
        "cases": [asdict(case) | {"tokens_per_s": case.tokens_per_s} for case in prediction.cases],
        "goodput_requests_per_s": found.rate if found else None,
        "goodput_tokens_per_s": found.tokens_per_s if found else None,
        "limits": prediction.limits and asdict(prediction.limits),
        "mix": prediction.mix and prediction.mix.text(),
    }
