"""The formats of tool calls, parsed however the text is cut."""

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from command import DEMO
from hypothesis import given, settings
from hypothesis import strategies as st
from tool_calls import PARAMETERS, deepseek, function, kimi

from tilerank.loader.tokenizer import Tokenizer
from tilerank.runtime.media.registry import family_of
from tilerank.runtime.server.chat.tools.calls import ToolCall
from tilerank.runtime.server.chat.tools.format import ToolFormat
from tilerank.runtime.server.chat.tools.formats import TOOL_FORMATS, tool_format
from tilerank.runtime.server.chat.tools.functions import FunctionFormat, GlmFormat, MinimaxFormat
from tilerank.runtime.server.chat.tools.mistral import MistralFormat, MistralIdFormat, MistralListFormat
from tilerank.runtime.server.chat.tools.named import DeepSeekFormat, KimiFormat
from tilerank.runtime.server.chat.tools.objects import HermesFormat, LlamaFormat, PhiFormat
from tilerank.runtime.server.chat.tools.olmo import OlmoFormat
from tilerank.runtime.server.chat.tools.parser import ToolParser

SCHEMAS: dict[str, Any] = {"weather": {}, "f": {}}


def parsed(
    format: ToolFormat, text: str, sizes: list[int], schemas: dict[str, Any] = SCHEMAS, cut: bool = False
) -> tuple[str, list[tuple[str, str]]]:
    """Return the text and the calls in `text`, which is parsed in pieces of these sizes, repeated."""
    parser = ToolParser(format, schemas)
    pieces, at = [], 0
    for size in itertools.cycle(sizes):
        pieces += parser.push(text[at : at + size])
        at += size
        if at >= len(text):
            break
    pieces += parser.flush(cut)
    said = "".join(piece for piece in pieces if isinstance(piece, str))
    return said, [(piece.name, piece.arguments) for piece in pieces if isinstance(piece, ToolCall)]


SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=5)
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln", "days": [1, 2]}}\n</tool_call>'
WEATHER = ("weather", '{"city": "Köln", "days": [1, 2]}')


@settings(deadline=None)
@given(SIZES)
def test_tool_calls_of_hermes(sizes: list[int]) -> None:
    assert parsed(HermesFormat(), f"I look.\n{CALL}\n{CALL}", sizes) == ("I look.", [WEATHER, WEATHER])
    assert parsed(HermesFormat(), "1 < 2 and <tool", sizes) == ("1 < 2 and <tool", [])
    for broken in (
        "<tool_call>not json</tool_call> so",
        '<tool_call>{"name": 3}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "x"}</tool_call>',
        '<tool_call>\n{"name": "cut off',
        f"<tool_call>{'[' * 3000}</tool_call>",
    ):
        assert parsed(HermesFormat(), broken, sizes) == (broken, [])


HUGE = '{"x": -1.7976931348623157e+308}'  # JSON has no infinity


@settings(deadline=None)
@given(SIZES)
def test_tool_calls_of_llama(sizes: list[int]) -> None:
    call = '{"name": "f", "parameters": {"x": 1}}'
    assert parsed(LlamaFormat(), f"\n{call}", sizes) == ("", [("f", '{"x": 1}')])
    assert parsed(LlamaFormat(), f"{call}; {call}", sizes) == ("", [("f", '{"x": 1}')] * 2)
    assert parsed(LlamaFormat(), '{"name": "f", "parameters": {"x": -1e999}}', sizes)[1] == [("f", HUGE)]
    for plain in (
        "Hello {x}",
        '{"name": "f", "parameters": {"x": NaN}}',
        '{"name": "f"',
        f"{call} and more",
        '{"x": 1}',
        "{" * 300,
    ):
        assert parsed(LlamaFormat(), plain, sizes) == (plain, [])


