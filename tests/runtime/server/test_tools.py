"""The formats of tool calls: parsed however the text is cut, and forced by grammars."""

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from command import DEMO
from hypothesis import given, settings
from hypothesis import strategies as st
from media_files import DEMO_VL

from tilerank.loader.tokenizer import Tokenizer
from tilerank.runtime.media.registry import family_of
from tilerank.runtime.protocol.grammar import Vocabulary, allowed_tokens
from tilerank.runtime.server.chat.grammars import request_grammar
from tilerank.runtime.server.chat.request import ChatCompletion
from tilerank.runtime.server.chat.tool_formats import (
    DeepSeekTools,
    FunctionTools,
    HermesTools,
    LlamaTools,
    tool_parser,
)
from tilerank.runtime.server.chat.tools import ToolCall, ToolParser
from tilerank.runtime.server.http.errors import ApiError


def parsed(parser: ToolParser, text: str, sizes: list[int]) -> tuple[str, list[tuple[str, str]]]:
    """Return the text and the calls in `text`, which is parsed in pieces of these sizes, repeated."""
    pieces, at = [], 0
    for size in itertools.cycle(sizes):
        pieces += parser.push(text[at : at + size])
        at += size
        if at >= len(text):
            break
    pieces += parser.flush()
    said = "".join(piece for piece in pieces if isinstance(piece, str))
    return said, [(piece.name, piece.arguments) for piece in pieces if isinstance(piece, ToolCall)]


SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=5)
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln", "days": [1, 2]}}\n</tool_call>'
WEATHER = ("weather", '{"city": "Köln", "days": [1, 2]}')


@settings(deadline=None)
@given(SIZES)
def test_tool_calls_of_hermes(sizes: list[int]) -> None:
    assert parsed(HermesTools(), f"I look.\n{CALL}\n{CALL}", sizes) == ("I look.", [WEATHER, WEATHER])
    assert parsed(HermesTools(), "1 < 2 and <tool", sizes) == ("1 < 2 and <tool", [])
    for broken in (
        "<tool_call>not json</tool_call> so",
        '<tool_call>{"name": 3}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "x"}</tool_call>',
        '<tool_call>\n{"name": "cut off',
        f"<tool_call>{'[' * 3000}</tool_call>",
    ):
        assert parsed(HermesTools(), broken, sizes) == (broken, [])


HUGE = '{"x": -1.7976931348623157e+308}'  # JSON has no infinity


@settings(deadline=None)
@given(SIZES)
def test_tool_calls_of_llama(sizes: list[int]) -> None:
    call = '{"name": "f", "parameters": {"x": 1}}'
    assert parsed(LlamaTools(), f"\n{call}", sizes) == ("", [("f", '{"x": 1}')])
    assert parsed(LlamaTools(), f"{call}; {call}", sizes) == ("", [("f", '{"x": 1}')] * 2)
    assert parsed(LlamaTools(), '{"name": "f", "parameters": {"x": -1e999}}', sizes)[1] == [("f", HUGE)]
    for plain in (
        "Hello {x}",
        '{"name": "f", "parameters": {"x": NaN}}',
        '{"name": "f"',
        f"{call} and more",
        '{"x": 1}',
        "{" * 300,
    ):
        assert parsed(LlamaTools(), plain, sizes) == (plain, [])


