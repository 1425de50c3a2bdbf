"""`tilerank bench speech`: what makes sound of codes."""

from .code2wav import add_arguments, run

__all__ = ["add_arguments", "run"]
