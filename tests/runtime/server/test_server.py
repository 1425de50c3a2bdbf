"""The parts of the server, checked by hand: stop strings, messages in pieces, tool calls, errors."""

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pydantic
import pytest
import tokenizers
from command import DEMO
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.runtime.server.scripted import Server, run
from tilerank.loader.chat.template import ReasoningStart
from tilerank.loader.generation_config import SamplingDefaults
from tilerank.loader.tokenizer import Tokenizer
from tilerank.runtime.protocol.events import TokenEvent
from tilerank.runtime.protocol.framing import encode
from tilerank.runtime.protocol.params import Logprobs, SamplingParams
from tilerank.runtime.protocol.prompt import Prompt
from tilerank.runtime.server.apis.completions.body import Completion
from tilerank.runtime.server.apis.completions.choices import ChatFormatter, TextFormatter
from tilerank.runtime.server.chat.deltas import Delta
from tilerank.runtime.server.chat.messages import Message
from tilerank.runtime.server.chat.request import ChatCompletion
from tilerank.runtime.server.chat.text import StopStrings, TextStream
from tilerank.runtime.server.chat.text_encoder import DirectTextEncoder
from tilerank.runtime.server.http.body import validation_error
from tilerank.runtime.server.link.messages import Cancel, Submit, ToEngine, engine_inbox

TOKENIZER = Tokenizer(DEMO)


def texts(ids: list[int], stop: list[str]) -> tuple[list[str], bool]:
    stops = StopStrings(stop)
    stream = TextStream(TOKENIZER.stream(), stops)
    pieces = []
    for id in ids:
        pieces.append(stream.push(id).answer)
        if stops.stopped:
            return pieces, True
    return [*pieces, stream.flush().answer], stops.stopped


@settings(deadline=None)
@given(st.text("abé🙂 \n", max_size=30), st.lists(st.text("abé🙂 ", min_size=1, max_size=4), max_size=3))
def test_a_text_ends_at_its_first_stop_string(text: str, stop: list[str]) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    whole = TOKENIZER.decode(ids)
    # The stop string that is complete first, however the text is cut into tokens.
    found = [(whole.index(one) + len(one), whole.index(one)) for one in stop if one in whole]
    pieces, stopped = texts(ids, stop)
    assert "".join(pieces) == (whole[: min(found)[1]] if found else whole)
    assert stopped == bool(found)
    assert all("\ufffd" not in piece for piece in pieces)


def test_text_is_held_only_as_long_as_it_may_become_a_stop_string() -> None:
    ids = TOKENIZER.encode("abcabd", add_special_tokens=False)
    assert "".join(texts(ids, ["abd"])[0]) == "abc"
    pieces, stopped = texts(TOKENIZER.encode("the end is ab", add_special_tokens=False), ["abd"])
    assert "".join(pieces) == "the end is ab" and not stopped
    assert pieces[-1] == "ab"


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_messages_come_out_of_pieces_of_any_size(size: int) -> None:
    params = SamplingParams(max_new_tokens=5, temperature=0.5, logit_bias={3: -1.5}, stop_token_ids=(1, 2))
    sent: list[ToEngine] = [
        Submit(1, Prompt([5, 6]), params, [3]),
        Cancel(1),
        Submit(2, Prompt(list(range(300))), SamplingParams(), []),
    ]
    data = b"".join(map(encode, sent))
    inbox = engine_inbox()
    assert [message for at in range(0, len(data), size) for message in inbox.feed(data[at : at + size])] == sent


def test_log_probabilities_of_tokens_that_are_parts_of_characters() -> None:
    """`bytes` are those of the token; its offset is that of the character that it is part of."""
    text = "Hé 😀 world"
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    assert len(ids) == 9  # H, é in 2, a space, the face in 4, world with its space
    # Two alternatives with the same text: the more likely one is listed.
    tokens = tuple(TokenEvent(0, id, 0.0, logprobs=Logprobs(-1.0, ((ids[1], -0.5), (ids[2], -4.0)), 1)) for id in ids)
    stream = TOKENIZER.stream()
    deltas = [Delta(0, (stream.push(token.token_id),), (token,), None) for token in tokens]
    held = [
        Delta(0, ("Hé",), tokens[:4], None),
        Delta(0, (" 😀 world",), tokens[4:], "length"),
    ]  # a stop string was possible
    for pieces in (deltas, held):
        plain, chat = TextFormatter(TOKENIZER, 2), ChatFormatter(TOKENIZER, 2)
        logprobs = plain.choice([plain.chunk(delta) for delta in pieces])["logprobs"]
        assert logprobs["text_offset"] == [0, 1, 1, 2, 3, 3, 3, 3, 4]
        assert logprobs["tokens"] == ["H", "\ufffd", "\ufffd", " ", "\ufffd", "\ufffd", "\ufffd", "\ufffd", " world"]
        assert logprobs["top_logprobs"] == [{"\ufffd": -0.5}] * 9
        entries = chat.choice([chat.chunk(delta) for delta in pieces])["logprobs"]["content"]
        assert b"".join(bytes(entry["bytes"]) for entry in entries) == text.encode()
        assert [entry["token"] for entry in entries] == logprobs["tokens"]
        assert [alternative["bytes"] for alternative in entries[0]["top_logprobs"]] == [[0xC3], [0xA9]]