@pytest.mark.parametrize("model", [DEMO, DEMO_VL], ids=["marks are text", "marks are tokens"])
def test_forced_tool_calls(model: Path) -> None:
    """The grammar allows every token of a call as the tokenizer writes it, and forces the first ones."""
    tokenizer = Tokenizer(model)
    fields = {"tools": [{"type": "function", "function": {"name": "weather"}}], "tool_choice": "required"}
    body = ChatCompletion.model_validate({"messages": [{"role": "user", "content": "a"}]} | fields)
    grammar = request_grammar(body, tokenizer, HermesTools)
    assert grammar is not None
    matcher = Vocabulary(model).matcher(grammar)
    ids = tokenizer.encode('<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>', False)
    assert (len(tokenizer.encode("<tool_call>", False)) == 1) == (model == DEMO_VL)
    for id in ids:
        assert allowed_tokens(matcher)[id // 8] >> id % 8 & 1, tokenizer.decode([id])
        assert matcher.consume_token(id)
    assert matcher.is_accepting()


def deepseek(*calls: str) -> str:
    marked = (f"<｜tool▁call▁begin｜>{call}<｜tool▁call▁end｜>" for call in calls)
    return f"<｜tool▁calls▁begin｜>{''.join(marked)}<｜tool▁calls▁end｜>"


@settings(deadline=None)
@given(SIZES)
def test_tool_calls_of_deepseek(sizes: list[int]) -> None:
    good = 'weather<｜tool▁sep｜>{"city": "Köln", "days": [1, 2]}'
    assert parsed(DeepSeekTools(), f"I look.\n\n{deepseek(good, good)}", sizes) == ("I look.", [WEATHER, WEATHER])
    assert parsed(DeepSeekTools(), deepseek('f<｜tool▁sep｜>{"x": 1}'), sizes) == ("", [("f", '{"x": 1}')])
    assert parsed(DeepSeekTools(), "a <｜tool▁calls", sizes) == ("a <｜tool▁calls", [])
    broken = "<｜tool▁call▁begin｜>f<｜tool▁sep｜>[1]<｜tool▁call▁end｜>"
    assert parsed(DeepSeekTools(), broken, sizes) == (broken, [])


PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "array", "items": {"type": "integer"}},
        "unit": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "warm": {"type": "boolean"},
        "near": {"$ref": "#/$defs/Place"},
        "sky": {"type": "string", "enum": ["clear", "grey"]},
    },
    "required": ["city", "days"],
    "$defs": {"Place": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}},
}


def function(name: str, **values: str) -> str:
    """Return a call as Qwen3.5's chat template writes earlier ones."""
    arguments = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{arguments}</function>\n</tool_call>"


@settings(deadline=None)
@given(SIZES)
def test_tool_calls_of_qwen_3_5(sizes: list[int]) -> None:
    parser = FunctionTools({"weather": PARAMETERS})
    call = function("weather", city="12", days="[1, 2]", unit="None", warm="True", near='{"x": 1}')
    expected = {"city": "12", "days": [1, 2], "unit": None, "warm": True, "near": {"x": 1}}
    assert parsed(parser, f"I look.\n\n{call}", sizes) == ("I look.", [("weather", json.dumps(expected))])


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        (function("weather", city="two\n\nlines ", unit="null"), {"city": "two\n\nlines ", "unit": None}),
        (function("weather", unit="7", days="[1, 2"), {"unit": "7", "days": "[1, 2"}),
        (function("weather", city="False", warm="false"), {"city": "False", "warm": False}),
        (function("unknown", a="3", b="x", c="null"), {"a": 3, "b": "x", "c": None}),
        (function("weather"), {}),
        ("<tool_call><function=weather><parameter=city>Ur</parameter></function></tool_call>", {"city": "Ur"}),
    ],
)
def test_values_take_the_types_of_the_schema(call: str, arguments: dict[str, Any]) -> None:
    _, [(_, found)] = parsed(FunctionTools({"weather": PARAMETERS}), call, [7])
    assert json.loads(found) == arguments


@pytest.mark.parametrize(
    "broken",
    [
        "<tool_call>\nno function\n</tool_call>",
        "<tool_call>\n<function=f>\n</tool_call>",
        "<tool_call>\n<function=f>\n<parameter=a>\n1\n</function>\n</tool_call>",
        "<tool_call>\n<function=f>\nso\n</function>\n</tool_call>",
        "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n",
    ],
)
def test_a_malformed_call_of_qwen_3_5_stays_text(broken: str) -> None:
    assert parsed(FunctionTools(), broken, [3]) == (broken, [])


@pytest.mark.parametrize("properties", [3, {"a": True}, {"a": {"type": [{}]}}, {"a": {"anyOf": 1}}])
def test_a_malformed_schema_allows_any_value(properties: Any) -> None:
    parser = FunctionTools({"f": {"properties": properties}})
    assert parsed(parser, function("f", a="1"), [5]) == ("", [("f", '{"a": 1}')])


