"""The fields of a request: refuses those that would change the answer and that this server does not do, by name, and
leaves out those without effect. Fields that it does not know: ignored_fields.py.

The names are those of OpenAI, Anthropic, vLLM and SGLang. docs/requests.md lists what becomes of each.
"""

from collections.abc import Callable, Collection, Mapping
from functools import cache
from typing import Annotated, Any, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, WrapValidator, model_validator

from ..http.errors import ApiError
from .ignored_fields import ignored_by, known_only

IGNORED = frozenset(
    {
        # For the operator's records, or for the speed of other servers.
        "client_metadata",
        "custom_labels",
        "guided_decoding_backend",
        "inference_geo",
        "metadata",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "speed",
        "store",
        "user",
        # Bounds of what only servers with tools of their own, or with a shorter memory, do to a conversation.
        "context_management",
        "max_tool_calls",
        # A hint that no model of this server was trained on.
        "verbosity",
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
    "container": (_ELSEWHERE, ()),
    "conversation": ("use previous_response_id of /v1/responses", ()),
    "custom_logit_processor": ("code of requests is not run", ()),
    "custom_params": ("code of requests is not run", ()),
    "data_parallel_rank": ("the server chooses the replica", ()),
    "disagg_prefill_dp_rank": ("the server chooses the replica", ()),
    "dry_multiplier": ("use the penalties", ()),
    "echo": ("/v1/completions has it", ()),
    "function_call": ("use tool_choice", ()),
    "functions": ("use tools", ()),
    "grammar": ("use guided_grammar", ()),
    "guided_whitespace_pattern": (_ELSEWHERE, ()),
    "image_max_dynamic_patch": (_MEDIA, ()),
    "input": ("/v1/responses has it", ()),
    "input_ids": ("use prompt of /v1/completions", ()),
    "kv_transfer_params": (_ELSEWHERE, ()),
    "length_penalty": ("there is no beam search", (1,)),
    "logits_processors": ("code of requests is not run", ()),
    "lora_path": (_ELSEWHERE, ()),
    "max_dynamic_patch": (_MEDIA, ()),
    "max_output_tokens": ("use max_completion_tokens", ()),
    "mcp_servers": (_ELSEWHERE, ()),
    "media_io_kwargs": (_MEDIA, ()),
    "messages": ("/v1/chat/completions has it", ()),
    "min_dynamic_patch": (_MEDIA, ()),
    "mirostat": ("use top_p or min_p", ()),
    "mm_processor_kwargs": (_MEDIA, ()),
    "modalities": ("chats have it", (["text"],)),
    "moderation": (_ELSEWHERE, ()),
    "n_predict": ("use max_tokens", ()),
    "priority": (_SCHEDULING, ()),
    "prompt": ("/v1/completions has it", ()),
    "prompt_embeds": ("expected text or token ids", ()),
    "prompt_logprobs": ("/v1/completions has it", ()),
    "repeat_penalty": ("use repetition_penalty", (1,)),
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
    "temperature": (_MEDIA, ()),
    "timestamp_granularities": ("the model gives no times", ()),
    "typical_p": ("use top_p or min_p", (1,)),
    "use_audio_in_video": (_MEDIA, ()),
    "use_beam_search": ("there is no beam search", ()),
    "video_max_dynamic_patch": (_MEDIA, ()),
    "vllm_xargs": (_ELSEWHERE, ()),
    "web_search_options": (_ELSEWHERE, ()),
    "xtc_probability": ("use top_p or min_p", ()),
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


@cache
def field_names(model: type[BaseModel]) -> frozenset[str]:
    """Return the names and the aliases of the fields of a model."""
    names = (name for own, field in model.model_fields.items() for name in (own, field.alias))
    return frozenset(name for name in names if name is not None)


class Body(BaseModel):
    """A part of a request. Unknown fields are ignored; NaN and infinity are not JSON."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)


class CheckedBody(Body):
    """A part of a request whose unknown fields are noted as ignored, or refused."""

    @model_validator(mode="before")
    @classmethod
    def _take_known(cls, data: Any, info: ValidationInfo) -> Any:
        return known_only(data, field_names(cls), info) if isinstance(data, dict) else data


class Form(CheckedBody):
    """A part of a request, as CheckedBody. Fields that are null take their defaults."""

    @model_validator(mode="before")
    @classmethod
    def _take_known(cls, data: Any, info: ValidationInfo) -> Any:
        return known_only(without_nulls(data), field_names(cls), info) if isinstance(data, dict) else data


class RequestBody(Body):
    """A whole request. Fields that are null take their defaults. Raises ApiError for fields that the server lacks."""

    @model_validator(mode="before")
    @classmethod
    def _take_known(cls, data: Any, info: ValidationInfo) -> Any:
        return take_known(data, field_names(cls), info) if isinstance(data, dict) else data


def without_nulls(given: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that are not null."""
    return {name: value for name, value in given.items() if value is not None} if None in given.values() else given


def take_known(data: dict[str, Any], known: frozenset[str], info: ValidationInfo) -> dict[str, Any]:
    """Return the fields of a whole request that the server takes. Raises ApiError for one that it knows and does not
    do, and where unknown fields are refused for the first of them."""
    given = without_nulls(data)
    others = given.keys() - known - IGNORED
    for name in sorted(others & UNSUPPORTED.keys()):
        why, neutral = UNSUPPORTED[name]
        if given[name] and given[name] not in neutral:
            raise unsupported(name, f"'{name}' is not supported: {why}.")
    unknown, ignored = sorted(others - UNSUPPORTED.keys()), ignored_by(info)
    if unknown and ignored.strict:
        raise unsupported(unknown[0], f"this server has no field '{unknown[0]}' here.")
    ignored.add(unknown)
    return {name: value for name, value in given.items() if name in known}


def unsupported(name: str, why: str) -> ApiError:
    """Return the error for a field of a request that this server does not do."""
    return ApiError(400, f"Unsupported parameter: {why}", param=name, code="unsupported_parameter")
