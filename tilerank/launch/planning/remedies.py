"""The option with which a model that does not fit into the memory would fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

from tilerank.loader.errors import ConfigError
from tilerank.loader.quantization_config import Quantization
from tilerank.runtime.media.registry import family_options, with_options

from ..options.model import ModelOptions
from .plan_types import Plan

if TYPE_CHECKING:
    from tilerank.loader.card import ModelCard

_FRACTIONS = (0.9, 0.95)
_CONTEXTS = (32768, 4096)
_GIB = 1 << 30

Planner = Callable[["ModelCard", ModelOptions], Plan]

Trial = tuple[str, Plan]
"""An option, and the plan with it."""


def plan_with_remedy(card: ModelCard, options: ModelOptions, planner: Planner) -> Plan:
    """Return the plan of a model; one that is refused names an option with which it would fit, if one suffices.

    planner: plans this model. Options that leave answers as they are come first.
    """
    plan = planner(card, options)
    if plan.refusal() is None:
        return plan
    trials = chain(
        _other_sizes(plan, card, options, planner),
        _other_cards(card, options, planner),
        _other_formats(plan, card, options, planner),
    )
    return replace(plan, remedy=next((option for option, trial in trials if trial.refusal() is None), None))


def _other_sizes(plan: Plan, card: ModelCard, options: ModelOptions, planner: Planner) -> Iterator[Trial]:
    from tilerank.kernels.kv_pages import PAGE_TOKENS

    if options.cached_tokens is not None:
        memory = plan.memory
        room = memory.tokens(plan.available - memory.fixed - memory.overhead, plan.window) // PAGE_TOKENS * PAGE_TOKENS
        if room > 0:
            yield f"--max-total-tokens {room}", planner(card, replace(options, cached_tokens=room))
    most = int(max(rank.media for rank in plan.ranks))
    for media in (most // 2, most // 4, most // 8, 0) if most else ():
        yield f"--mm-cache-gib {media / _GIB:g}", planner(card, replace(options, mm_cache_bytes=media))
    for context in _CONTEXTS:
        if context < card.context_length:
            yield f"--max-model-len {context}", planner(replace(card, context_length=context), options)
    for fraction in _FRACTIONS:
        if fraction > options.mem_fraction and options.cached_tokens is None:
            yield f"--mem-fraction-static {fraction:g}", planner(card, replace(options, mem_fraction=fraction))


def _other_cards(card: ModelCard, options: ModelOptions, planner: Planner) -> Iterator[Trial]:
    """Try the options of the model's family, such as one that leaves a part of the model out."""
    for option in family_options():
        for value in option.choices or ("on",):
            try:
                changed = with_options(card, {option.name: value})
            except ConfigError:
                continue  # an option of another family
            yield f"{option.name} {value}" if option.choices else option.name, planner(changed, options)


def _other_formats(plan: Plan, card: ModelCard, options: ModelOptions, planner: Planner) -> Iterator[Trial]:
    if plan.dtype == "float32":
        yield "--dtype bfloat16", planner(card, replace(options, dtype="bfloat16"))
        return
    if plan.kv_cache_dtype != "int8":
        yield "--kv-cache-dtype int8", planner(card, replace(options, kv_cache_dtype="int8"))
    if plan.quantization is None:
        yield "--quantization int8", planner(card, replace(options, quantization=Quantization("int8")))
        yield "--quantization int4", planner(card, replace(options, quantization=Quantization("int4")))
