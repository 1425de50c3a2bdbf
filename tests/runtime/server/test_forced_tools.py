"""Grammars that force tool calls allow what models write, and nothing else."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from command import DEMO
from media_files import DEMO_VL
from tool_calls import PARAMETERS, deepseek, function, kimi

from tilerank.loader.tokenizer import Tokenizer
from tilerank.runtime.protocol.grammar import Vocabulary, allowed_tokens
from tilerank.runtime.server.chat.grammars import request_grammar
from tilerank.runtime.server.chat.marked import MarkedFormat
from tilerank.runtime.server.chat.request import ChatCompletion
from tilerank.runtime.server.chat.tools.calls import ToolCall
from tilerank.runtime.server.chat.tools.format import ToolFormat
from tilerank.runtime.server.chat.tools.functions import FunctionFormat
from tilerank.runtime.server.chat.tools.gemma4 import Gemma4Format
from tilerank.runtime.server.chat.tools.named import DeepSeekFormat, KimiFormat
from tilerank.runtime.server.chat.tools.objects import HermesFormat
from tilerank.runtime.server.chat.tools.parser import ToolParser
from tilerank.runtime.server.http.errors import ApiError


@pytest.mark.parametrize("model", [DEMO, DEMO_VL], ids=["marks are text", "marks are tokens"])
def test_forced_tool_calls(model: Path) -> None:
    """The grammar allows every token of a call as the tokenizer writes it, and forces the first ones."""
    tokenizer = Tokenizer(model)
    fields = {"tools": [{"type": "function", "function": {"name": "weather"}}], "tool_choice": "required"}
    body = ChatCompletion.model_validate({"messages": [{"role": "user", "content": "a"}]} | fields)
    grammar = request_grammar(body, tokenizer, MarkedFormat(HermesFormat()))
    assert grammar is not None
    matcher = Vocabulary(model).matcher(grammar)
    ids = tokenizer.encode('<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>', False)
    assert (len(tokenizer.encode("<tool_call>", False)) == 1) == (model == DEMO_VL)
    for id in ids:
        assert allowed_tokens(matcher)[id // 8] >> id % 8 & 1, tokenizer.decode([id])
        assert matcher.consume_token(id)
    assert matcher.is_accepting()


@pytest.fixture(scope="module")
def with_marks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory in which the marks of DeepSeek, Kimi-K2 and Gemma 4 are tokens."""
    model = Path(shutil.copytree(DEMO_VL, tmp_path_factory.mktemp("marks") / "model"))
    inner = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    marks = (*DeepSeekFormat.MARKS, *KimiFormat.MARKS, *Gemma4Format.MARKS)
    inner.add_tokens([tokenizers.AddedToken(mark, special=False, normalized=False) for mark in marks])
    inner.save(str(model / "tokenizer.json"))
    config = json.loads((model / "config.json").read_text())
    config["text_config"]["vocab_size"] = inner.get_vocab_size()
    (model / "config.json").write_text(json.dumps(config))
    return model


