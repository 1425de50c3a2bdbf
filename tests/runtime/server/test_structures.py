"""What constrains an answer: the fields of other servers, and objects that are closed."""

import re
from typing import Any

import pytest
from command import DEMO
from media_files import DEMO_VL

from tilerank.loader.tokenizer import Tokenizer
from tilerank.runtime.protocol.errors import RequestError
from tilerank.runtime.protocol.grammar import Vocabulary, allowed_tokens
from tilerank.runtime.server.apis.completions.body import Completion
from tilerank.runtime.server.chat.grammars import request_grammar
from tilerank.runtime.server.chat.schemas import closed
from tilerank.runtime.server.chat.tools.functions import FunctionFormat
from tilerank.runtime.server.http.errors import ApiError

TOKENIZER, VOCABULARY = Tokenizer(DEMO), Vocabulary(DEMO)
POINT: dict[str, Any] = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
OPEN = POINT | {"additionalProperties": True}
TAGS = {
    "type": "structural_tag",
    "structures": [{"begin": "<f=at>", "schema": POINT, "end": "</f>"}, {"begin": "<f=no>", "schema": OPEN}],
    "triggers": ["<f="],
}
LARK = 'start: x "b"\nx: "a" | "{" x "}"'
GBNF = 'root ::= x "b"\nx ::= "a" | "{" x "}"'


def follows(
    body: Completion, text: str, *, vocabulary: Vocabulary = VOCABULARY, tokenizer: Tokenizer = TOKENIZER
) -> bool:
    grammar = request_grammar(body, tokenizer)
    assert grammar is not None
    matcher = vocabulary.matcher(grammar)
    for id in tokenizer.encode(text, add_special_tokens=False):
        if matcher.is_stopped() or not allowed_tokens(matcher)[id // 8] >> id % 8 & 1:
            return False
        matcher.consume_token(id)
    return bool(matcher.is_accepting())


def completion(fields: dict[str, Any]) -> Completion:
    return Completion.model_validate({"prompt": "a"} | fields)


@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        ({"guided_json": POINT}, ['{"x": 1}'], ['{"x": "1"}', '{"x": 1, "y": 2}']),
        ({"guided_json": '{"type": "array", "items": {"type": "null"}}'}, ["[null, null]"], ["[1]"]),
        ({"json_schema": '{"const": 3}'}, ["3"], ["4"]),
        ({"structured_outputs": {"json": POINT, "regex": None}}, ['{"x": 1}'], ['{"x": 1, "y": 2}']),
        ({"structured_outputs": {"json_object": True}}, ['{"y": [1]}', "{}"], ["[1]"]),
        ({"structured_outputs": {"choice": ["yes", "nö\n"]}}, ["yes", "nö\n"], ["no", "yesnö\n"]),
        ({"guided_choice": ["a/b", '"']}, ["a/b", '"'], ["a", ""]),
        ({"regex": "[ab]+"}, ["abba"], ["", "c"]),
        ({"structured_outputs": {"regex": "[ab]+"}}, ["abba"], ["c"]),
        ({"guided_grammar": LARK}, ["ab", "{{a}}b"], ["a", "{ab"]),
        ({"ebnf": GBNF}, ["ab", "{{a}}b"], ["a", "{ab"]),
        ({"structured_outputs": {"grammar": GBNF}}, ["{a}b"], ["b"]),
        (
            {"response_format": TAGS},
            ["", "so <f", 'so <f=at>{"x": 1}</f> and <f=no>{"x": 1, "y": 2}'],
            ["<f=at>no</f>", '<f=at>{"x": 1, "y": 2}</f>', "<f=or>"],
        ),
        ({"structural_tag": TAGS}, ['<f=at>{"x": 1}</f>'], ["<f=at>"]),
    ],
)
def test_answers_follow_what_the_fields_say(fields: dict[str, Any], good: list[str], bad: list[str]) -> None:
    body = completion(fields)
    assert [follows(body, text) for text in good] == [True] * len(good)
    assert [follows(body, text) for text in bad] == [False] * len(bad)


