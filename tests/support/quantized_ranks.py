"""Functions of ranks for quantised models: many checkpoints in one start of the ranks."""

from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from tilerank.loader.quantization_config import Quantization
from tilerank.parallel.join import Team
from tilerank.runtime.lead.engine import Engine, Request
from tilerank.runtime.lead.sampling import SamplingParams
from tilerank.runtime.protocol.prompt import Prompt
from tilerank.runtime.rank.rank_config import RankConfig
from tilerank.runtime.rank.worker import Worker


def run(team: Team, *, cases: list[dict[str, Any]], out: str, ids: list[int], new_tokens: int) -> list[dict[str, Any]]:
    """Write the logits of `ids` to `out` on rank 0; return the bytes that each rank read, and greedy tokens on rank
    0."""
    import torch

    results = []
    for case in cases:
        asked = case["quantization"]
        worker = Worker(
            Path(case["model"]),
            team,
            RankConfig(
                dtype=torch.bfloat16,
                quantization=None if asked is None else Quantization(*asked),
                strategy=case["strategy"],
                max_total_tokens=256,
            ),
        )
        result: dict[str, Any] = {"name": case["name"], "bytes_read": worker.load_report.bytes_read}
        if team.group.rank == 0:
            engine = Engine(worker)
            save_file({"logits": engine.score(Prompt(ids))}, Path(out) / f"{case['name']}.safetensors")
            params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
            result["tokens"] = [event.token_id for event in engine.generate([Request(Prompt(ids[:5]), params)])]
            worker.stop()
        else:
            worker.follow()
        results.append(result)
    return results
