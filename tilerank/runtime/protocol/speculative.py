"""Which drafts of next tokens are made (--speculative). Imports no torch, because options are parsed with it."""

from typing import Literal

from .sizes import STATE_DRAFTS

Speculative = Literal["auto", "off", "ngram", "mtp", "draft"]
"""ngram, auto: what followed the same tokens before. mtp: by the multi-token-prediction head of the checkpoint. draft:
by a model of its own (--draft-model)."""


def loads_head(speculative: Speculative) -> bool:
    """Return whether the multi-token-prediction head of the checkpoint is loaded."""
    return speculative == "mtp"


def state_drafts(speculative: Speculative) -> int:
    """Return for how many drafts of a sequence there is room beside its states."""
    return 0 if speculative == "off" else STATE_DRAFTS