def test_a_trigger_may_be_a_token() -> None:
    """The tool mark of the vision model's vocabulary."""
    tag = {"structures": [{"begin": "<tool_call>f", "schema": POINT, "end": ";"}], "triggers": ["<tool_call>"]}
    vocabulary, tokenizer = Vocabulary(DEMO_VL), Tokenizer(DEMO_VL)
    body = completion({"structured_outputs": {"structural_tag": tag}})
    for text, good in (('so <tool_call>f{"x": 1}; and', True), ("<tool_call>g", False), ("plain", True)):
        assert follows(body, text, vocabulary=vocabulary, tokenizer=tokenizer) is good


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"guided_grammar": "nothing"}, "the grammar: expected Lark or GBNF"),
        ({"guided_json": {"enum": ["x" * 200_000]}}, "The schemas make a grammar of"),
        ({"guided_json": {"not": {}}}, "the schema: not: no answer follows this schema"),
        ({"guided_regex": "a", "allowed_token_ids": [3]}, "allowed_token_ids cannot be combined"),
    ],
)
def test_what_cannot_be_followed_is_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ApiError, match=says):
        request_grammar(completion(fields), TOKENIZER)


ONE = {"type": "integer", "minimum": 0, "maximum": 9}
NAMED: dict[str, Any] = {
    "properties": {"s": {"type": "integer"}, "b": ONE},
    "required": ["s"],
    "additionalProperties": False,
}
NODE = {"$defs": {"N": {"properties": {"n": {"$ref": "#/$defs/N"}}}}, "$ref": "#/$defs/N"}
KEYS: dict[str, Any] = {"type": "object", "additionalProperties": ONE}
DEFS = {
    name: {"type": "object", "properties": {name: {"type": "string"}}, "required": [name]} for name in ("path", "url")
}
PATH, URL = ({"$ref": f"#/$defs/{name}", "description": "One of both."} for name in DEFS)
EITHER = {
    "type": "object",
    "properties": {name: {"type": "string"} for name in DEFS},
    "oneOf": [{"required": [name]} for name in DEFS],
}
A_OR_B = {"type": "string", "enum": ["a", "b"]}
LEAF = {"type": "object", "properties": {"kind": {"const": "leaf"}}, "required": ["kind"]}
INNER: dict[str, Any] = {
    "type": "object",
    "properties": {"kind": {"const": "node"}, "left": {"$ref": "#/$defs/Tree"}},
    "required": ["kind", "left"],
}
TREE = {
    "$ref": "#/$defs/Tree",
    "$defs": {"Tree": {"oneOf": [{"$ref": "#/$defs/Leaf"}, {"$ref": "#/$defs/Node"}]}, "Leaf": LEAF, "Node": INNER},
}
INT64, LONG = {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, {"type": "string", "maxLength": 2**53}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        # `required` names what `properties` lacks
        (POINT | {"required": ["x", "y"]}, ['{"x": 1, "y": [2]}'], ['{"x": 1}', '{"y": 1}']),
        ({"required": ["y"], "additionalProperties": ONE}, ['{"y": 2}'], ['{"y": 10}', "{}"]),
        # formats that are annotations
        ({"type": "string", "format": "binary"}, ['"a"'], ["1"]),
        ({"type": ["string", "integer"], "format": "int64"}, ['"a"', "1"], ["1.5"]),
        ({"type": "number", "format": "date"}, ["1.5"], ['"2020-01-01"']),
        ({"format": "uri-reference", "enum": ["a/b"]}, ['"a/b"'], ['"c"']),
        ({"type": "string", "format": "date"}, ['"2020-01-31"'], ['"2020-01-32"', '"a"']),
        ({"items": {"anyOf": [{"type": "string", "format": "path"}, {"type": "null"}]}}, ['["/", null]'], ["[1]"]),
        # bounds that no regular expression of llguidance has
        (INT64, ["0", "-9223372036854774784", "9223372036854775807"], ["-9223372036854775809", "9223372036854775808"]),
        ({"type": "integer", "exclusiveMinimum": -(2**64), "exclusiveMaximum": 2**64}, ["-7"], ["1.5"]),
        ({"type": "integer", "minimum": 0, "maximum": 2**64 - 1}, ["0", "7"], ["-1", "18446744073709551616"]),
        ({"type": "number", "minimum": -1.7e308, "maximum": 1.7e308}, ["-1.5", "1000000000000"], ['"a"']),
        ({"anyOf": [INT64, {"type": "null"}], "default": None, "title": "D"}, ["3", "null"], ["true"]),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 3.4e38}, ["0.5"], ["0", "-1"]),
        ({"type": "integer", "minimum": 0, "exclusiveMinimum": True}, ["1"], ["0"]),
        (LONG, ['"a"'], ["1"]),
        # patterns that match named properties
        (NAMED | {"patternProperties": {"^s$": ONE}}, ['{"s": 3}', '{"s": 3, "b": 3}'], ['{"s": 33}']),
        (NAMED | {"patternProperties": {"^(s|t)$": ONE}}, ['{"s": 3}'], ['{"s": 33}', "{}"]),
        (NAMED | {"patternProperties": {"^s": ONE}}, ['{"s": 3, "st": 4}'], ['{"s": 33}', '{"s": 3, "st": 44}']),
        (NAMED | {"patternProperties": {"^[a-z]+$": ONE}}, ['{"s": 3, "z": 4}'], ['{"s": 33}']),
        ({"required": ["s"], "patternProperties": {"^s$": ONE}}, ['{"s": 3}'], ['{"s": 33}', "{}"]),
        ({"type": "object", "properties": {"a": ONE}, "patternProperties": {"^x": False}}, ['{"a": 3}'], ['{"x": 1}']),
        # keywords that say nothing here
        ({"type": "array", "items": ONE, "uniqueItems": False}, ["[1, 1]"], ['["a"]']),
        ({"propertyNames": {"type": "string"}, "additionalProperties": ONE}, ['{"a": 1}'], ['{"a": 11}']),
        (POINT | {"unevaluatedProperties": False}, ['{"x": 1}'], ['{"x": 1, "y": 1}']),
        ({"$schema": "https://example.com/mine", "$dynamicAnchor": "a", "type": "null", "then": ONE}, ["null"], ["1"]),
        # others that pydantic, zod and MCP servers write
        ({"enum": [1, "a", None, True, [1], {"x": 1}]}, ["1", '"a"', "null", "true", "[1]", '{"x": 1}'], ["2"]),
        (NODE, ['{"n": {"n": {}}}'], ['{"m": 1}']),
        ({"type": "array", "prefixItems": [ONE, {"type": "null"}], "minItems": 2}, ["[1, null]"], ["[1]", "[1, 1]"]),
        (KEYS | {"propertyNames": {"enum": ["a", "b"]}}, ['{"a": 1, "b": 2}', "{}"], ['{"c": 1}', '{"a": 11}']),
        (KEYS | {"propertyNames": {"const": "a"}, "required": ["a"]}, ['{"a": 1}'], ["{}", '{"b": 1}']),
        (KEYS | {"$defs": {"K": {"enum": ["a"]}}, "propertyNames": {"$ref": "#/$defs/K"}}, ['{"a": 1}'], ['{"b": 1}']),
        (POINT | {"propertyNames": {"enum": ["x", "y"]}}, ['{"x": 1, "y": null}'], ['{"x": 1, "z": 1}', '{"x": ""}']),
        (KEYS | {"propertyNames": {"pattern": "^[a-z]+$"}}, ['{"ab": 1}'], ['{"A": 1}', '{"ab": 11}']),
        (KEYS | {"propertyNames": {"minLength": 2, "maxLength": 3}}, ['{"ab": 1}'], ['{"a": 1}', '{"abcd": 1}']),
        # alternatives
        ({"oneOf": [PATH, URL], "$defs": DEFS}, ['{"path": "a"}', '{"url": "b"}'], ["{}", '{"path": "a", "url": "b"}']),
        ({"anyOf": [PATH, URL], "$defs": DEFS}, ['{"path": "a"}', '{"url": "b"}'], ["{}", "1"]),
        ({"oneOf": [PATH, {"type": "null"}], "$defs": DEFS}, ["null", '{"path": "a"}'], ['{"url": "a"}', "1"]),
        ({"oneOf": [A_OR_B, {"type": "array", "items": A_OR_B}]}, ['"a"', '["b"]'], ['"c"', "[1]"]),
        ({"oneOf": [{"type": "integer", "maximum": 0}, {"type": "number", "exclusiveMinimum": 0}]}, ["1"], ["-0.5"]),
        (EITHER, ['{"path": "a"}', '{"url": "b"}'], ["{}", '{"path": "a", "url": "b"}']),
        (TREE, ['{"kind": "leaf"}', '{"kind": "node", "left": {"kind": "leaf"}}'], ['{"kind": "node"}']),
        ({"anyOf": [{"not": {}}, ONE]}, ["3"], ["null", "33"]),
        ({"properties": {"a": {"not": {}}, "b": ONE}}, ['{"b": 3}', "{}"], ['{"a": 1}']),
        ({"anyOf": [{"type": "number"}, {"type": "string", "pattern": "^(?!a).$"}]}, ["1.5"], ['"b"']),
        ({"default": {"format": "x"}, "const": {"format": "x"}}, ['{"format": "x"}'], ["{}"]),
    ],
)  # fmt: skip
def test_answers_follow_schemas_of_libraries(schema: dict[str, Any], good: list[str], bad: list[str]) -> None:
    """The library jsonschema says so of the texts (draft 2020-12), but for closed objects and formats."""
    body = completion({"guided_json": schema})
    assert [follows(body, text) for text in good] == [True] * len(good)
    assert [follows(body, text) for text in bad] == [False] * len(bad)


