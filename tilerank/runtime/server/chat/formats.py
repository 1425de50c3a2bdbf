"""Chooses the format of a model's answers."""

from tilerank.loader.errors import TokenizerError
from tilerank.loader.tokenizer import Tokenizer

from .answer_format import AnswerFormat
from .harmony.format import HarmonyFormat
from .marked import MarkedFormat
from .tools.formats import tool_format


def answer_format(tokenizer: Tokenizer, usual: str | None) -> AnswerFormat:
    """Return the format in which a model writes its answers. usual: as in tool_format."""
    try:
        has_channels = tokenizer.chat_template.has_channels
    except TokenizerError:
        return MarkedFormat(None)  # a request with messages is refused with the reason
    return HarmonyFormat() if has_channels else MarkedFormat(tool_format(tokenizer, usual))
