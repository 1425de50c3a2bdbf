"""A running `tilerank serve` for tests, and the expected text of its model from transformers."""

import contextlib
import json
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import httpx
import openai
from command import DEMO, Run, await_true

PROMPTS = [f"{begin} {end}" for begin in ("In the beginning", "Once upon a time") for end in ("God", "there", "the")]


class Server:
    """A server that is ready for requests."""

    def __init__(self, running: Run) -> None:
        line = running.await_line("is served at")
        found = re.search(r"http://127\.0\.0\.1:(\d+)/v1", line)
        assert found is not None, line
        self.running = running
        self.port = int(found[1])
        self.url = f"http://127.0.0.1:{self.port}"
        await_true(lambda: self.get("/health").status_code == 200, 120, "the server does not become ready")

    def get(self, path: str, **options: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=300, **options)

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} | options.pop("headers", {})
        return httpx.post(self.url + path, content=content, timeout=300, headers=headers, **options)

    def gauge(self, name: str) -> float:
        text = re.sub(r'model_name="[^"]*",?', "", self.get("/metrics").text).replace(",}", "}").replace("{}", "")
        found = re.search(rf"^tilerank_{name} (\S+)$", text, re.M)
        assert found is not None
        return float(found[1])

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url + "/v1", api_key="any", timeout=300, max_retries=0)


@contextlib.contextmanager
def serving(*arguments: object, **options: Any) -> Iterator[Server]:
    """Serve the demo model, unless `arguments` name another, on a free port in fp32, as transformers computes."""
    model = () if "--model-path" in arguments else (DEMO,)
    with Run("serve", "--dtype", "float32", "--port", 0, *arguments, *model, **options) as running:
        yield Server(running)


@cache
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(DEMO)


@cache
def _model() -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)


def log_likelihoods(prompts: list[list[int]]) -> list[list[float]]:
    """Return transformers' log-probabilities in fp32 of every token but the first."""
    import torch

    with torch.inference_mode():
        rows = [torch.log_softmax(_model()(torch.tensor([ids])).logits[0], -1) for ids in prompts]
    return [
        [float(row[id]) for row, id in zip(of, ids[1:], strict=False)] for of, ids in zip(rows, prompts, strict=True)
    ]


@cache
def greedy(text: str, count: int) -> str:
    """Return transformers' greedy continuation in fp32."""
    import torch

    ids = torch.tensor([tokenizer().encode(text)])
    out = _model().generate(ids, max_new_tokens=count, do_sample=False)
    return str(tokenizer().decode(out[0, ids.shape[1] :], skip_special_tokens=True))


def layer_outputs(ids: list[int]) -> Any:
    """Return transformers' hidden states in fp32: [tokens, hidden] of the embeddings and of each layer."""
    import torch

    with torch.inference_mode():
        return [one[0] for one in _model()(torch.tensor([ids]), output_hidden_states=True).hidden_states]