@pytest.mark.parametrize(
    ("pattern", "more"), [("^s$", ""), ("^(s|st)$", ""), ("^s[t]?$", ""), ("^s(t|u)$", ',"su":1'), ("^s", ',"s1":1')]
)
def test_a_comma_is_followed_by_a_name(pattern: str, more: str) -> None:
    """All properties but those in `more` are written before."""
    named = {"properties": {"s": ONE, "st": ONE}, "additionalProperties": False}
    body = completion({"guided_json": named | {"patternProperties": {pattern: ONE}}})
    whole = f'{{"s":1,"st":1{more}}}'
    assert follows(body, whole)
    grammar = request_grammar(body, TOKENIZER)
    assert grammar is not None
    matcher = VOCABULARY.matcher(grammar)
    for id in TOKENIZER.encode('{"s":1,"st":1', add_special_tokens=False):
        matcher.consume_token(id)
    comma = TOKENIZER.encode(",", add_special_tokens=False)[0]
    assert allowed_tokens(matcher)[comma // 8] >> comma % 8 & 1 == bool(more)


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"not": {"type": "null"}}, "not"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        (POINT | {"propertyNames": {"pattern": "^a"}}, "propertyNames"),
        (KEYS | {"propertyNames": {"format": "uuid"}}, "propertyNames"),
        ({"oneOf": [DEFS["path"], OPEN | {"required": []}]}, "oneOf"),
        ({"oneOf": [POINT, {"$ref": "#/$defs/P", "minimum": 1}], "$defs": {"P": POINT}}, "oneOf"),
        ({"type": "integer", "minimum": 2**70}, "minimum"),
        ({"type": "number", "minimum": 1e19}, "minimum"),
        ({"type": "string", "pattern": "^(?!a)b$"}, "pattern"),
        ({"type": "string", "pattern": "^[0-9]{4}$", "maxLength": 3}, "maxLength"),
        ({"type": "string", "enum": [1]}, "enum"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
        (POINT | {"required": ["x", "y"], "additionalProperties": False}, "required"),
        ({"type": "array", "prefixItems": [{}], "items": False, "minItems": 2}, "minItems"),
        ({"type": "integer", "minimum": 5, "maximum": 2}, r"minimum \(5\)"),
        ({"type": "integer", "multipleOf": 7, "minimum": 1, "maximum": 6}, "multiple of 7"),
    ],
)
def test_a_schema_that_cannot_be_followed_is_refused_by_its_keyword(schema: dict[str, Any], keyword: str) -> None:
    with pytest.raises(RequestError, match=rf"schema: .*\b{keyword}") as caught:
        follows(completion({"guided_json": schema}), "")
    assert not re.search("NoExtensionBias|Unsatisfiable|Failed to generate", str(caught.value))


