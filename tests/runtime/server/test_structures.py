"""What constrains an answer: the fields of other servers, and objects that are closed."""

from typing import Any

import pytest
from command import DEMO
from media_files import DEMO_VL

from tilerank.loader.tokenizer import Tokenizer
from tilerank.runtime.protocol.grammar import Vocabulary, allowed_tokens
from tilerank.runtime.server.apis.completions.body import Completion
from tilerank.runtime.server.chat.grammars import request_grammar
from tilerank.runtime.server.chat.schemas import closed
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
        ({"guided_regex": "a", "allowed_token_ids": [3]}, "allowed_token_ids cannot be combined"),
    ],
)
def test_what_cannot_be_followed_is_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ApiError, match=says):
        request_grammar(completion(fields), TOKENIZER)


REF = [{"$ref": "#/$defs/P"}]
PARTS = {"allOf": [{"$ref": "#/$defs/P"}, {"properties": {"y": {"type": "null"}}}], "$defs": {"P": POINT}}
CLOSED = POINT | {"additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (POINT, CLOSED),
        (OPEN, OPEN),
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