def test_earlier_calls_reach_the_template_as_objects() -> None:
    message = Message.model_validate(
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}],
        }
    )
    rendered = message.for_template(parts=False, keeps_arguments=False)
    assert rendered["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": 1}}


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        (None, "it has no usable chat template; a plain prompt needs none."),
        ("{% break %}", "The chat template refused the messages: 'break' outside loop (<template>, line 11)"),
        ("{{ raise_exception('no system') }}", "The chat template refused the messages: no system"),
    ],
)
def test_messages_without_a_usable_template(tmp_path: Path, template: str | None, sentence: str) -> None:
    """A missing template, as of base models, has an error of its own."""
    shutil.copy(DEMO / "tokenizer.json", tmp_path)
    if template is not None:
        (tmp_path / "chat_template.jinja").write_text(template)

    async def ask(server: Server) -> Any:
        return await server.http.post("/tokenize", json={"messages": [{"role": "user", "content": "a"}]})

    answer = run(tmp_path, None, ask)
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, sentence)


def test_others_are_answered_while_a_template_is_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    answered = asyncio.Event()

    async def encode_chat(*given: object) -> tuple[list[int], ReasoningStart]:
        await answered.wait()
        return [3, 1, 4], ReasoningStart.NEVER

    async def ask(server: Server) -> None:
        monkeypatch.setattr(DirectTextEncoder, "encode_chat", encode_chat)
        body = {"messages": [{"role": "user", "content": "a"}]}
        chat = asyncio.create_task(server.http.post("/tokenize", json=body))
        assert (await server.http.post("/tokenize", json={"prompt": "a"})).status_code == 200
        assert not chat.done()
        answered.set()
        assert (await chat).json()["tokens"] == [3, 1, 4]

    run(DEMO, None, ask)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, (0.6, 20, 0.95, 0.0, 1.05)),
        ({"temperature": None, "top_k": None}, (0.6, 20, 0.95, 0.0, 1.05)),
        ({"temperature": 0, "top_p": 1}, (0.0, 20, 1.0, 0.0, 1.05)),
        ({"top_k": -1, "min_p": 0.1, "repetition_penalty": 1}, (0.6, 0, 0.95, 0.1, 1.0)),
    ],
)
def test_missing_fields_take_the_values_of_the_model(body: dict[str, object], expected: tuple[float, ...]) -> None:
    advised = SamplingDefaults(temperature=0.6, top_k=20, top_p=0.95, repetition_penalty=1.05)

    async def ask(server: Server) -> SamplingParams:
        assert (await server.http.post("/v1/completions", json={"prompt": "a"} | body)).status_code == 200
        return server.submits[-1].params

    params = run(DEMO, None, ask, sampling=advised)
    found = (params.temperature, params.top_k, params.top_p, params.min_p, params.repetition_penalty)
    assert found == expected


@pytest.mark.parametrize("template", ["{{ messages[-1].content }}<|im_end|>", "{% endfor %}"])
def test_answers_end_at_the_ends_of_the_tokenizer(tmp_path: Path, template: str) -> None:
    """Which the engine has no file of; a template that does not compile has no end of a turn."""
    inner = tokenizers.Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    inner.add_special_tokens(["</s>", "<|im_end|>"])
    inner.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))

    async def ask(server: Server) -> SamplingParams:
        assert (await server.http.post("/v1/completions", json={"prompt": "a"})).status_code == 200
        return server.submits[-1].params

    ends = ["</s>", "<|im_end|>"] if "im_end" in template else ["</s>"]
    assert run(tmp_path, template, ask).end_token_ids == tuple(inner.token_to_id(end) for end in ends)


@pytest.mark.parametrize(
    ("fields", "where", "says"),
    [
        ({"stop": ""}, "stop", "String should have at least 1 character"),
        ({"stop": ["a", ""]}, "stop.1", "String should have at least 1 character"),
        ({"stop": ["a"] * 17}, "stop", "List should have at most 16 items"),
        ({"prompt": ["a"] * 65}, "prompt", "List should have at most 64 items"),
        ({"prompt": [[1], []]}, "prompt.1", "List should have at least 1 item"),
        ({"prompt": [[1], ["a"]]}, "prompt.1.0", "Input should be a valid integer"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages.0.content.0.text",
            "Field required",
        ),
        ({"tool_choice": {"type": "function", "function": {}}}, "tool_choice.function.name", "Field required"),
        ({"tool_choice": "any"}, "tool_choice", "Input should be 'none', 'auto' or 'required'"),
        ({"logit_bias": {"a": 1}}, "logit_bias.a.[key]", "Input should be a valid integer"),
    ],
)
def test_an_error_names_the_field_as_the_client_wrote_it(fields: dict[str, Any], where: str, says: str) -> None:
    """Union fields included: the error is that of the alternative that the client meant."""
    kind = Completion if fields.keys() & {"prompt", "stop"} else ChatCompletion
    body: dict[str, Any] = {"prompt": "a"} if kind is Completion else {"messages": [{"role": "user", "content": "a"}]}
    body |= fields
    with pytest.raises(pydantic.ValidationError) as caught:
        kind.model_validate(body)
    refused = validation_error(body, caught.value)
    assert refused.param == where
    assert str(refused).startswith(f"{where}: {says}")
