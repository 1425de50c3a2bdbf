"""`tilerank serve` with a tiny gpt-oss, whose random answers follow the grammars of harmony's channels."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import Server, serving
from tiny import make_checkpoint

from tests.loader.harmony_chats import DATE, make_harmony_model
from tilerank.loader.harmony.marks import END
from tilerank.loader.tokenizer import Tokenizer

USER: Any = [{"role": "user", "content": "What is it like?"}]
SKY = {"type": "object", "properties": {"sky": {"enum": ["blue", "grey"]}}, "required": ["sky"]}
FORM: Any = {"type": "json_schema", "json_schema": {"name": "seen", "schema": SKY}}
TOOLS: Any = [{"type": "function", "function": {"name": "look_up", "parameters": SKY}}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tmp = tmp_path_factory.mktemp("harmony")
    written = make_harmony_model(tmp / "written")
    made = make_checkpoint("gpt_oss", tmp, vocab=Tokenizer(written).num_tokens, layers=2)
    model = Path(shutil.copytree(made, tmp / "model"))
    for template in model.glob("chat_template.*"):
        template.unlink()
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(written / name, model)
    ends = json.loads((written / "generation_config.json").read_text())
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | ends))
    return model


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Server]:
    variables = json.dumps({"current_date": DATE})
    options = ("--served-model-name", "it", "--default-chat-template-kwargs", variables, "--model-path", model)
    with serving("--tp", 2, *options) as running:
        yield running


def biases(model: Path, *texts: str) -> dict[str, int]:
    """Return a bias of the first token of each text, and a smaller one of the end of a message."""
    tokenizer = Tokenizer(model)
    likely = {str(tokenizer.encode(text, add_special_tokens=False)[0]): 100 for text in texts}
    return likely | {str(tokenizer.token_id(END)): 10}


@pytest.mark.parametrize("stream", [False, True])
def test_a_forced_call_and_an_answer_of_the_schema(server: Server, model: Path, stream: bool) -> None:
    client: Any = server.client()
    asked: dict[str, Any] = {"model": "it", "messages": USER, "max_tokens": 200, "seed": 1, "stream": stream}
    assert Tokenizer(model).chat_template.has_channels
    final = {"response_format": FORM, "logit_bias": biases(model, "final")}
    call = {"tools": TOOLS, "tool_choice": "required", "logit_bias": biases(model, "commentary", " to=functions")}
    answer = client.chat.completions.create(**asked, **final)
    called = client.chat.completions.create(**asked, **call)
    if stream:
        content = "".join(chunk.choices[0].delta.content or "" for chunk in answer)
        chunks = [chunk.choices[0] for chunk in called]
        calls = [one.function for chunk in chunks for one in chunk.delta.tool_calls or []]
        name, arguments, reason = calls[0].name, "".join(one.arguments for one in calls), chunks[-1].finish_reason
    else:
        content, found = answer.choices[0].message.content, called.choices[0]
        function = found.message.tool_calls[0].function
        name, arguments, reason = function.name, function.arguments, found.finish_reason
    assert json.loads(content)["sky"] in ("blue", "grey")
    assert name == "look_up" and json.loads(arguments)["sky"] in ("blue", "grey") and reason == "tool_calls"


def test_the_prompt_has_the_date_of_the_option(server: Server, model: Path) -> None:
    ids = server.post("/tokenize", {"messages": USER}).json()["tokens"]
    assert f"Current date: {DATE}" in Tokenizer(model).decode(ids)
