"""The formats in which models write tool calls.

Hermes (Qwen2.5, Qwen3): <tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number of them, with text around
them.
Qwen3-Coder, Qwen3.5: the same marks around <function=NAME>, a <parameter=KEY>value</parameter> for each argument, and
</function>. Values are plain text or JSON, as the tool's schema says.
DeepSeek-V3.1: NAME<｜tool▁sep｜>{...} between marks, and other marks around all calls.
Llama 3.x: the whole text is {"name": ..., "parameters": {...}}, or several of these separated by semicolons.
"""

import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from tilerank.loader.errors import TokenizerError
from tilerank.loader.tokenizer import Tokenizer

from .reasoning import overlap
from .tools import DECODER, Piece, Schema, ToolCall, ToolParser, json_rule, parse_json


class MarkedTools(ToolParser):
    """A format with the mark BEGIN before and END after a call, and the marks AROUND before and after all calls."""

    BEGIN: str
    END: str
    AROUND: tuple[str, ...] = ()

    def push(self, text: str) -> list[Piece]:
        self._buffer += text
        pieces: list[Piece] = []
        while True:
            before, begun, rest = self._buffer.partition(self.BEGIN)
            if not begun:
                break
            inside, ended, after = rest.partition(self.END)
            if not ended:
                return [piece for piece in pieces if piece]
            call = self._call(inside)
            # The line breaks before a call belong to the call.
            pieces += [self._plain(before).rstrip("\n"), call] if call else [before + self.BEGIN + inside + self.END]
            self._buffer = after
        keep = max(overlap(before, mark) for mark in (self.BEGIN, *self.AROUND))
        plain = self._plain(before[: len(before) - keep])
        sure = plain.rstrip("\n")
        self._buffer = plain[len(sure) :] + before[len(before) - keep :]
        return [piece for piece in [*pieces, sure] if piece]

    def flush(self) -> list[Piece]:
        rest, self._buffer = self._buffer, ""
        return [rest] if rest else []

    @abstractmethod
    def _call(self, inside: str) -> ToolCall | None:
        """Return the call that the text between the marks describes; None if it is malformed."""

    def _plain(self, text: str) -> str:
        for mark in self.AROUND:
            text = text.replace(mark, "")
        return text


class HermesTools(MarkedTools):
    """The format of Hermes, which Qwen2.5 and Qwen3 use."""

    MARKS = BEGIN, END = "<tool_call>", "</tool_call>"
    BEGIN_CALL, END_CALL = BEGIN + '\n{"name": "%s", "arguments": ', "}\n" + END
    BETWEEN = "\n"

    def _call(self, inside: str) -> ToolCall | None:
        return ToolCall.from_json(parse_json(inside), "arguments")


class DeepSeekTools(MarkedTools):
    """The format of DeepSeek-V3.1."""

    BEGIN, END, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
    AROUND = BEGIN_CALLS, END_CALLS = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
    MARKS = (BEGIN, END, SEPARATOR, *AROUND)
    BEGIN_CALL, END_CALL = BEGIN + "%s" + SEPARATOR, END

    @staticmethod
    def describe(tools: Sequence[Mapping[str, Any]]) -> str:
        functions = [tool["function"] for tool in tools]
        described = (
            f"### {function['name']}\nDescription: {function.get('description') or ''}\n\n"
            f"Parameters: {json.dumps(function.get('parameters') or {}, ensure_ascii=False)}\n\n"
            for function in functions
        )
        return f"{_DEEPSEEK_TOOLS}{''.join(described)}{_DEEPSEEK_RULES}"

    def _call(self, inside: str) -> ToolCall | None:
        name, _, arguments = inside.partition(self.SEPARATOR)
        return ToolCall.from_json({"name": name.strip(), "arguments": parse_json(arguments)}, "arguments")


# The model has been trained on this text, which its model card gives. Its chat template leaves tools out.
_DEEPSEEK_TOOLS = "## Tools\nYou have access to the following tools:\n\n"
_DEEPSEEK_RULES = f"""IMPORTANT: ALWAYS adhere to this exact format for tool use:
{DeepSeekTools.BEGIN_CALLS}{DeepSeekTools.BEGIN_CALL % "tool_call_name"}tool_call_arguments{DeepSeekTools.END}\
{{{{additional_tool_calls}}}}{DeepSeekTools.END_CALLS}

Where:

- `tool_call_name` must be an exact match to one of the available tools
- `tool_call_arguments` must be valid JSON that strictly follows the tool's Parameters Schema
- For multiple tool calls, chain them directly without separators or spaces
"""


