"""`tilerank serve` with structured answers and tool calls, through the official client.

pydantic, and Python's json and re, check the answers.
"""

import json
import re
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pydantic
import pytest
from command import await_true
from pydantic import BaseModel, ConfigDict, Field
from serving import PROMPTS, Server, serving, tokenizer

USER: Any = [{"role": "user", "content": "Who came?"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("--tp", 2) as running:
        yield running


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Visit(Strict):
    kind: Literal["feast", "war", "trade"]
    days: int = Field(ge=1, le=40)


class Journey(Strict):
    """Its schema has a definition that is referenced twice."""

    who: Literal["Moses", "Aaron", "Miriam"]
    first: Visit
    then: Visit | None
    peaceful: bool


class Weather(Strict):
    city: Literal["Ur", "Nineveh"]
    hours: list[Literal[6, 12, 18]] = Field(min_length=1, max_length=2)


class Meet(Strict):
    whom: Visit


TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "parameters": Weather.model_json_schema()}},
    {"type": "function", "function": {"name": "meet", "parameters": Meet.model_json_schema()}},
    {"type": "function", "function": {"name": "now"}},
]
ARGUMENTS: dict[str, type[BaseModel]] = {"weather": Weather, "meet": Meet, "now": Strict}


def test_the_client_parses_answers_into_models(server: Server) -> None:
    for seed in range(3):
        answer = server.client().chat.completions.parse(
            model="demo-lm", messages=USER, response_format=Journey, max_tokens=400, seed=seed
        )
        assert isinstance(answer.choices[0].message.parsed, Journey)
        assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_a_json_schema_by_hand(server: Server, stream: bool) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "visit", "schema": Visit.model_json_schema()}}
    arguments: Any = {"model": "demo-lm", "messages": USER, "response_format": form, "max_tokens": 200, "n": 2}
    texts = {0: "", 1: ""}
    if stream:
        for chunk in server.client().chat.completions.create(**arguments, stream=True):
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
    else:
        answer = server.client().chat.completions.create(**arguments)
        texts = {choice.index: choice.message.content for choice in answer.choices}
    for text in texts.values():
        Visit.model_validate_json(text)


def test_any_json_object(server: Server) -> None:
    body = {"messages": USER, "response_format": {"type": "json_object"}, "max_tokens": 60, "n": 8, "seed": 3}
    choices = server.post("/v1/chat/completions", body).json()["choices"]
    for choice in choices:
        text = choice["message"]["content"]
        assert text.startswith("{")
        if choice["finish_reason"] == "stop":
            assert isinstance(json.loads(text), dict)
    plain = server.post(
        "/v1/chat/completions", {"messages": USER, "response_format": {"type": "text"}, "max_tokens": 5}
    )
    assert plain.status_code == 200


