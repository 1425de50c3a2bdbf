"""What the server needs to know of its model and operator."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from tilerank.loader.generation_config import SamplingDefaults

from ..chat.media import MediaReader
from ..chat.rendering import Renderer
from ..chat.tools import ToolParser


@dataclass(frozen=True)
class ServerSettings:
    """The settings of the HTTP server.

    model: name of the model in the API. version: of tilerank. api_key: the key that requests must have, None for none.
    sampling: values of sampling fields that a request leaves out. tool_parser: for the model's tool calls, None if
    their format is unknown. check_grammar: raises RequestError for a grammar that must not reach the engine. media:
    reads pictures and videos, None if the model does not take any. renderer: of chat templates, None for threads of
    this process. weights: the format in which ranks hold them, such as bfloat16 or int4. voices: with which the
    model speaks; none if it does not.
    """

    model: str
    version: str
    api_key: str | None
    sampling: SamplingDefaults
    tool_parser: type[ToolParser] | None
    check_grammar: Callable[[str], Awaitable[None]]
    media: MediaReader | None = None
    renderer: Renderer | None = None
    weights: str = "unknown"
    voices: tuple[str, ...] = ()
