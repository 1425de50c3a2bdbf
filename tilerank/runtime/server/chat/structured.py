"""The fields of a request that constrain its answer, under the names of OpenAI, vLLM and SGLang."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from ..http.json_values import check_texts
from .fields import CheckedBody, Form, ListOf, RequestBody

Schema = dict[str, Any]


def _parsed(value: Any) -> Any:
    """Return the JSON value of a text. Other servers take both."""
    if not isinstance(value, str):
        return value
    check_texts("a schema in a string", [value])
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as e:
        raise ValueError(f"expected JSON: {e}") from e


_FROM_TEXT = BeforeValidator(_parsed)
Text = Annotated[str, Field(min_length=1, max_length=1024)]
_Regex = Annotated[str, Field(min_length=1, max_length=8192)]
_Grammar = Annotated[str, Field(min_length=1, max_length=64 << 10)]
_Choices = Annotated[ListOf[Annotated[str, Field(min_length=1, max_length=8192)]], Field(min_length=1, max_length=1024)]


class JsonSchema(CheckedBody):
    """`definition`: the schema. Answers always follow it, whether the client sets `strict` or not."""

    name: str = Field(pattern="^[a-zA-Z0-9_-]{1,64}$")
    definition: Schema = Field(alias="schema")
    description: Any = None
    strict: Any = None


class Structure(Form):
    """Text that begins with `begin`, then follows a JSON schema, then ends with `end`."""

    model_config = ConfigDict(populate_by_name=True)
    begin: Text
    definition: Schema = Field(alias="schema")
    end: str = Field("", max_length=1024)


class StructuralTag(Form):
    """Free text in which `structures` may occur: wherever a trigger is written, one of them must follow."""

    type: Literal["structural_tag"] = "structural_tag"
    structures: ListOf[Structure] = Field(min_length=1, max_length=128)
    triggers: ListOf[Text] = Field(min_length=1, max_length=128)

    @model_validator(mode="after")
    def _check_triggers(self) -> "StructuralTag":
        for structure in self.structures:
            if self.trigger_of(structure) is None:
                raise ValueError(f"expected a trigger that {structure.begin!r} begins with, found {self.triggers}")
        return self

    def trigger_of(self, structure: Structure) -> str | None:
        """Return the longest trigger that a structure begins with."""
        matching = [trigger for trigger in self.triggers if structure.begin.startswith(trigger)]
        return max(matching, key=len, default=None)


@dataclass(frozen=True)
class Constraint:
    """The constraint of an answer: one of these is set. grammar: in Lark or GBNF."""

    json_schema: Schema | None = None
    regex: str | None = None
    choices: Sequence[str] | None = None
    grammar: str | None = None
    structural_tag: StructuralTag | None = None


class ResponseFormat(CheckedBody):
    """OpenAI's field, with the structural tags of other servers."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    structures: Annotated[ListOf[Structure], Field(min_length=1, max_length=128)] | None = None
    triggers: Annotated[ListOf[Text], Field(min_length=1, max_length=128)] | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema is required for type json_schema, and not allowed for other types")
        if self.type == "structural_tag":
            _ = self._structural_tag  # raises ValueError if it is none
        return self

    @property
    def _structural_tag(self) -> StructuralTag:
        return StructuralTag(structures=self.structures or [], triggers=self.triggers or [])

    @property
    def constraint(self) -> Constraint | None:
        match self.type:
            case "text":
                return None
            case "structural_tag":
                return Constraint(structural_tag=self._structural_tag)
        return Constraint({"type": "object"} if self.json_schema is None else self.json_schema.definition)


class StructuredOutputs(Form):
    """vLLM's field. Its last two fields have no effect: objects are closed, and there is one engine of grammars."""

    model_config = ConfigDict(populate_by_name=True)
    json_value: Annotated[Schema, _FROM_TEXT] | None = Field(None, alias="json")
    json_object: bool = False
    regex: _Regex | None = None
    choice: _Choices | None = None
    grammar: _Grammar | None = None
    structural_tag: Annotated[StructuralTag, _FROM_TEXT] | None = None
    disable_additional_properties: bool = False
    disable_fallback: bool = False


class Structured(RequestBody):
    """The fields that constrain an answer, of which a request may have one. The last three are SGLang's."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    structural_tag: Annotated[StructuralTag, _FROM_TEXT] | None = None
    guided_json: Annotated[Schema, _FROM_TEXT] | None = None
    guided_regex: _Regex | None = None
    guided_choice: _Choices | None = None
    guided_grammar: _Grammar | None = None
    json_schema: Annotated[Schema, _FROM_TEXT] | None = None
    regex: _Regex | None = None
    ebnf: _Grammar | None = None

    @model_validator(mode="after")
    def _check_one_constraint(self) -> "Structured":
        names = [name for name, _ in self._constraints()]
        if len(names) > 1:
            raise ValueError(f"{' and '.join(names)} cannot be combined")
        return self

    @property
    def constraint(self) -> Constraint | None:
        """The constraint of the answer; None for any text."""
        return next((constraint for _, constraint in self._constraints()), None)

    def _constraints(self) -> Iterator[tuple[str, Constraint]]:
        """Yield what is constrained, with the names of the fields."""
        if self.model_fields_set.isdisjoint(Structured.model_fields):  # most requests have none of them
            return
        if self.response_format is not None and (requested := self.response_format.constraint) is not None:
            yield "response_format", requested
        nested = self.structured_outputs or StructuredOutputs.model_validate({})
        given: tuple[tuple[str, str, Any], ...] = (
            ("structured_outputs.json", "json_schema", nested.json_value),
            ("structured_outputs.json_object", "json_schema", {"type": "object"} if nested.json_object else None),
            ("structured_outputs.regex", "regex", nested.regex),
            ("structured_outputs.choice", "choices", nested.choice),
            ("structured_outputs.grammar", "grammar", nested.grammar),
            ("structured_outputs.structural_tag", "structural_tag", nested.structural_tag),
            ("structural_tag", "structural_tag", self.structural_tag),
            ("guided_json", "json_schema", self.guided_json),
            ("guided_regex", "regex", self.guided_regex),
            ("guided_choice", "choices", self.guided_choice),
            ("guided_grammar", "grammar", self.guided_grammar),
            ("json_schema", "json_schema", self.json_schema),
            ("regex", "regex", self.regex),
            ("ebnf", "grammar", self.ebnf),
        )
        for name, kind, value in given:
            if value is not None:
                yield name, Constraint(**{kind: value})
