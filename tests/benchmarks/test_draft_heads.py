"""benchmarks/train_draft_head.py: a head that has learnt some greedy texts drafts them, in the checkpoint it writes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from batching import DEMO, single_engine
from transformers import AutoModelForCausalLM

from benchmarks import train_draft_head as script
from tilerank.runtime.lead.drafting.draft_counts import DraftCounts
from tilerank.runtime.lead.drafting.drafts import Drafting
from tilerank.runtime.lead.drafting.head_drafts import HeadDrafts
from tilerank.runtime.lead.engine import Request
from tilerank.runtime.lead.sampling import SamplingParams
from tilerank.runtime.protocol.prompt import Prompt

PROMPT, NEW = 20, 40


@pytest.mark.usefixtures("restored")
def test_a_head_drafts_what_it_has_learnt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    model.eval()
    sequences = json.loads((DEMO / "eval_tokens.json").read_text())["sequences"][:5]
    prompts = torch.tensor([ids[:PROMPT] for ids in sequences])
    model.generation_config.eos_token_id = None
    mask = torch.ones_like(prompts)
    texts = model.generate(prompts, attention_mask=mask, do_sample=False, max_new_tokens=NEW).tolist()
    out = tmp_path / "with-head"
    config = script.config_with_head(DEMO)
    head = script.new_head(config, model)
    with torch.no_grad():
        states = [model.model(torch.tensor(ids[:-1])[None]).last_hidden_state[0] for ids in texts]
    examples = [script.Example(torch.tensor(ids), hidden, PROMPT) for ids, hidden in zip(texts, states, strict=True)]
    vocabulary = script.frequent_tokens(examples, 1000)
    losses = script.train(head, model, examples, vocabulary, 40)
    assert losses[-1] < losses[0] / 4
    script.write(DEMO, out, config, head, vocabulary)

    def all_of_them(_: DraftCounts, proposals: Any, rows: int) -> list[int]:
        return [len(proposal.tokens) for _, proposal in proposals]

    monkeypatch.setattr(DraftCounts, "choose", all_of_them)
    engine = single_engine(out, dtype=torch.float32, max_total_tokens=256, speculative="mtp")
    engine.drafting = Drafting(HeadDrafts(engine.worker), engine.scheduler, DraftCounts())
    params = SamplingParams(max_new_tokens=NEW, ignore_eos=True)
    for ids in texts[1:]:  # the first one is held out
        found = [event.token_id for event in engine.generate([Request(Prompt(ids[:PROMPT]), params)])]
        assert found == ids[PROMPT:]
    assert engine.drafting.accepted > engine.drafting.drafted / 2 > 0


def test_the_tokens_that_are_drafted_are_those_most_often_answered() -> None:
    """By hand: 9 twice in answers, 4 and 7 once; 5 only in prompts."""
    texts = [[5, 5, 5, 9, 4], [5, 5, 9, 7]]
    examples = [script.Example(torch.tensor(ids), torch.zeros(0), ids.count(5)) for ids in texts]
    assert [script.frequent_tokens(examples, most).tolist() for most in (1, 2, 8)] == [[9], [4, 9], [4, 7, 9]]


def test_models_that_are_no_glm(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gemma3_text"}')
    with pytest.raises(SystemExit, match="model_type: expected llama or qwen3, found 'gemma3_text'"):
        script.config_with_head(tmp_path)
    with pytest.raises(SystemExit, match="expected a directory that does not exist yet"):
        script.main([str(DEMO), str(tmp_path)])
