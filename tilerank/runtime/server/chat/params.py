"""Translates the fields of a request into the parameters of the engine."""

from collections.abc import Callable
from typing import Any

from ...protocol.errors import RequestError
from ...protocol.params import SamplingParams
from ...protocol.prompt import Prompt
from ..http.errors import ApiError
from .request import Sampling


def seeds(body: Sampling, draw: Callable[[], int]) -> list[int]:
    """Return the seed of each choice. draw: returns one for a request without."""
    if body.seed is None:
        return [draw() for _ in range(body.n)]
    return [(body.seed + choice) % (1 << 64) for choice in range(body.n)]


def final_prompt(prompt: Prompt, body: Sampling, context_length: int) -> Prompt:
    """Return the prompt, with its last tokens alone if the request wants it truncated, and with the request's salt.

    Raises ApiError for a prompt with pictures that would be truncated.
    """
    limit = body.truncate_prompt_tokens
    if limit == -1:
        limit = max(context_length - max(body.limit or 1, 1), 1)
    if limit is not None and len(prompt.token_ids) > limit:
        if prompt.media:
            message = "truncate_prompt_tokens: a prompt with pictures or videos cannot be truncated"
            raise ApiError(400, message, param="truncate_prompt_tokens")
        prompt = Prompt(prompt.token_ids[-limit:])
    prompt.salt = body.salt
    return prompt


def sampling_params(
    body: Sampling,
    prompt: Prompt,
    seed: int,
    context_length: int,
    defaults: dict[str, Any],
    ends: tuple[int, ...],
    bad_words: tuple[tuple[int, ...], ...],
    grammar: str | None,
) -> SamplingParams:
    """Return the parameters of a request. defaults: of fields that it leaves out. ends: its end_token_ids.

    Raises ApiError.
    """
    length, wanted = len(prompt.token_ids), body.limit
    room = context_length - length
    if room < min(1, 1 if wanted is None else wanted):
        raise ApiError(
            400,
            f"The prompt has {length} tokens, but the context length is {context_length}, and the "
            "answer needs at least one token of it.",
            param=body.source,
            code="context_length_exceeded",
        )
    new = room if wanted is None else min(wanted, room)
    if body.min_tokens > new:
        message = f"min_tokens: expected at most {new}, the most tokens of the answer, found {body.min_tokens}"
        raise ApiError(400, message, param="min_tokens")
    requested = {name: value for name in defaults if (value := getattr(body, name)) is not None}
    try:
        return SamplingParams(
            max_new_tokens=new,
            seed=seed,
            min_new_tokens=body.min_tokens,
            presence_penalty=body.presence_penalty,
            frequency_penalty=body.frequency_penalty,
            logit_bias=body.logit_bias,
            ignore_eos=body.ignore_eos,
            end_token_ids=ends,
            stop_token_ids=tuple(body.stop_token_ids),
            allowed_token_ids=tuple(dict.fromkeys(body.allowed_token_ids or ())),
            bad_words=bad_words,
            logprobs=0 if body.alternatives is None else max(body.alternatives, 1),
            prompt_logprobs=body.scores,
            grammar=grammar if new else None,
            speech=body.speech,
            **(defaults | requested),
        )
    except RequestError as e:
        raise ApiError(400, str(e)) from e