@settings(deadline=None)
@given(SIZES)
def test_tool_calls_of_deepseek(sizes: list[int]) -> None:
    good = 'weather<｜tool▁sep｜>{"city": "Köln", "days": [1, 2]}'
    assert parsed(DeepSeekFormat(), f"I look.\n\n{deepseek(good, good)}", sizes) == ("I look.", [WEATHER, WEATHER])
    assert parsed(DeepSeekFormat(), deepseek('f<｜tool▁sep｜>{"x": 1}'), sizes) == ("", [("f", '{"x": 1}')])
    assert parsed(DeepSeekFormat(), "a <｜tool▁calls", sizes) == ("a <｜tool▁calls", [])
    broken = "<｜tool▁call▁begin｜>f<｜tool▁sep｜>[1]<｜tool▁call▁end｜>"
    assert parsed(DeepSeekFormat(), broken, sizes) == (broken, [])


ROME = ("weather", '{"city": "Rome"}')
OBJECT = '{"name": "weather", "arguments": {"city": "Rome"}}'
OTHER_KEY = '{"type": "function", "name": "weather", "parameters": {"city": "Rome"}}'
MARK_INSIDE = '{"name": "f", "arguments": {"a": "</tool_call><tool_call>{\\"name\\": "}}'


@pytest.mark.parametrize("format", [HermesFormat(), LlamaFormat()], ids=["hermes", "llama"])
@pytest.mark.parametrize(
    ("text", "said", "calls"),
    [
        (OBJECT, "", [ROME]),
        (OTHER_KEY, "", [ROME]),
        (f"I look.\n\n  {OBJECT}\n", "I look.", [ROME]),
        (f"I look.\n{OBJECT}\nDone; so.", "I look.\nDone; so.", [ROME]),
        (f"{OBJECT}\n{OTHER_KEY}{OBJECT}; {OBJECT}", "", [ROME] * 4),
        (f"[{OBJECT}, {OTHER_KEY}]", "", [ROME, ROME]),
        ('{"name": "f", "arguments": "{\\"x\\": 1}"}', "", [("f", '{"x": 1}')]),
        ('{"name": "f", "arguments": null}', "", [("f", "{}")]),
        ('{"name": "f", "arguments": {"a": "line\nline"}}', "", [("f", '{"a": "line\\nline"}')]),
    ],
)
def test_a_call_needs_no_marks(format: ToolFormat, text: str, said: str, calls: list[tuple[str, str]]) -> None:
    for size in (1, 3, len(text)):
        assert parsed(format, text, [size]) == (said, calls)


@pytest.mark.parametrize("format", [HermesFormat(), LlamaFormat()], ids=["hermes", "llama"])
@pytest.mark.parametrize(
    "text",
    [
        '{"name": "Bob", "age": 3}',
        '{"name": "Bob", "arguments": {}}',
        '{"name": "weather"}',
        '{"name": "weather", "arguments": [1]}',
        '{"name": "weather", "arguments": {}, "parameters": {}}',
        '{"city": "Rome"}',
        f"You could call it with {OBJECT}.",
        f"{OBJECT} is how to call it.",
        f"For example:\n```json\n{OBJECT}\n```\n",
        "[a link](to), {x}, [1]",
    ],
)
def test_json_that_is_no_call_is_the_answer(format: ToolFormat, text: str) -> None:
    for size in (1, 4, len(text)):
        assert parsed(format, text, [size]) == (text, [])


def test_json_that_is_no_call_is_streamed() -> None:
    parser = ToolParser(LlamaFormat(), SCHEMAS)
    assert parser.push('{"name": "w') == []
    assert parser.push('ombat", "legs": 4') == ['{"name": "wombat", "legs": 4']


@settings(deadline=None)
@given(SIZES)
def test_calls_of_hermes_without_one_of_the_marks(sizes: list[int]) -> None:
    for text in (
        f"I look.\n<tool_call>\n{OBJECT}",
        f"I look.\n{OBJECT}\n</tool_call>",
        f"I look.<tool_call>{OTHER_KEY}</tool_call>\n",
    ):
        assert parsed(HermesFormat(), text, sizes) == ("I look.", [ROME])
    assert parsed(HermesFormat(), f"<tool_call>{OBJECT}{OBJECT}</tool_call>", sizes) == ("", [ROME, ROME])
    inside = ("f", json.dumps({"a": '</tool_call><tool_call>{"name": '}))
    assert parsed(HermesFormat(), f"<tool_call>{MARK_INSIDE}</tool_call>", sizes) == ("", [inside])