def test_calls_without_json_have_all_required_arguments() -> None:
    schema = POINT | {"required": ["x", "y"]}
    rules = FunctionFormat().argument_rules("call", schema | {"additionalProperties": ONE})
    assert rules[0] == 'call: "" call_0 call_1'
    assert '"maximum": 9' in rules[-1]
    with pytest.raises(ValueError, match="required: y is not among the properties"):
        FunctionFormat().argument_rules("call", schema | {"additionalProperties": False})


def test_arguments_without_json_may_refer_to_each_other() -> None:
    """As zod writes a schema that it has written before."""
    schema = {
        "properties": {"a": POINT, "b": {"$ref": "#/properties/a"}, "c": {"type": "array", "items": {"$ref": "#"}}}
    }
    rules = FunctionFormat().argument_rules("call", schema)
    grammar = "\n".join(["start: call", *rules])
    for value, right in (('{"x": 1}', True), ('{"x": "1"}', False), ('{"y": 1}', False)):
        matcher = VOCABULARY.matcher(grammar)
        text = f'<parameter=b>\n{value}\n</parameter>\n<parameter=c>\n[{{"b": {value}}}]\n</parameter>\n'
        taken = [matcher.consume_token(id) for id in TOKENIZER.encode(text, add_special_tokens=False)]
        assert all(taken) == right


