"""Functions of ranks for tests/runtime/test_kv_cache.py: engines with an int8 KV cache."""

from pathlib import Path
from typing import Any

import torch
from batching import DEMO
from safetensors.torch import save_file

from tilerank.parallel.join import Team
from tilerank.runtime.engine import Engine, Request
from tilerank.runtime.prompt import Prompt
from tilerank.runtime.sampling import SamplingParams
from tilerank.runtime.worker import Worker


def run(team: Team, *, out: str, ids: list[int], prompt: int, new_tokens: int) -> dict[str, Any]:
    """Return, by dtype, on rank 0 the greedy tokens after the first `prompt` ids; write the logits of all ids to
    `out`."""
    found = {}
    for name in ("float32", "bfloat16"):
        worker = Worker(DEMO, team, dtype=getattr(torch, name), kv_dtype=torch.int8, max_total_tokens=512)
        if team.group.rank == 0:
            engine = Engine(worker)
            save_file({"logits": engine.score(Prompt(ids))}, Path(out) / f"{name}.safetensors")
            params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
            found[name] = [event.token_id for event in engine.generate([Request(Prompt(ids[:prompt]), params)])]
            worker.stop()
        else:
            worker.follow()
    return found
