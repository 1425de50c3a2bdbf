"""The tools of OpenAI's /v1/responses, and their translation into the functions of a chat and back."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BeforeValidator, Field, ValidationInfo

from ...chat.fields import Form, ListOf
from ...chat.ignored_fields import without_tools
from ...chat.tools.calls import arguments_from_json
from ...http.errors import ApiError
from ..answer import Json

Name = Annotated[str, Field(pattern="^[a-zA-Z0-9_.-]{1,128}$")]
_INPUT = "input"
"""The argument that holds the text of a custom tool's call."""
_SERVER_TOOLS = re.compile(r"(?!(function|custom|namespace|local_shell|shell|apply_patch|computer\w*)$).*")
"""Types of tools that OpenAI's server runs. Those named here are the client's; only models of OpenAI know the inputs of
some, which the check refuses."""


def _own_tools(tools: Any, info: ValidationInfo) -> Any:
    return without_tools(tools, _SERVER_TOOLS, info)


class FunctionTool(Form):
    """A function that the model may call. Arguments of forced calls always follow the schema. defer_loading: a
    hint; the model sees every tool from the beginning."""

    type: Literal["function"]
    name: Name
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None
    defer_loading: bool | None = None
    output_schema: Any = None

    def function(self, name: str) -> Json:
        """Return the function of a chat under another name."""
        fields = {"name": name, "description": self.description, "parameters": self.parameters, "strict": self.strict}
        return {field: value for field, value in fields.items() if value is not None}


class TextGrammar(Form):
    """The form of a custom tool's input. The model reads the grammar; its answers are not bound to it."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None


class CustomTool(Form):
    """A tool that takes a text. For the model it is a function with one argument."""

    type: Literal["custom"]
    name: Name
    description: str | None = None
    format: TextGrammar | None = None
    defer_loading: bool | None = None

    def function(self, name: str) -> Json:
        """Return the function of a chat under another name."""
        text: Json = {"type": "string"}
        if self.format is not None and self.format.definition is not None:
            text["description"] = f"A text of this {self.format.syntax} grammar:\n{self.format.definition}"
        schema = {"type": "object", "properties": {_INPUT: text}, "required": [_INPUT]}
        return {"name": name, "description": self.description or "", "parameters": schema}


Callable = Annotated[FunctionTool | CustomTool, Field(discriminator="type")]


class Namespace(Form):
    """Tools under a common name. The names of its functions begin with it."""

    type: Literal["namespace"]
    name: Name
    description: str | None = None
    tools: Annotated[ListOf[Callable], BeforeValidator(_own_tools)] = Field(max_length=128)


Tool = Annotated[FunctionTool | CustomTool | Namespace, Field(discriminator="type")]
Tools = Annotated[ListOf[Tool], BeforeValidator(_own_tools)]


class ChosenTool(Form):
    """A tool that the model must call."""

    type: Literal["function", "custom"]
    name: str


class AllowedTools(Form):
    """The tools that the model may call, of those in `tools`."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: ListOf[ChosenTool] = Field(min_length=1, max_length=128)


ToolChoice = Literal["none", "auto", "required"] | Annotated[ChosenTool | AllowedTools, Field(discriminator="type")]


class CalledTool(NamedTuple):
    """What a function of the chat is in this API. namespace: None for none. is_custom: does it take a text?"""

    name: str
    namespace: str | None
    is_custom: bool

    @property
    def fields(self) -> Json:
        """The fields of a call that name the tool."""
        return {"name": self.name} | ({} if self.namespace is None else {"namespace": self.namespace})


def function_name(name: str, namespace: str | None) -> str:
    """Return the name of the function of a chat that stands for a tool."""
    return name if namespace is None else f"{namespace}.{name}"


def _flat(tools: Iterable[Tool]) -> Iterable[tuple[str, CalledTool, FunctionTool | CustomTool]]:
    """Yield all tools, with the names of their functions."""
    for tool in tools:
        namespace = tool.name if isinstance(tool, Namespace) else None
        for one in tool.tools if isinstance(tool, Namespace) else (tool,):
            called = CalledTool(one.name, namespace, isinstance(one, CustomTool))
            yield function_name(one.name, namespace), called, one


def called_tools(tools: Iterable[Tool]) -> dict[str, CalledTool]:
    """Return the tools by the names of their functions."""
    return {name: called for name, called, _ in _flat(tools)}


def chat_tools(tools: Sequence[Tool], choice: str | ChosenTool | AllowedTools) -> list[Json]:
    """Return the tools of a chat: those that `choice` allows. Raises ApiError if it names another one."""
    functions = {name: one.function(name) for name, _, one in _flat(tools)}
    if isinstance(choice, AllowedTools):
        allowed = {tool.name for tool in choice.tools}
        if unknown := allowed - functions.keys():
            raise ApiError(400, f"tool_choice: no tool has the name {min(unknown)!r}", param="tool_choice")
        functions = {name: one for name, one in functions.items() if name in allowed}
    return [{"type": "function", "function": one} for one in functions.values()]


def chat_choice(choice: str | ChosenTool | AllowedTools) -> str | Json:
    """Return the tool_choice of a chat."""
    if isinstance(choice, str):
        return choice
    if isinstance(choice, ChosenTool):
        return {"type": "function", "function": {"name": choice.name}}
    return choice.mode


def custom_arguments(text: str) -> str:
    """Return the arguments of the function that stands for a custom tool."""
    return json.dumps({_INPUT: text}, ensure_ascii=False)


def custom_input(arguments: str) -> str:
    """Return the text of a call of a custom tool, of the arguments of its function: all of them if they have none."""
    found: Mapping[str, Any] = arguments_from_json(arguments) or {}
    text = found.get(_INPUT)
    return text if isinstance(text, str) else arguments


def repeated(tool: Tool) -> Json:
    """Return a tool as the response repeats it. Clients need the fields of a function to be there."""
    absent = {"description": None, "parameters": None, "strict": None} if isinstance(tool, FunctionTool) else {}
    return absent | tool.model_dump(exclude_none=True)
