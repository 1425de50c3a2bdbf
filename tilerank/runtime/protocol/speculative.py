"""Which drafts of next tokens are made (--speculative). Imports no torch, because options are parsed with it."""

from typing import Literal

Speculative = Literal["auto", "off", "ngram", "mtp"]
"""ngram, auto: what followed the same tokens before. mtp: by the multi-token-prediction head of the checkpoint."""
