"""The base of request bodies of the other APIs, and the fields that a chat takes unchanged."""

from collections.abc import Mapping
from typing import Any

import pydantic
from pydantic import ConfigDict, ValidationInfo, model_validator

from ..chat.fields import Form, field_names, take_known, unsupported
from ..chat.request import ChatCompletion
from ..http.body import validation_error

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


class RequestForm(Form):
    """A whole request. Fields of SAMPLING are checked when the chat is made (`sampling`). Raises ApiError for other
    fields of a chat, which would change the answer."""

    model_config = ConfigDict(extra="allow")

    @model_validator(mode="before")
    @classmethod
    def _take_known(cls, data: Any, info: ValidationInfo) -> Any:
        if not isinstance(data, dict):
            return data
        known = field_names(cls) | SAMPLING
        for name in sorted((data.keys() & field_names(ChatCompletion)) - known):
            if data[name] is not None:
                raise unsupported(name, f"this server has no field '{name}' here.")
        return take_known(data, known, info)

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
