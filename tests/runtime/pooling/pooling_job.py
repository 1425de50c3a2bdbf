"""What the ranks of the tests of pooling do: embed or score all texts with all models."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from tilerank.parallel.join import Team
from tilerank.runtime.lead.engine import Engine, Request
from tilerank.runtime.protocol.events import PooledEvent
from tilerank.runtime.protocol.params import PoolingParams, SamplingParams
from tilerank.runtime.protocol.prompt import Prompt
from tilerank.runtime.rank.rank_config import RankConfig
from tilerank.runtime.rank.worker import Worker

PARAMS = SamplingParams(max_new_tokens=0, pooling=PoolingParams())


def run(team: Team, *, models: list[str], texts: list[list[int]], rows: list[int]) -> dict[str, Any]:
    """Return the values of all texts, by model and the rows of a chunk; empty on ranks above 0."""
    found: dict[str, Any] = {}
    for model in models:
        worker = Worker(Path(model), team, RankConfig(dtype=torch.float32, max_total_tokens=1024))
        if team.group.rank:
            worker.follow()
            continue
        engine = Engine(worker)
        for size in rows:
            engine.scheduler.chunk_rows = size
            found[f"{model}:{size}"] = values(engine, texts)
            assert not engine.busy and engine.state().cache_used == 0
        worker.stop()
    return found


def values(engine: Engine, texts: list[list[int]], dimensions: int = 0) -> list[list[float]]:
    """Return the vectors or scores of texts that run together."""
    params = SamplingParams(max_new_tokens=0, pooling=PoolingParams(dimensions)) if dimensions else PARAMS
    numbers = [engine.submit(Request(Prompt(ids), params)) for ids in texts]
    found: dict[int, list[float]] = {}
    while engine.busy:
        for event in engine.step():
            assert isinstance(event, PooledEvent)
            found[event.request] = np.frombuffer(event.values, "<f4").tolist()
    return [found[number] for number in numbers]