@pytest.mark.parametrize("pattern", [r"(yes|no)!{3}", r"\d{4}-\d{2}-\d{2}", r"a/b[/]c\n\"[é🙂]", r"(?i)amen( amen){2}"])
def test_a_regular_expression(server: Server, pattern: str) -> None:
    for path, prompt in (("/v1/completions", {"prompt": PROMPTS[0]}), ("/v1/chat/completions", {"messages": USER})):
        body = {**prompt, "guided_regex": pattern, "max_tokens": 50, "seed": 1, "ignore_eos": True}
        choice = server.post(path, body).json()["choices"][0]
        assert re.fullmatch(pattern, choice["text"] if "text" in choice else choice["message"]["content"])
        assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("logprobs", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_usage_counts_the_tokens_of_the_text(server: Server, stream: bool, logprobs: bool) -> None:
    """By hand: no token of the vocabulary has two digits, so four digits are four tokens.

    The end of the grammar, after which no token can follow, does not count.
    """
    assert not [token for token in tokenizer().get_vocab() if re.search("[0-9].*[0-9]", token)]
    await_true(lambda: server.gauge("num_requests_running") == 0, 60, "an earlier request is still running")
    generated = server.gauge("generation_tokens_total")
    body = {"messages": USER, "guided_regex": "[0-9]{4}", "max_tokens": 20, "n": 3, "logprobs": logprobs}
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        lines = server.post("/v1/chat/completions", body).text.splitlines()
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
        choices, usage = [choice for chunk in chunks for choice in chunk["choices"]], chunks[-1]["usage"]
        assert len("".join(choice["delta"].get("content", "") for choice in choices)) == 3 * 4
        assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["stop"] * 3
    else:
        answer = server.post("/v1/chat/completions", body).json()
        choices, usage = answer["choices"], answer["usage"]
        assert [(len(choice["message"]["content"]), choice["finish_reason"]) for choice in choices] == [(4, "stop")] * 3
    assert usage["completion_tokens"] == 3 * 4
    assert usage["total_tokens"] == usage["prompt_tokens"] + 3 * 4
    assert sum(len((choice["logprobs"] or {"content": []})["content"]) for choice in choices) == 3 * 4 * logprobs
    await_true(
        lambda: server.gauge("generation_tokens_total") - generated == 3 * 4, 60, "the engine counts other tokens"
    )


def called(answer: Any) -> list[tuple[str, BaseModel]]:
    message = answer.choices[0].message
    return [
        (call.function.name, ARGUMENTS[call.function.name].model_validate_json(call.function.arguments))
        for call in message.tool_calls or []
    ]


def ask(server: Server, **options: Any) -> Any:
    return server.client().chat.completions.create(
        model="demo-lm", messages=USER, tools=TOOLS, max_tokens=300, **options
    )


def test_a_tool_must_be_called(server: Server) -> None:
    names = set()
    for seed in range(4):
        answer = ask(server, tool_choice="required", parallel_tool_calls=False, seed=seed)
        ((name, _),) = called(answer)
        names.add(name)
        assert answer.choices[0].finish_reason == "tool_calls" and answer.choices[0].message.content is None
    assert len(names) > 1
    # Several calls are allowed: those that are complete when the tokens end follow the schemas.
    assert len(called(ask(server, tool_choice="required", seed=1))) >= 1


@pytest.mark.parametrize("name", ["weather", "meet", "now"])
def test_the_named_tool_must_be_called(server: Server, name: str) -> None:
    choice = {"type": "function", "function": {"name": name}}
    answer = ask(server, tool_choice=choice, seed=2)
    assert [name for name, _ in called(answer)] == [name]
    chunks = list(ask(server, tool_choice=choice, seed=2, stream=True))
    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    whole = answer.choices[0].message.tool_calls
    assert [(call.function.name, call.function.arguments) for call in calls] == [(name, whole[0].function.arguments)]


def test_no_tool_is_called_with_tool_choice_none(server: Server) -> None:
    """Not even if the model writes text that looks like a call."""
    text = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    # Only this tool exists, so that a call that follows the tools' grammar has the same name.
    body = {"messages": USER, "tools": TOOLS[2:], "guided_regex": re.escape(text), "max_tokens": 99, "temperature": 0}
    silent = server.post("/v1/chat/completions", {**body, "tool_choice": "none"}).json()["choices"][0]
    assert silent["message"]["content"] == text and "tool_calls" not in silent["message"]
    spoken = server.post("/v1/chat/completions", {**body, "tool_choice": "auto"}).json()["choices"][0]
    assert spoken["message"]["tool_calls"][0]["function"]["name"] == "now"


def test_a_response_format_or_a_call(server: Server) -> None:
    """With tools, an answer follows the response_format or is a call."""
    form = {"type": "json_schema", "json_schema": {"name": "visit", "schema": Visit.model_json_schema()}}
    for seed in range(3):
        message = ask(server, response_format=form, seed=seed, parallel_tool_calls=False).choices[0].message
        if not message.tool_calls:
            Visit.model_validate_json(message.content)


def test_a_prompt_of_several_choices_is_computed_once(server: Server) -> None:
    ids = tokenizer().encode("And the waters returned. " * 40)
    before = server.gauge("prompt_tokens_total")
    answer = server.post("/v1/completions", {"prompt": ids, "n": 4, "max_tokens": 2}).json()
    assert len(answer["choices"]) == 4
    own = len(ids) - (len(ids) - 1) // 32 * 32  # tokens after the last full page of 32
    assert server.gauge("prompt_tokens_total") - before == len(ids) + 3 * own


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"guided_regex": "("}, "the grammar: .*unclosed group"),
    ({"guided_regex": "(?=a)"}, "look-around"),
    ({"guided_regex": "(?:a?){3000}a{3000}"}, "the grammar: "),
    ({"guided_regex": "a" * 9000}, "guided_regex: String should have at most 8192"),
    (
        {"guided_regex": "a", "response_format": {"type": "json_object"}},
        "response_format and guided_regex cannot be combined",
    ),
    ({"response_format": {"type": "json_schema"}}, "response_format: json_schema is required"),
    ({"response_format": {"type": "json_object", "json_schema": {"name": "x", "schema": {}}}}, "response_format"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"tool_choice": "required"}, "'tool_choice' is only allowed when 'tools' are specified"),
    (
        {"tool_choice": {"type": "function", "function": {"name": "f"}}, "tools": TOOLS},
        "no tool has this function name",
    ),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]},
        "the parameters of f must have type object",
    ),
]
SCHEMAS: list[tuple[Any, str]] = [
    ({"not": {"type": "string"}}, 'Unimplemented keys: \\["not"\\]'),
    ({"type": "strin"}, "Invalid type: strin"),
    ({"$ref": "http://localhost/x"}, "http://localhost/x"),  # never fetched
    ({"type": "string", "pattern": "("}, "unclosed group"),
    ({"properties": {str(i): {"multipleOf": 99991 + i} for i in range(30)}}, "compiling it takes more than"),
    ({"enum": [f"word {i}" for i in range(20_000)]}, "at most 131072 are allowed"),
    ({"allOf": [{"anyOf": [{"properties": {str(i): {}}}, {"type": "array"}]} for i in range(60)]}, "the grammar: "),
]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        *REFUSED,
        *(
            ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}, says)
            for schema, says in SCHEMAS
        ),
    ],
    ids=lambda value: str(value)[:50],
)
def test_unsupported_grammars_are_refused(server: Server, body: dict[str, Any], says: str) -> None:
    body = {"tool_choice": "required"} | body if "tools" in body else body
    answer = server.post("/v1/chat/completions", {"messages": USER, "max_tokens": 5} | body)
    assert answer.status_code == 400, answer.text
    assert re.search(says, answer.json()["error"]["message"]), answer.text
    assert server.get("/health_generate").status_code == 200


def test_the_client_says_what_was_wrong(server: Server) -> None:
    with pytest.raises(openai.BadRequestError, match="Unimplemented keys"):
        server.client().chat.completions.create(
            model="demo-lm",
            messages=USER,
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {"type": "null"}}}},
        )
    with pytest.raises(pydantic.ValidationError):
        Visit.model_validate_json('{"kind": "feast", "days": 99}')  # the check is strict
