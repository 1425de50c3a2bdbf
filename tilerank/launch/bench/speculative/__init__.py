"""`tilerank bench speculative`: decoding with drafts against plain decoding, and the requests that it runs."""

from .command import add_arguments, run

__all__ = ["add_arguments", "run"]
