"""The fields of a request: refuses those that this server does not have, by name, and leaves out those without effect.

The names are those of OpenAI, vLLM and SGLang. docs/requests.md lists what becomes of each.
"""

from collections.abc import Callable, Collection, Mapping
from functools import cache
from typing import Annotated, Any, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field, WrapValidator, model_validator

from ..http.errors import ApiError

IGNORED = frozenset(
    {
        # For the operator's records, or for the speed of other servers.
        "custom_labels",
        "guided_decoding_backend",
        "metadata",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
        # Tokenizers of this server join special tokens without spaces.
        "spaces_between_special_tokens",
    }
)
_TEMPLATES = "templates of requests are not run; the model's own template takes chat_template_kwargs"
_SCHEDULING = "requests run in order of arrival"
_MEDIA = "the model's own settings apply"
_ELSEWHERE = "this server has no such feature"
UNSUPPORTED: Mapping[str, tuple[str, Collection[Any]]] = {
    "audio": ("chats have it", ()),
    "best_of": ("expected the value of n", (1,)),
    "bootstrap_host": (_ELSEWHERE, ()),
    "bootstrap_pair_key": (_ELSEWHERE, ()),
    "bootstrap_port": (_ELSEWHERE, ()),
    "bootstrap_room": (_ELSEWHERE, ()),
    "chat_template": (_TEMPLATES, ()),
    "custom_logit_processor": ("code of requests is not run", ()),
    "custom_params": ("code of requests is not run", ()),
    "data_parallel_rank": ("the server chooses the replica", ()),
    "disagg_prefill_dp_rank": ("the server chooses the replica", ()),
    "echo": ("/v1/completions has it", ()),
    "function_call": ("use tool_choice", ()),
    "functions": ("use tools", ()),
    "guided_whitespace_pattern": (_ELSEWHERE, ()),
    "image_max_dynamic_patch": (_MEDIA, ()),
    "input_ids": ("use prompt of /v1/completions", ()),
    "kv_transfer_params": (_ELSEWHERE, ()),
    "length_penalty": ("there is no beam search", (1,)),
    "logits_processors": ("code of requests is not run", ()),
    "lora_path": (_ELSEWHERE, ()),
    "max_dynamic_patch": (_MEDIA, ()),
    "media_io_kwargs": (_MEDIA, ()),
    "min_dynamic_patch": (_MEDIA, ()),
    "mm_processor_kwargs": (_MEDIA, ()),
    "modalities": ("chats have it", (["text"],)),
    "moderation": (_ELSEWHERE, ()),
    "priority": (_SCHEDULING, ()),
    "prompt_embeds": ("expected text or token ids", ()),
    "prompt_logprobs": ("/v1/completions has it", ()),
    "repetition_detection": ("use the penalties", ()),
    "return_cached_tokens_details": ("usage counts cached tokens", ()),
    "return_hidden_states": (_ELSEWHERE, ()),
    "return_routed_experts": (_ELSEWHERE, ()),
    "routed_dp_rank": ("the server chooses the replica", ()),
    "separate_reasoning": ("use include_reasoning", (True,)),
    "session_params": ("prompts that begin alike share their cache without it", ()),
    "stop_regex": ("use stop", ()),
    "stream_reasoning": ("use include_reasoning", (True,)),
    "suffix": ("models of this server do not fill in", ()),
    "use_audio_in_video": (_MEDIA, ()),
    "use_beam_search": ("there is no beam search", ()),
    "verbosity": ("the model has no such setting", ("medium",)),
    "video_max_dynamic_patch": (_MEDIA, ()),
    "vllm_xargs": (_ELSEWHERE, ()),
    "web_search_options": (_ELSEWHERE, ()),
}
"""Why a field is refused, and the values with which it has no effect; false, 0 and empty values have none either."""


T = TypeVar("T")
ListOf: TypeAlias = Annotated[list[T], Field(fail_fast=True)]
"""A list whose check stops at the first invalid element. An error object for each would take time and memory."""


def _first_error(value: Any, check: Callable[[Any], Any]) -> Any:
    if isinstance(value, dict):
        for name, one in value.items():
            check({name: one})
    return check(value)


FIRST_ERROR = WrapValidator(_first_error)
"""Stops the check of a dict at the first invalid entry, as ListOf does for lists."""


def first_unknown(model: type[BaseModel], given: dict[str, Any]) -> dict[str, Any]:
    """Return `given` with only the first of the fields that `model` does not have: it is refused for this one."""
    known = _names(model)
    if given.keys() <= known:
        return given
    unknown = next(name for name in given if name not in known)
    return {name: value for name, value in given.items() if name in known or name == unknown}


@cache
def _names(model: type[BaseModel]) -> frozenset[str | None]:
    """Return the names and the aliases of the fields of a model."""
    return frozenset(name for own, field in model.model_fields.items() for name in (own, field.alias))


class Body(BaseModel):
    """A part of a request. Unknown fields are ignored; NaN and infinity are not JSON."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)


class StrictBody(Body):
    """A part of a request that has no other fields."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, data: Any) -> Any:
        return first_unknown(cls, data) if isinstance(data, dict) else data


class RequestBody(Body):
    """A whole request. Fields that are null take their defaults. Raises ApiError for fields that the server lacks."""

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        given = {name: value for name, value in data.items() if value is not None}
        for name in sorted(given.keys() - cls.model_fields.keys() - IGNORED):
            if name not in UNSUPPORTED:
                message = f"Unsupported parameter: this server has no field '{name}'."
                raise ApiError(400, message, param=name, code="unsupported_parameter")
            why, neutral = UNSUPPORTED[name]
            if given[name] and given[name] not in neutral:
                message = f"Unsupported parameter: '{name}' is not supported: {why}."
                raise ApiError(400, message, param=name, code="unsupported_parameter")
        return given