@pytest.fixture(scope="module")
def with_marks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory in which the marks of DeepSeek are tokens."""
    model = Path(shutil.copytree(DEMO_VL, tmp_path_factory.mktemp("marks") / "model"))
    inner = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    inner.add_tokens([tokenizers.AddedToken(mark, special=False, normalized=False) for mark in DeepSeekTools.MARKS])
    inner.save(str(model / "tokenizer.json"))
    return model


def allows(model: Path, grammar: str, text: str) -> bool:
    """Does the grammar allow the tokens of this text, and may the answer end there?"""
    matcher = Vocabulary(model).matcher(grammar)
    for id in Tokenizer(model).encode(text, add_special_tokens=False):
        if matcher.is_stopped() or not allowed_tokens(matcher)[id // 8] >> id % 8 & 1:
            return False
        matcher.consume_token(id)
    return bool(matcher.is_accepting())


def grammar_of(model: Path, parser: type[ToolParser], parameters: dict[str, Any], **fields: Any) -> str:
    tool = {"type": "function", "function": {"name": "weather", "parameters": parameters}}
    body = {"messages": [{"role": "user", "content": "a"}], "tools": [tool], "tool_choice": "required", **fields}
    grammar = request_grammar(ChatCompletion.model_validate(body), Tokenizer(model), parser)
    assert grammar is not None
    return grammar


@pytest.mark.parametrize("marks_are_tokens", [True, False])
def test_forced_calls_of_deepseek(with_marks: Path, marks_are_tokens: bool) -> None:
    model = with_marks if marks_are_tokens else DEMO
    grammar = grammar_of(model, DeepSeekTools, {"properties": {"x": {"type": "integer"}}, "required": ["x"]})
    good = 'weather<｜tool▁sep｜>{"x": 1}'
    assert allows(model, grammar, deepseek(good)) and allows(model, grammar, deepseek(good, good))
    assert not allows(model, grammar, deepseek('weather<｜tool▁sep｜>{"x": "1"}'))
    assert not allows(model, grammar, deepseek('storm<｜tool▁sep｜>{"x": 1}'))
    one = grammar_of(model, DeepSeekTools, {}, parallel_tool_calls=False)
    empty = "weather<｜tool▁sep｜>{}"
    assert allows(model, one, deepseek(empty)) and not allows(model, one, deepseek(empty, empty))


@pytest.mark.parametrize("model", [DEMO_VL, DEMO], ids=["marks are tokens", "marks are text"])
def test_forced_calls_of_qwen_3_5(model: Path) -> None:
    grammar = grammar_of(model, FunctionTools, PARAMETERS)
    call = function("weather", city="any <text>\nat all", days="[1, 2]", warm="true", near='{"x": 1}', sky="grey")
    assert allows(model, grammar, call) and allows(model, grammar, f"{call}\n{call}")
    assert allows(model, grammar, function("weather", city="", days="[]"))
    for bad in (
        function("weather", city="Ur"),  # `days` is required
        function("weather", days="[1]", city="Ur"),  # in the order of the schema
        function("weather", city="Ur", days='["1"]'),
        function("weather", city="Ur", days="[1]", sky="blue"),
        function("weather", city="Ur", days="[1]", near='{"x": ""}'),
        function("weather", city="Ur", days="[1]", more="1"),
        function("storm", city="Ur", days="[1]"),
    ):
        assert not allows(model, grammar, bad), bad
    empty = grammar_of(model, FunctionTools, {"properties": {}})
    assert allows(model, empty, function("weather"))


def test_bounds_of_plain_text_are_refused() -> None:
    bounded = {"properties": {"city": {"type": "string", "pattern": "^U"}}}
    with pytest.raises(ApiError) as caught:
        grammar_of(DEMO, FunctionTools, bounded)
    assert str(caught.value) == (
        "tools: the parameters of weather: city: pattern is not supported, because this model writes strings without "
        "quotes"
    )


@pytest.mark.parametrize(
    ("template", "model_type", "expected"),
    [
        ("{{ '<tool_call>' }}{{ '\\n<function=' + name + '>' }}<parameter=", "qwen3_5", FunctionTools),
        ('<tool_call>{"name": 1}</tool_call>', "deepseek_v3", HermesTools),
        ("<｜tool▁call▁begin｜>{{ name }}<｜tool▁sep｜>", "deepseek_v3", DeepSeekTools),
        ("<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ name }}\n```json", "qwen2", None),
        ("{{ messages }}", "qwen3", HermesTools),
        ("{{ messages }}", "llama", LlamaTools),
        ("{{ messages }}", "deepseek_v3", None),
    ],
)
def test_the_chat_template_decides_on_the_format(
    tmp_path: Path, template: str, model_type: str, expected: type[ToolParser] | None
) -> None:
    shutil.copy(DEMO / "tokenizer.json", tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template)
    assert tool_parser(Tokenizer(tmp_path), family_of(model_type).tool_calls) is expected
