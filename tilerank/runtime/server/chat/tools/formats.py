"""The table of the formats in which models write tool calls."""

from tilerank.loader.errors import TokenizerError
from tilerank.loader.tokenizer import Tokenizer

from .format import ToolFormat
from .functions import FunctionFormat, GlmDenseFormat, GlmFormat, MinimaxFormat
from .gemma4 import Gemma4Format
from .mistral import MistralFormat, MistralIdFormat, MistralListFormat
from .named import DeepSeekFormat, KimiFormat
from .objects import HermesFormat, LlamaFormat, PhiFormat
from .olmo import OlmoFormat

TOOL_FORMATS: dict[str, ToolFormat] = {
    format.name: format
    for format in (
        DeepSeekFormat(),
        FunctionFormat(),
        Gemma4Format(),
        GlmDenseFormat(),
        GlmFormat(),
        HermesFormat(),
        KimiFormat(),
        LlamaFormat(),
        MinimaxFormat(),
        MistralFormat(),
        MistralIdFormat(),
        MistralListFormat(),
        OlmoFormat(),
        PhiFormat(),
    )
}
"""By name. The first that a chat template shows is that of the model."""


def tool_format(tokenizer: Tokenizer, usual: str | None) -> ToolFormat | None:
    """Return the format that the chat template shows; None if it is unknown.

    usual: the name of the family's format, if it has one, which holds for a template that shows none.
    """
    try:
        template = tokenizer.chat_template.source
    except TokenizerError:
        return None  # a request with messages is refused with the reason
    shown = next((format for format in TOOL_FORMATS.values() if format.is_shown_by(template)), None)
    if shown is not None or DeepSeekFormat.BEGIN in template:
        return shown
    return None if usual is None else TOOL_FORMATS[usual]