@settings(deadline=None)
@given(SIZES)
def test_calls_of_deepseek_without_one_of_the_marks(sizes: list[int]) -> None:
    call = 'weather<｜tool▁sep｜>{"city": "Rome"}'
    for text in (
        f"I look.\n{call}",
        f"I look.\n{call}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        f"I look.<｜tool▁call▁begin｜>{call}",
        f"I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{call}<｜tool▁call▁end｜>",
    ):
        assert parsed(DeepSeekFormat(), text, sizes) == ("I look.", [ROME])
    unknown = 'storm<｜tool▁sep｜>{"city": "Rome"}'
    assert parsed(DeepSeekFormat(), unknown, sizes) == (unknown, [])


@settings(deadline=None)
@given(SIZES)
def test_tool_calls_of_kimi(sizes: list[int]) -> None:
    """As the model card writes them, and as models and gateways change them."""
    good = 'functions.weather:{}<|tool_call_argument_begin|>{{"city": "Köln", "days": [1, 2]}}'
    first, second = good.format(0), good.format(1)
    two = ("I look.", [WEATHER, WEATHER])
    for text in (
        f"I look.{kimi(first, second)}",
        f"I look.\n{kimi(first, second)}\n".replace("<|tool_call_", "\n<|tool_call_").replace(
            "_begin|>{", "_begin|>\n{"
        ),
        f"I look.{kimi(first, second)}".replace("calls_section", "call_section"),
        f"I look.{kimi(good.format(12), good.format(12))}",
        f"I look.{kimi(first)}{kimi(second)}",
        f"I look.{kimi(first, second)}".replace("functions.", ""),
        # without some of the marks
        f"I look.<|tool_call_begin|>{first}<|tool_call_end|><|tool_call_begin|>{second}<|tool_call_end|>",
        f"I look.<|tool_calls_section_begin|>{first}{second}<|tool_calls_section_end|>",
        f"I look.<|tool_calls_section_begin|><|tool_call_begin|>{first}<|tool_call_begin|>{second}",
        f"I look.\n{first}\n{second}",
        f"I look.\n{first}{second}<|tool_call_end|><|tool_calls_section_end|>",
        f"I look.{kimi(first, second)}".replace("<|tool_call_argument_begin|>", " "),
        f"I look.{kimi(first, second)}".replace(":0", "").replace(":1", ""),
    ):
        assert parsed(KimiFormat(), text, sizes) == two, text
    inside = {"city": "<|tool_call_end|><|tool_calls_section_end|><|tool_call_begin|>functions.f:1 {}"}
    call = f"functions.weather:0<|tool_call_argument_begin|>{json.dumps(inside)}"
    assert parsed(KimiFormat(), kimi(call, first), sizes) == ("", [("weather", json.dumps(inside)), WEATHER])
    nothing = kimi("functions.f:0<|tool_call_argument_begin|><|tool_call_end|>")
    assert parsed(KimiFormat(), nothing, sizes)[1] == [("f", "{}")]


@settings(deadline=None)
@given(SIZES)
def test_text_that_is_no_call_of_kimi(sizes: list[int]) -> None:
    for text in (
        kimi('functions.storm:0<|tool_call_argument_begin|>{"city": "Rome"}'),
        kimi("functions.weather:0<|tool_call_argument_begin|>[1]"),
        kimi('functions.weather:0<|tool_call_argument_begin|>{"city": "Ro'),
        "functions.weather is a tool",
        "functions.weather: {}",
        "weather:0 {}",
        "a <|tool_calls_sec",
    ):
        assert parsed(KimiFormat(), text, sizes) == (text, [])
    known = 'functions.weather:1<|tool_call_argument_begin|>{"city": "Rome"}'
    unknown = "functions.weathers:0<|tool_call_argument_begin|>{}"
    said, calls = parsed(KimiFormat(), kimi(unknown, known), sizes)
    assert unknown in said and calls == [ROME]


BLOCK = "<function=f>\n<parameter=a>\n1\n</parameter>\n</function>"
NESTED = "see\n<tool_call>\n<function=g>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>\nso"


