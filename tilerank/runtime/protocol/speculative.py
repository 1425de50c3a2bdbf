"""Which drafts of next tokens are made (--speculative). Imports no torch, because options are parsed with it."""

from collections.abc import Mapping
from typing import Literal

from .sizes import STATE_DRAFTS

Speculative = Literal["off", "ngram", "mtp", "draft"]
DRAFTS: Mapping[Speculative, str] = {
    "off": "none",
    "ngram": "tokens that texts repeat",
    "mtp": "tokens of the multi-token-prediction head",
    "draft": "tokens of the draft model",
}
"""What is drafted: by what followed the same tokens before (ngram), by the head of the checkpoint (mtp), or by a model
of its own (--draft-model)."""


def loads_head(speculative: Speculative) -> bool:
    """Return whether the multi-token-prediction head of the checkpoint is loaded."""
    return speculative == "mtp"


def state_drafts(speculative: Speculative) -> int:
    """Return for how many drafts of a sequence there is room beside its states."""
    return 0 if speculative == "off" else STATE_DRAFTS