class FunctionTools(MarkedTools):
    """The format of Qwen3-Coder and Qwen3.5."""

    MARKS = BEGIN, END = "<tool_call>", "</tool_call>"
    FUNCTION, END_FUNCTION = "<function=", "</function>"
    PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
    BEGIN_CALL, END_CALL = BEGIN + "\n" + FUNCTION + "%s>\n", END_FUNCTION + "\n" + END
    BETWEEN = "\n"

    @staticmethod
    def write_arguments(arguments: Any) -> str:
        if not isinstance(arguments, Mapping):
            return str(arguments)
        texts = {
            name: one if isinstance(one, str) else json.dumps(one, ensure_ascii=False)
            for name, one in arguments.items()
        }
        begin, end = FunctionTools.PARAMETER, FunctionTools.END_PARAMETER
        return "".join(f"{begin}{name}>\n{text}\n{end}\n" for name, text in texts.items())

    @staticmethod
    def argument_rules(rule: str, schema: Schema) -> list[str]:
        required = _list(schema.get("required"))
        definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        sequence, rules = ['""'], []
        for i, (name, of_value) in enumerate(_properties(schema).items()):
            value = f"{rule}_{i}"
            sequence.append(f"{value}{'' if name in required else '?'}")
            rules.append(f"{value}: {json.dumps(FunctionTools.PARAMETER + name + '>' + chr(10))} {value}_value")
            rules += FunctionTools._value_rules(f"{value}_value", name, of_value, definitions)
        return [f"{rule}: {' '.join(sequence)}", *rules]

    @staticmethod
    def _value_rules(rule: str, name: str, schema: Schema, definitions: Schema) -> list[str]:
        end = json.dumps(f"\n{FunctionTools.END_PARAMETER}\n")
        if not _is_text(schema):
            return [f"{rule}: {rule}_json {end}", f"{rule}_json: {json_rule({**definitions, **schema})}"]
        choices = [schema["const"]] if "const" in schema else _list(schema.get("enum"))
        if choices:
            return [f"{rule}: ({' | '.join(json.dumps(str(one)) for one in choices)}) {end}"]
        bound = next((key for key in ("pattern", "format", "minLength", "maxLength") if key in schema), None)
        if bound is not None:
            raise ValueError(f"{name}: {bound} is not supported, because this model writes strings without quotes")
        return [f"{rule}[suffix={end}]: /(.|\\n)*/"]

    def _call(self, inside: str) -> ToolCall | None:
        before, begun, rest = inside.partition(self.FUNCTION)
        name, named, body = rest.partition(">")
        body, ended, after = body.partition(self.END_FUNCTION)
        if not (begun and named and ended and name) or before.strip() or after.strip():
            return None
        properties = _properties(self._schemas.get(name, {}))
        arguments: dict[str, Any] = {}
        while body.strip():
            before, begun, rest = body.partition(self.PARAMETER)
            key, named, rest = rest.partition(">")
            value, ended, body = rest.partition(self.END_PARAMETER)
            if not (begun and named and ended) or before.strip():
                return None
            arguments[key] = _value(value.removeprefix("\n").removesuffix("\n"), properties.get(key, {}))
        return ToolCall(name, json.dumps(arguments, ensure_ascii=False))


_CONSTANTS = {"True": True, "False": False, "None": None}
"""The chat template writes earlier calls with Python's constants, so that models write them as well."""


def _properties(schema: Schema) -> dict[str, Schema]:
    """Return the schema of each property. It allows any value if the request has something else than a schema there."""
    properties = schema.get("properties")
    if not isinstance(properties, Mapping):
        return {}
    return {name: one if isinstance(one, Mapping) else {} for name, one in properties.items()}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _types(schema: Any) -> set[str]:
    """Return the JSON types that a schema names, also in alternatives."""
    if not isinstance(schema, Mapping):
        return set()
    named = schema.get("type")
    types = {one for one in ([named] if isinstance(named, str) else _list(named)) if isinstance(one, str)}
    return types.union(*(_types(one) for key in ("anyOf", "oneOf") for one in _list(schema.get(key))))


def _is_text(schema: Schema) -> bool:
    """Is every value of this schema a string, which is written without quotes?"""
    return _types(schema) == {"string"} and not schema.keys() & {"anyOf", "oneOf", "allOf", "$ref"}


def _value(text: str, schema: Any) -> Any:
    """Return the value of an argument: the text itself where the schema wants strings, otherwise JSON if it is JSON."""
    types = _types(schema)
    if types == {"string"}:
        return text
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    return text if types == {"string", "null"} and text != "null" else parse_json(text, text)


class LlamaTools(ToolParser):
    """The format of Llama 3.x models."""

    BEGIN_CALL, END_CALL = '{"name": "%s", "parameters": ', "}"
    BETWEEN = "; "

    def __init__(self, schemas: Mapping[str, Schema] | None = None) -> None:
        super().__init__(schemas or {})
        self._is_text = False

    def push(self, text: str) -> list[Piece]:
        self._buffer += text
        if not self._is_text and (not self._buffer.strip() or self._buffer.lstrip().startswith("{")):
            return []
        self._is_text = True
        text, self._buffer = self._buffer, ""
        return [text] if text else []

    def flush(self) -> list[Piece]:
        text, self._buffer = self._buffer, ""
        calls = [ToolCall.from_json(value, "parameters") for value in _objects(text)]
        whole = [call for call in calls if call is not None]
        if whole and len(whole) == len(calls):
            return [*whole]
        return [text] if text else []


def _objects(text: str) -> list[Any]:
    """Return the JSON values of a text that separates them by semicolons; [None] for any other text."""
    found, at = [], 0
    text = text.strip()
    while at < len(text):
        try:
            value, at = DECODER.raw_decode(text, at)
        except (ValueError, RecursionError):
            return [None]
        found.append(value)
        while at < len(text) and text[at] in "; \n":
            at += 1
    return found


TOOL_FORMATS: dict[str, type[ToolParser]] = {"hermes": HermesTools, "llama": LlamaTools}
"""The formats that chat templates do not always show, by the names that families have for them."""


def tool_parser(tokenizer: Tokenizer, usual: str | None) -> type[ToolParser] | None:
    """Return the parser for the format that the chat template shows; None if it is unknown.

    usual: the name of the family's format, if it has one, which holds for a template that shows none.
    """
    try:
        template = tokenizer.chat_template.source
    except TokenizerError:
        return None  # a request with messages is refused with the reason
    if DeepSeekTools.BEGIN in template:
        # DeepSeek-V3 and R1 put the arguments into a block of Markdown.
        return None if "```json" in template else DeepSeekTools
    if FunctionTools.FUNCTION in template and FunctionTools.PARAMETER in template:
        return FunctionTools
    if HermesTools.BEGIN in template:
        return HermesTools
    return None if usual is None else TOOL_FORMATS[usual]
