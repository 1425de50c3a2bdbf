"""The values of a body are counted before they are parsed, exactly, and too many are refused."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from tests.runtime.server.scripted import Server, make_model, run
from tilerank.runtime.server.apis.completions.body import Completion
from tilerank.runtime.server.apis.messages.body import CountTokensRequest, MessageRequest
from tilerank.runtime.server.apis.responses.body import ResponseRequest
from tilerank.runtime.server.apis.responses.items import ITEMS
from tilerank.runtime.server.apis.tokenize import Detokenize, Tokenize
from tilerank.runtime.server.chat.fields import _first_error
from tilerank.runtime.server.chat.request import ChatCompletion
from tilerank.runtime.server.http.body import read_json, validation_error
from tilerank.runtime.server.http.errors import ApiError
from tilerank.runtime.server.http.json_values import MAX_NUMBERS, MAX_STRUCTURES, MAX_TOKEN_IDS, JsonValues, check_texts
from tilerank.runtime.server.http.memory import MemoryMiddleware, ServerMemory

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.sampled_from('a\\",:[{}]\n é😀')),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.sampled_from('a\\"é[:')), inner),
)


def counted_by_hand(value: Any) -> tuple[int, int]:
    """Return the structures and the numbers of a parsed value; an empty object or list is one of both."""
    if isinstance(value, str):
        return 1, 0
    if not isinstance(value, list | dict):
        return 0, 1
    inner = list(value.values()) if isinstance(value, dict) else value
    counts = [counted_by_hand(one) for one in inner]
    keys = len(value) if isinstance(value, dict) else 0
    return 1 + keys + sum(one[0] for one in counts), sum(one[1] for one in counts) + (not value)


@given(VALUES, st.booleans(), st.integers(1, 9))
def test_the_count_is_that_of_the_parsed_text(value: Any, ascii: bool, step: int) -> None:
    """Wherever the text is cut into pieces."""
    data = json.dumps(value, ensure_ascii=ascii).encode()
    values = JsonValues()
    for begin in range(0, len(data), step):
        values.add(data[begin : begin + step])
    assert (values.structures, values.numbers) == counted_by_hand(value)


def test_texts_are_counted_each_for_itself() -> None:
    """A string that does not end hides nothing of the next text."""
    lists = "[" + ",".join(["[]"] * (MAX_STRUCTURES - 3)) + "]"
    check_texts("here", ['["a', lists])
    with pytest.raises(
        ApiError, match=r"^here: expected at most 65,536 strings, objects and lists, found at least 65,537$"
    ):
        check_texts("here", ['["a', lists, '"\\'])


def read(data: bytes, max_numbers: int = MAX_NUMBERS) -> bytes:
    """Return the body as the server reads it, in two pieces."""
    pieces = [data[: len(data) // 2], data[len(data) // 2 :]]

    async def receive(*_: Any) -> Any:
        return {"type": "http.request", "body": pieces.pop(0), "more_body": bool(pieces)}

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        body, _ = await read_json(Request(scope, receive), 8 << 20, max_numbers)
        found.append(bytes(body))

    found: list[bytes] = []
    asyncio.run(MemoryMiddleware(app, ServerMemory(media=False))({"type": "http"}, receive, receive))
    return found[0]


@pytest.mark.parametrize(
    ("unit", "most", "what"),
    [('"a"', MAX_STRUCTURES - 1, "strings, objects and lists"), ("1", MAX_NUMBERS, "numbers")],
)
def test_bodies_with_too_many_values_are_refused(unit: str, most: int, what: str) -> None:
    assert read(data := f"[{','.join([unit] * most)}]".encode()) == data
    with pytest.raises(
        ApiError, match="^body: expected at most [0-9,]+ " + what + ", found at least ([0-9,]+)$"
    ) as refused:
        read(f"[{','.join([unit] * (most + 1))}]".encode())
    assert refused.value.status == 413 and f"{most + 1 + (unit != '1'):,}" in str(refused.value)


def test_marks_inside_of_strings_are_no_values() -> None:
    data = json.dumps({"prompt": '[{"a":1},' * 200_000}).encode()
    assert read(data) == data


def test_token_ids_may_be_many() -> None:
    data = f"[{','.join(['17'] * MAX_TOKEN_IDS)}]".encode()
    assert read(data, MAX_TOKEN_IDS) == data


BODIES = (ChatCompletion, Completion, ResponseRequest, MessageRequest, CountTokensRequest, Tokenize, Detokenize)


@pytest.mark.parametrize("model", [*BODIES, ITEMS], ids=lambda one: getattr(one, "__name__", "ITEMS"))
def test_checks_stop_at_the_first_error_of_lists_and_dicts(model: Any) -> None:
    """Every list, every dict and every model without further fields, wherever it is in a body."""
    schema = model.core_schema if model is ITEMS else model.__pydantic_core_schema__
    assert not list(unchecked(schema, "", None))
    assert sum(1 for _ in lists(schema)) > (model is not Detokenize)


def children(schema: Any) -> Any:
    inner = schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list | tuple) else ()
    return [one for one in inner if isinstance(one, dict | list | tuple)]


def lists(schema: Any) -> Any:
    if isinstance(schema, dict) and schema.get("type") == "list":
        yield schema
    for one in children(schema):
        yield from lists(one)


def unchecked(schema: Any, where: str, parent: Any) -> Any:
    """Yield the places of schemas that would make an error object for each wrong value. parent: the schema around."""
    if isinstance(schema, dict):
        kind = schema.get("type")
        is_wrapped = isinstance(parent, dict) and parent.get("function", {}).get("function") is _first_error
        any_value = schema.get("values_schema", {}).get("type") == "any"
        if kind in ("list", "set", "frozenset", "tuple") and not schema.get("fail_fast"):
            yield where
        if kind == "dict" and not any_value and not is_wrapped:
            yield where
        where = f"{where}/{schema.get('cls', schema.get('type', ''))}" if isinstance(kind, str) else where
    for one in children(schema):
        yield from unchecked(one, where, schema if isinstance(schema, dict) else parent)


M = 8_000
ERRORS: list[tuple[type[BaseModel], Any]] = [
    (Completion, {"prompt": ["a"] * M}),
    (Completion, {"prompt": [[None] * M]}),
    (Completion, {"prompt": "a", "logit_bias": {str(i): "a" for i in range(M)}}),
    (Completion, {"prompt": "a", "stream_options": {f"{i}": 1 for i in range(M)}}),
    (Detokenize, {"tokens": ["a"] * M}),
    (ChatCompletion, {"messages": [{"role": "user", "content": [{}] * M}] * 9}),
    (ChatCompletion, {"messages": [{}] * M}),
    (ChatCompletion, {"messages": [{"role": "a"}], "documents": [{f"{i}": 1 for i in range(M)}]}),
    (ChatCompletion, {"messages": [{"role": "a"}], "chat_template_kwargs": {f"{i}": [] for i in range(M)}}),
    (ResponseRequest, {"input": [{"role": "user", "content": [{}] * M}] * 9}),
    (ResponseRequest, {"input": [{"role": "user", "content": "a"} | {f"{i}": 1 for i in range(M)}]}),
    (ResponseRequest, {"input": "a", "metadata": {f"{i}": 1 for i in range(M)}}),
    (MessageRequest, {"max_tokens": 1, "messages": [{"role": "user", "content": [{"type": "text"}] * M}] * 9}),
    (MessageRequest, {"max_tokens": 1, "messages": [{"role": "user", "content": "a"}], "system": [{}] * M}),
]


@pytest.mark.parametrize(("model", "body"), ERRORS)
def test_many_wrong_values_make_few_errors(model: type[BaseModel], body: Any) -> None:
    """One for each alternative of a union, whatever the number of values."""
    try:
        model.model_validate(body)
    except ValueError as e:
        error: Any = e
    assert error.error_count() <= 6
    assert validation_error(body, error).status == 400


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("values") / "model")


def test_json_in_strings_is_counted_as_well(directory: Path) -> None:
    """Arguments of calls, for all messages together, and schemas."""
    half = "[" + ",".join(["[]"] * (MAX_STRUCTURES // 2)) + "]"
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": half}}
    turn = {"role": "assistant", "content": "", "tool_calls": [call]}

    async def ask(server: Server) -> None:
        server.answer = "a"
        assert (await server.chat(turn)).status_code == 200
        for fields in ({"messages": [turn, turn]}, {"messages": [turn], "guided_json": half[:-1] + "," + half[1:]}):
            answer = await server.http.post("/v1/chat/completions", json=fields)
            assert answer.status_code == 413 and "strings, objects and lists, found" in answer.text
        answer = await server.http.post("/tokenize", json={"messages": [turn, turn]})
        assert answer.status_code == 413

    run(directory, "{{ messages | length }}", ask)
