"""The tools of a chat, and the choice of those that the model may or must call."""

from typing import Annotated, Any, Literal

from pydantic import Field

from ..http.errors import ApiError
from .fields import CheckedBody, ListOf

_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


class Function(CheckedBody):
    """A function. The arguments of its calls follow `parameters`, whether the client sets `strict` or not."""

    name: str = Field(pattern="^[a-zA-Z0-9_.-]{1,128}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Any = Field(None, exclude=True)

    @property
    def arguments_schema(self) -> dict[str, Any]:
        """The schema of the arguments, which are an object. Raises ApiError if the parameters are something else."""
        schema = _NO_PARAMETERS if self.parameters is None else self.parameters
        if schema.get("type", "object") != "object":
            raise ApiError(400, f"tools: the parameters of {self.name} must have type object", param="tools")
        return {"type": "object"} | schema


class Tool(CheckedBody):
    """A tool that the model may call. cache_control: a hint, as of a text."""

    type: Literal["function"]
    function: Function
    cache_control: Any = Field(None, exclude=True)


class ChosenFunction(CheckedBody):
    name: str


class NamedTool(CheckedBody):
    """The tool that the model must call."""

    type: Literal["function"]
    function: ChosenFunction


class AllowedTools(CheckedBody):
    mode: Literal["auto", "required"]
    tools: ListOf[NamedTool] = Field(min_length=1, max_length=128)


class SomeTools(CheckedBody):
    """The tools that the model may call, or one of which it must call."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice = Literal["none", "auto", "required"] | Annotated[NamedTool | SomeTools, Field(discriminator="type")]