def allows(model: Path, grammar: str, text: str) -> bool:
    """Does the grammar allow the tokens of this text, and may the answer end there?"""
    matcher = Vocabulary(model).matcher(grammar)
    for id in Tokenizer(model).encode(text, add_special_tokens=False):
        if matcher.is_stopped() or not allowed_tokens(matcher)[id // 8] >> id % 8 & 1:
            return False
        matcher.consume_token(id)
    return bool(matcher.is_accepting())


def grammar_of(model: Path, format: ToolFormat, parameters: dict[str, Any], **fields: Any) -> str:
    tool = {"type": "function", "function": {"name": "weather", "parameters": parameters}}
    body = {"messages": [{"role": "user", "content": "a"}], "tools": [tool], "tool_choice": "required", **fields}
    grammar = request_grammar(ChatCompletion.model_validate(body), Tokenizer(model), MarkedFormat(format))
    assert grammar is not None
    return grammar


@pytest.mark.parametrize("marks_are_tokens", [True, False])
def test_forced_calls_of_deepseek(with_marks: Path, marks_are_tokens: bool) -> None:
    model = with_marks if marks_are_tokens else DEMO
    grammar = grammar_of(model, DeepSeekFormat(), {"properties": {"x": {"type": "integer"}}, "required": ["x"]})
    good = 'weather<｜tool▁sep｜>{"x": 1}'
    assert allows(model, grammar, deepseek(good)) and allows(model, grammar, deepseek(good, good))
    assert not allows(model, grammar, deepseek('weather<｜tool▁sep｜>{"x": "1"}'))
    assert not allows(model, grammar, deepseek('storm<｜tool▁sep｜>{"x": 1}'))
    one = grammar_of(model, DeepSeekFormat(), {}, parallel_tool_calls=False)
    empty = "weather<｜tool▁sep｜>{}"
    assert allows(model, one, deepseek(empty)) and not allows(model, one, deepseek(empty, empty))


@pytest.mark.parametrize("marks_are_tokens", [True, False])
def test_forced_calls_of_kimi(with_marks: Path, marks_are_tokens: bool) -> None:
    model = with_marks if marks_are_tokens else DEMO
    grammar = grammar_of(model, KimiFormat(), {"properties": {"x": {"type": "integer"}}, "required": ["x"]})
    call = 'functions.weather:{}<|tool_call_argument_begin|>{{"x": 1}}'
    assert allows(model, grammar, kimi(call.format(0))) and allows(model, grammar, kimi(call.format(7), call.format(8)))
    for bad in (call.format("a"), call.format(""), call.format(0).replace("1", "null"), call.format(0)[10:]):
        assert not allows(model, grammar, kimi(bad)), bad


@pytest.mark.parametrize("model", [DEMO_VL, DEMO], ids=["marks are tokens", "marks are text"])
def test_forced_calls_of_qwen_3_5(model: Path) -> None:
    grammar = grammar_of(model, FunctionFormat(), PARAMETERS)
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
    empty = grammar_of(model, FunctionFormat(), {"properties": {}})
    assert allows(model, empty, function("weather"))


def test_bounds_of_plain_text_are_refused() -> None:
    bounded = {"properties": {"city": {"type": "string", "pattern": "^U"}}}
    with pytest.raises(ApiError) as caught:
        grammar_of(DEMO, FunctionFormat(), bounded)
    assert str(caught.value) == (
        "tools: the parameters of weather: city: pattern is not supported, because this model writes strings without "
        "quotes"
    )


GEMMA4_PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string", "minLength": 1},
        "Days": {"type": "array", "items": {"type": "integer", "maximum": 30}, "maxItems": 2},
        "near": {"$ref": "#/$defs/Place"},
        "sky": {"enum": ["clear", "grey, or so", None, 3]},
        "unit": {"anyOf": [{"type": "string", "maxLength": 2}, {"type": "null"}], "description": "of what"},
        "more": {},
        "tags": {"type": "object", "additionalProperties": {"type": "boolean"}},
        "a key": {"type": "number"},
    },
    "required": ["text", "Days"],
    "$defs": {
        "Place": {"type": "object", "properties": {"x": {"type": "number"}, "in": {"$ref": "#/$defs/Place"}}},
    },
}
GEMMA4_CALLS = {
    '{Days:[],text:<|"|>a "b"\n{c}<|"|>}': True,
    '{Days:[3,-4],text:<|"|>a<|"|>,unit:<|"|>km<|"|>}': True,
    '{<|"|>a key<|"|>:1.5,Days:[],more:[1,{k:<|"|><|"|>}],near:{in:{in:{x:2},x:1}},sky:<|"|>grey, or so<|"|>,'
    'tags:{a:true,b:false},text:<|"|>a<|"|>,unit:null}': True,
    '{Days:[],more:null,near:{},sky:3,tags:{},text:<|"|>a<|"|>}': True,
    '{text:<|"|>a<|"|>}': False,  # Days is required
    '{Days:[],text:<|"|><|"|>}': False,
    '{Days:[31],text:<|"|>a<|"|>}': False,
    '{Days:[1,2,3],text:<|"|>a<|"|>}': False,
    '{Days:[],near:{y:1},text:<|"|>a<|"|>}': False,
    '{Days:[],sky:<|"|>blue<|"|>,text:<|"|>a<|"|>}': False,
    '{Days:[],tags:{a:1},text:<|"|>a<|"|>}': False,
    '{Days:[],text:<|"|>a<|"|>,unit:<|"|>miles<|"|>}': False,
    '{Days:[],text:"a"}': False,
    '{Days:[]text:<|"|>a<|"|>}': False,
    '{text:<|"|>a<|"|>,Days:[]}': False,  # not in the order of chat templates
}


@pytest.mark.parametrize("marks_are_tokens", [True, False])
def test_forced_calls_of_gemma4(with_marks: Path, marks_are_tokens: bool) -> None:
    model = with_marks if marks_are_tokens else DEMO
    grammar = grammar_of(model, Gemma4Format(), GEMMA4_PARAMETERS)
    for arguments, good in GEMMA4_CALLS.items():
        call = f"<|tool_call>call:weather{arguments}<tool_call|>"
        assert allows(model, grammar, call) == good, arguments
        read = ToolParser(Gemma4Format(), {"weather": GEMMA4_PARAMETERS})
        assert not good or isinstance([*read.push(call), *read.flush(cut=False)][-1], ToolCall)
    empty = grammar_of(model, Gemma4Format(), {"properties": {}}, parallel_tool_calls=False)
    call = "<|tool_call>call:weather{}<tool_call|>"
    assert allows(model, empty, call) and not allows(model, empty, call + call)


@pytest.mark.parametrize(
    ("parameters", "sentence"),
    [
        ({"city": {"type": "string", "pattern": "^U"}}, "city: pattern is not supported"),
        ({"day": {"type": "string", "format": "date"}}, "day: format is not supported"),
        ({"a": {"type": "object", "minProperties": 1}}, "a: minProperties is not supported"),
    ],
)
def test_keywords_that_calls_of_gemma4_cannot_follow_are_refused(parameters: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ApiError) as caught:
        grammar_of(DEMO, Gemma4Format(), {"properties": parameters})
    reason = "because this model writes arguments in a format of its own"
    assert str(caught.value) == f"tools: the parameters of weather: {sentence}, {reason}"
