"""Tool calls as the chat templates of models write them."""

from typing import Any

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "array", "items": {"type": "integer"}},
        "unit": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "warm": {"type": "boolean"},
        "near": {"$ref": "#/$defs/Place"},
        "sky": {"type": "string", "enum": ["clear", "grey"]},
        "kind": {"$ref": "#/$defs/Kind"},
        "place": {"allOf": [{"$ref": "#/$defs/Kind"}], "default": "1"},
    },
    "required": ["city", "days"],
    "$defs": {
        "Place": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]},
        "Kind": {"enum": ["1", "2", "3"]},
    },
}


def deepseek(*calls: str) -> str:
    marked = (f"<｜tool▁call▁begin｜>{call}<｜tool▁call▁end｜>" for call in calls)
    return f"<｜tool▁calls▁begin｜>{''.join(marked)}<｜tool▁calls▁end｜>"


def kimi(*calls: str) -> str:
    marked = (f"<|tool_call_begin|>{call}<|tool_call_end|>" for call in calls)
    return f"<|tool_calls_section_begin|>{''.join(marked)}<|tool_calls_section_end|>"


def function(name: str, **values: str) -> str:
    """Return a call as Qwen3.5's chat template writes earlier ones."""
    arguments = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{arguments}</function>\n</tool_call>"