@pytest.mark.parametrize(
    ("text", "said", "calls"),
    [
        (f"I write.\n\n{BLOCK}\n</tool_call>", "I write.", [{"a": 1}]),
        (BLOCK, "", [{"a": 1}]),
        (f"<tool_call>\n{BLOCK}", "", [{"a": 1}]),
        (f"<tool_call>\n{BLOCK.removesuffix('</function>')}", "", [{"a": 1}]),
        (f"<tool_call>\n{BLOCK.removesuffix('</function>')}</tool_call>", "", [{"a": 1}]),
        (f"{BLOCK}\n{BLOCK}<tool_call>{BLOCK}</tool_call>{BLOCK}", "", [{"a": 1}] * 4),
        (f"{BLOCK}\n\nDone.", "\n\nDone.", [{"a": 1}]),
    ],
)
def test_calls_of_qwen_3_5_without_one_of_the_marks(text: str, said: str, calls: list[dict[str, Any]]) -> None:
    for size in (1, 5, len(text)):
        found, made = parsed(FunctionFormat(), text, [size])
        assert (found, [json.loads(arguments) for _, arguments in made]) == (said, calls)


@pytest.mark.parametrize(
    "value",
    [
        "a</parameter>b",
        "a</function>b",
        "a</parameter></function>b",
        "a<tool_call>b",
        "a</tool_call>b",
        "a<function=f>b",
        "a<parameter=a>b",
        NESTED,
        "\n  x\n\n    y\n",
    ],
)
def test_marks_inside_of_a_value_of_qwen_3_5(value: str) -> None:
    text = function("f", s=value, n="5") + "\n" + function("f", s=value)
    schemas = {"f": {"properties": {"s": {"type": "string"}, "n": {"type": "integer"}}}}
    for size in (1, 6, len(text)):
        said, calls = parsed(FunctionFormat(), text, [size], schemas)
        assert (said, [json.loads(arguments) for _, arguments in calls]) == ("", [{"s": value, "n": 5}, {"s": value}])


def test_a_call_that_was_cut_off_is_text() -> None:
    """It lacks the arguments that were still to come."""
    text = "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n"
    for size in (1, len(text)):
        assert parsed(FunctionFormat(), text, [size], cut=True) == (text, [])
        assert parsed(FunctionFormat(), f"{text}</function>", [size], cut=True) == ("", [("f", '{"a": 1}')])


PARTS = ["<tool_call>", "</tool_call>", "\n", " ", ";", "```", "{", "}", "[", '"', "a", OBJECT, OTHER_KEY, BLOCK]
PARTS += ["<function=f>", "</function>", "<parameter=a>", "</parameter>", '{"name": "f", "arguments": ', "Hello"]
PARTS += [
    "f<｜tool▁sep｜>{}",
    *DeepSeekFormat.MARKS,
    "functions.f:0",
    *KimiFormat.MARKS,
    *MistralFormat.MARKS,
    *PhiFormat.MARKS,
    *GlmFormat.MARKS,
    *MinimaxFormat.MARKS,
    *OlmoFormat.MARKS,
    "f(a='\\'', b=[1, None])",
    "f(",
    '<invoke name="f">',
    '<parameter name="a">',
    "</invoke>",
    "<|python_tag|>",
    "<",
    "｜",
    "\\",
]


@pytest.mark.parametrize("format", TOOL_FORMATS.values(), ids=TOOL_FORMATS)
@settings(deadline=None, max_examples=100)
@given(st.lists(st.sampled_from(PARTS), max_size=12).map("".join), SIZES, st.booleans())
def test_how_the_text_arrives_does_not_matter(format: ToolFormat, text: str, sizes: list[int], cut: bool) -> None:
    whole = parsed(format, text, [len(text) + 1], cut=cut)
    assert parsed(format, text, sizes, cut=cut) == whole
    said, calls = whole
    assert calls or said == text


