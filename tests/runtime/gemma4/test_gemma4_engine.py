"""Layers that read the keys of others give the same bits from shared pages and after preemption."""

from pathlib import Path

import torch
from batching import answers, single_engine
from rungs import needs_compiled
from tiny import make_checkpoint

from tilerank.runtime.lead.engine import Request
from tilerank.runtime.lead.sampling import SamplingParams
from tilerank.runtime.protocol.prompt import Prompt


@needs_compiled
def test_shared_pages_and_preemption_leave_the_bits(tmp_path: Path) -> None:
    dims = {"hidden": 96, "head_dim": 24, "kv_heads": 1, "inter": 104, "vocab": 600, "layers": 6, "per_layer": 64}
    model = make_checkpoint("gemma4_text", tmp_path, 3, **dims)
    ids = torch.randint(0, 600, (70,), generator=torch.Generator().manual_seed(1)).tolist()
    params = SamplingParams(temperature=0.0, max_new_tokens=24, ignore_eos=True, logprobs=2)
    requests = [Request(Prompt(ids[first:last]), params) for first, last in ((0, 62), (1, 63), (2, 64), (0, 33))]
    wanted = [answers(single_engine(model, dtype=torch.float32, max_total_tokens=1024), [one])[0] for one in requests]
    engine = single_engine(model, dtype=torch.float32, max_total_tokens=160)
    assert answers(engine, requests) == wanted
    assert engine.state().preemptions
    assert answers(engine, requests) == wanted
    assert engine.state().hit_tokens
