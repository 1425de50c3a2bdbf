"""Which drafts of next tokens are made (--speculative). Imports no torch, because options are parsed with it."""

from typing import Literal

Speculative = Literal["auto", "off", "ngram"]
"""auto: from every source that there is for the model. ngram: from what texts repeat."""
