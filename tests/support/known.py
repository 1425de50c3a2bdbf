"""Requests to the demo model with known answers: greedy, in fp32, computed one by one with transformers."""

import json
import random
from dataclasses import dataclass
from functools import cache
from typing import Any

from command import DEMO
from serving import tokenizer

LONGEST = 48
"""Maximum number of tokens of an answer."""
BEGINNINGS = (0, 40, 600)
"""Numbers of tokens that prompts have in common."""


@dataclass(frozen=True)
class Known:
    """A request with `body` to `path`. ids: tokens of the answer, at most LONGEST."""

    path: str
    body: dict[str, Any]
    ids: tuple[int, ...]

    def text(self, count: int) -> str:
        """Return the text of the first `count` tokens."""
        return str(tokenizer().decode(list(self.ids[:count]), skip_special_tokens=True))


@cache
def known(count: int) -> tuple[Known, ...]:
    """Return prompts of 3 to 800 tokens; many have common beginnings, and every fourth one is a chat."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model: Any = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    draw = random.Random(count)
    texts = json.loads((DEMO / "eval_tokens.json").read_text())["sequences"]
    beginning = [token for text in texts[:3] for token in text]
    found = []
    for i in range(count):
        own = texts[3 + i % (len(texts) - 3)][: draw.choice((3, 12, 50, 200))]
        prompt = tokenizer().decode(beginning[: BEGINNINGS[i % len(BEGINNINGS)]] + own, skip_special_tokens=True)
        path, body = "/v1/completions", {"prompt": prompt}
        if i % 4 == 3:
            path, body = "/v1/chat/completions", {"messages": [{"role": "user", "content": prompt}]}
            prompt = tokenizer().apply_chat_template(body["messages"], tokenize=False, add_generation_prompt=True)
        ids = torch.tensor([tokenizer().encode(prompt)])
        answer = model.generate(ids, max_new_tokens=LONGEST, do_sample=False)[0, ids.shape[1] :]
        found.append(Known(path, body, tuple(answer.tolist())))
    return tuple(found)
