"""What all endpoints share: the engine, the tokenizer, limits, and the reading of request bodies."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import pydantic
from starlette.requests import ClientDisconnect, Request

from tilerank.loader.tokenizer import Tokenizer

from ..chat.prompts import PromptBuilder
from ..chat.rendering import ThreadRenderer
from ..http.body import MAX_BODY, MAX_MEDIA_BODY, read_json, validation_error
from ..http.errors import ApiError
from ..http.media_budget import MediaBudget
from ..link.client import EngineClient
from ..monitoring.metrics import Metrics
from ..monitoring.recent_requests import RecentRequests
from .settings import ServerSettings

Body = TypeVar("Body", bound=pydantic.BaseModel)


class Service:
    """The state of one server. started: Unix time in seconds."""

    def __init__(self, client: EngineClient, tokenizer: Tokenizer, settings: ServerSettings) -> None:
        self.client = client
        self.tokenizer = tokenizer
        self.settings = settings
        self.started = int(time.time())
        self.metrics = Metrics(client)
        self.recent = RecentRequests()
        self.budget = MediaBudget()
        renderer = settings.renderer or ThreadRenderer(tokenizer)
        self.prompts = PromptBuilder(tokenizer, settings.model, settings.tool_parser, settings.media, renderer)

    @property
    def context_length(self) -> int | None:
        """The context length in tokens; None if no engine is ready."""
        state = self.client.state
        return state.context_length if state else None

    async def body(self, request: Request, kind: type[Body], *, media: bool = False) -> Body:
        """Read and check the body of a request. media: may it hold pictures and videos? Raises ApiError."""
        takes_media = media and self.settings.media is not None
        data = await read_json(request, MAX_MEDIA_BODY if takes_media else MAX_BODY)
        try:
            body = kind.model_validate_json(data)
        except pydantic.ValidationError as e:
            raise validation_error(data, e) from e
        self.check_model(getattr(body, "model", None))
        return body

    def check_model(self, requested: str | None) -> None:
        """Raise ApiError if a request names another model than the one that is served."""
        model = self.settings.model
        if requested is not None and requested != model:
            message = f"There is no model {requested!r}; this server serves {model!r}."
            raise ApiError(404, message, param="model", code="model_not_found")


@contextmanager
def while_connected(request: Request) -> Iterator[None]:
    """Cancel what the context awaits, and raise ClientDisconnect, as soon as the client disconnects.

    The request's body must have been read. Without this, a disconnect is noticed only when the answer is sent.
    """
    task = asyncio.current_task()
    assert task is not None
    is_gone = False

    async def watch() -> None:
        nonlocal is_gone
        while (await request.receive())["type"] != "http.disconnect":
            pass
        is_gone = True
        task.cancel()

    watching = asyncio.create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        if not is_gone or task.uncancel():  # the server cancels the request as well
            raise
        raise ClientDisconnect from None
    finally:
        watching.cancel()