@settings(deadline=None)
@given(SIZES)
def test_tool_calls_of_qwen_3_5(sizes: list[int]) -> None:
    call = function("weather", city="12", days="[1, 2]", unit="None", warm="True", near='{"x": 1}')
    expected = {"city": "12", "days": [1, 2], "unit": None, "warm": True, "near": {"x": 1}}
    found = parsed(FunctionFormat(), f"I look.\n\n{call}", sizes, {"weather": PARAMETERS})
    assert found == ("I look.", [("weather", json.dumps(expected))])


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        (function("weather", city="two\n\nlines ", unit="null"), {"city": "two\n\nlines ", "unit": None}),
        (function("weather", unit="7", days="[1, 2"), {"unit": "7", "days": "[1, 2"}),
        (function("weather", city="False", warm="false"), {"city": "False", "warm": False}),
        (function("weather", a="3", b="x", c="null"), {"a": 3, "b": "x", "c": None}),
        (function("weather", sky="1", kind="2", place="3"), {"sky": "1", "kind": "2", "place": "3"}),
        (function("weather", unit='{"a": 1}', warm="True"), {"unit": '{"a": 1}', "warm": True}),
        (function("weather"), {}),
        ("<tool_call><function=weather><parameter=city>Ur</parameter></function></tool_call>", {"city": "Ur"}),
    ],
)
def test_values_take_the_types_of_the_schema(call: str, arguments: dict[str, Any]) -> None:
    _, [(_, found)] = parsed(FunctionFormat(), call, [7], {"weather": PARAMETERS})
    assert json.loads(found) == arguments


@pytest.mark.parametrize(
    "broken",
    [
        "<tool_call>\nno function\n</tool_call>",
        function("unknown", a="1"),
        "<tool_call>\n<function=f>\n<parameter=a>\n1\n</function>\n</tool_call>",
        "<tool_call>\n<function=f>\nso\n</function>\n</tool_call>",
        "<tool_call>\n<function=f>\n<parameter=a>\n1\n",
    ],
)
def test_a_malformed_call_of_qwen_3_5_stays_text(broken: str) -> None:
    assert parsed(FunctionFormat(), broken, [3]) == (broken, [])


@pytest.mark.parametrize("properties", [3, {"a": True}, {"a": {"type": [{}]}}, {"a": {"anyOf": 1}}])
def test_a_malformed_schema_allows_any_value(properties: Any) -> None:
    schemas = {"f": {"properties": properties}}
    assert parsed(FunctionFormat(), function("f", a="1"), [5], schemas) == ("", [("f", '{"a": 1}')])


@pytest.mark.parametrize(
    ("template", "model_type", "expected"),
    [
        ("{{ '<tool_call>' }}{{ '\\n<function=' + name + '>' }}<parameter=", "qwen3_5", FunctionFormat),
        ('<tool_call>{"name": 1}</tool_call>', "deepseek_v3", HermesFormat),
        ("<tool_call>{{ name }}\n<arg_key>", "glm4_moe", GlmFormat),
        ("<｜tool▁call▁begin｜>{{ name }}<｜tool▁sep｜>", "deepseek_v3", DeepSeekFormat),
        ("<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ name }}\n```json", "qwen2", None),
        ("<|tool_call_begin|>{{ id }}<|tool_call_argument_begin|>", "kimi_k2", KimiFormat),
        ("[TOOL_CALLS]{{ name }}[ARGS]", "mistral3", MistralFormat),
        ("[TOOL_CALLS]{{ name }}[CALL_ID]{{ id }}[ARGS]", "mistral3", MistralIdFormat),
        ("[TOOL_CALLS] [", "mistral", MistralListFormat),
        ("{{ messages }}", "mistral", None),
        ("{{ messages }}<|tool|>", "phi3", PhiFormat),
        ("{{ '<function_calls>' }}{{ name }}(", "olmo3", OlmoFormat),
        ("{{ messages }}", "qwen3", HermesFormat),
        ("{{ messages }}", "llama", LlamaFormat),
        ("{{ messages }}", "deepseek_v3", None),
    ],
)
def test_the_chat_template_decides_on_the_format(
    tmp_path: Path, template: str, model_type: str, expected: type[ToolFormat] | None
) -> None:
    shutil.copy(DEMO / "tokenizer.json", tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template)
    found = tool_format(Tokenizer(tmp_path), family_of(model_type).tool_calls)
    assert (found and type(found)) is expected
