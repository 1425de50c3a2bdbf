"""`tilerank serve` with a model that reasons: answers follow their schema after the reasoning, which is free.

The demo model has not learned to reason, so that a bias of one token ends its reasoning.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from media_files import DEMO_VL
from serving import Server, serving

from tilerank.loader.tokenizer import Tokenizer

USER: Any = [{"role": "user", "content": "What is in the picture?"}]
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}},
    "required": ["colour"],
    "additionalProperties": False,
}
FORM: Any = {"type": "json_schema", "json_schema": {"name": "seen", "schema": SCHEMA}}
THINK, END_THINK = (Tokenizer(DEMO_VL).encode(mark, add_special_tokens=False)[0] for mark in ("<think>", "</think>"))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = Path(shutil.copytree(DEMO_VL, tmp_path_factory.mktemp("reasoning") / "model"))
    written = json.loads((model / "chat_template.json").read_text())["chat_template"]
    switch = "{%- if enable_thinking is defined and enable_thinking %}{{- '<think>\\n' }}{%- endif %}"
    (model / "chat_template.json").write_text(json.dumps({"chat_template": written + switch}))
    with serving("--tp", 2, "--served-model-name", "it", "--model-path", model) as running:
        yield running


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("opened", [False, True], ids=["opened by the model", "opened by the template"])
def test_reasoning_and_then_an_answer_of_the_schema(server: Server, opened: bool, stream: bool) -> None:
    arguments: dict[str, Any] = {
        "model": "it",
        "messages": USER,
        "response_format": FORM,
        "max_tokens": 200,
        "seed": 1,
        "logit_bias": {str(END_THINK): 12} | ({} if opened else {str(THINK): 100}),
        "extra_body": {"chat_template_kwargs": {"enable_thinking": opened}},
    }
    reasoning = content = ""
    if stream:
        for chunk in server.client().chat.completions.create(**arguments, stream=True):
            delta: Any = chunk.choices[0].delta
            content += delta.content or ""
            reasoning += getattr(delta, "reasoning_content", "")
    else:
        answer = server.client().chat.completions.create(**arguments)
        message: Any = answer.choices[0].message
        reasoning, content = message.reasoning_content, message.content
        assert answer.usage is not None and answer.usage.completion_tokens_details is not None
        counted = answer.usage.completion_tokens_details.reasoning_tokens
        assert counted is not None and 1 < counted < answer.usage.completion_tokens
    assert reasoning
    assert json.loads(content)["colour"] in ("red", "blue")


def test_reasoning_that_does_not_end(server: Server) -> None:
    answer = server.client().chat.completions.create(
        model="it",
        messages=USER,
        max_tokens=6,
        logit_bias={str(END_THINK): -100},
        extra_body={"chat_template_kwargs": {"enable_thinking": True}, "ignore_eos": True},
    )
    message: Any = answer.choices[0].message
    assert answer.choices[0].finish_reason == "length"
    assert message.reasoning_content and message.content is None