def test_patterns_are_compared_with_so_many_names() -> None:
    schema = POINT | {"patternProperties": {f"^a{i}$": {} for i in range(1001)}}
    with pytest.raises(ApiError, match="patternProperties: expected at most 1000 pairs"):
        request_grammar(completion({"guided_json": schema}), TOKENIZER)


REF = [{"$ref": "#/$defs/P"}]
PARTS = {"allOf": [{"$ref": "#/$defs/P"}, {"properties": {"y": {"type": "null"}}}], "$defs": {"P": POINT}}
CLOSED = POINT | {"additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (POINT, CLOSED),
        (OPEN, OPEN),
        (POINT | {"required": ["x", "y"]}, POINT | {"required": ["x", "y"]}),
        ({"type": "object"}, {"type": "object"}),
        ({"properties": {"items": {}}}, {"properties": {"items": {}}, "additionalProperties": False}),
        ({"items": POINT, "default": POINT}, {"items": CLOSED, "default": POINT}),
        ({"anyOf": [POINT, {"type": "null"}]}, {"anyOf": [CLOSED, {"type": "null"}]}),
        ({"allOf": REF, "$defs": {"P": POINT}}, {"allOf": REF, "$defs": {"P": CLOSED}}),
        (PARTS, PARTS),
        (POINT | {"anyOf": [{"properties": {"y": True}}]}, POINT | {"anyOf": [{"properties": {"y": True}}]}),
    ],
)  # fmt: skip
def test_objects_are_closed_unless_parts_share_them(schema: dict[str, Any], expected: dict[str, Any]) -> None:
    assert closed(schema) == expected
