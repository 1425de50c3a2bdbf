"""The base of request bodies of the other APIs: strict names, and fields that a chat takes unchanged."""

from collections.abc import Mapping
from typing import Any

import pydantic
from pydantic import BaseModel, ConfigDict, model_validator

from ..chat.fields import first_unknown
from ..chat.request import ChatCompletion
from ..http.body import validation_error
from ..http.errors import ApiError

MAX_ITEMS = 4096

SAMPLING = frozenset(
    {
        "allowed_token_ids",
        "bad_words",
        "cache_salt",
        "chat_template_kwargs",
        "frequency_penalty",
        "guided_choice",
        "guided_grammar",
        "guided_json",
        "guided_regex",
        "ignore_eos",
        "logit_bias",
        "min_p",
        "min_tokens",
        "presence_penalty",
        "repetition_penalty",
        "seed",
        "stop",
        "stop_token_ids",
        "structured_outputs",
        "temperature",
        "thinking_token_budget",
        "top_k",
        "top_p",
    }
)
"""Fields of a chat that other APIs take under the same name; most are additions of local servers."""


class Form(BaseModel):
    """A part of a request. Unknown fields are refused, and fields that are null take their defaults."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        given = data
        if None in data.values():
            given = {name: value for name, value in data.items() if value is not None}
        return first_unknown(cls, given) if cls.model_config["extra"] == "forbid" else given


class RequestForm(Form):
    """A whole request. Fields of SAMPLING are checked when the chat is made (`sampling`)."""

    model_config = ConfigDict(extra="allow")

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, data: Any) -> Any:
        names = data if isinstance(data, dict) else {}
        for name in sorted(names.keys() - cls.model_fields.keys() - SAMPLING):
            if names[name] is not None:
                message = f"Unsupported parameter: this server has no field '{name}' here."
                raise ApiError(400, message, param=name, code="unsupported_parameter")
        return data

    @property
    def sampling(self) -> dict[str, Any]:
        """The fields of SAMPLING that were given."""
        return {name: value for name, value in (self.model_extra or {}).items() if name in SAMPLING}


def as_chat(fields: Mapping[str, Any]) -> ChatCompletion:
    """Return the chat with these fields, those that are None left out. Raises ApiError."""
    given = {name: value for name, value in fields.items() if value is not None}
    try:
        return ChatCompletion.model_validate(given)
    except pydantic.ValidationError as e:
        raise validation_error(given, e) from e
